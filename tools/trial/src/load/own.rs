//! A coordinator that the load starts and that always ends with the load. Its CPU time and memory
//! are from `/proc`.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::unix::pipe;

use super::LoadError;

const START_MAX: Duration = Duration::from_secs(30);
const END_MAX: Duration = Duration::from_secs(2);

pub(super) struct Own {
    program: PathBuf,
    child: Child,
    out: Option<ChildStdout>,
}

impl Own {
    pub(super) fn start() -> Result<Self, LoadError> {
        let program = beside_this_program("laxity-coordinator");
        let fail = |cause: String| LoadError::Start { program: program.clone(), cause };
        // An empty configuration that the child inherits, so that the host's own is not read.
        let empty = memfd_create(c"coordinator.toml", MFdFlags::empty());
        let empty = empty.map_err(|errno| fail(errno.to_string()))?;
        let mut child = Command::new(&program)
            .args(["--config", &format!("/proc/self/fd/{}", empty.as_raw_fd())])
            .args(["--listen", "127.0.0.1:0", "--log", "warn"])
            .args(["--parent", &std::process::id().to_string()])
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .map_err(|cause| fail(cause.to_string()))?;
        Ok(Self { out: child.stdout.take(), program, child })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the coordinator listens, and returns its URL.
    pub(super) async fn endpoint(&mut self) -> Result<String, LoadError> {
        let mut line = String::new();
        let read = async {
            let out = self.out.take().map(OwnedFd::from);
            let out = pipe::Receiver::from_owned_fd(out?).ok()?;
            let mut lines = BufReader::new(out);
            lines.read_line(&mut line).await.ok()
        };
        let _ = tokio::time::timeout(START_MAX, read).await;
        match line.trim().strip_prefix("listening on ") {
            Some(address) => Ok(format!("http://{address}")),
            None => {
                let (program, ended) = (self.program.clone(), self.ended().await);
                let cause = ended.unwrap_or_else(|| "it did not say where it listens".into());
                Err(LoadError::Start { program, cause })
            }
        }
    }

    /// Returns how the coordinator ended, if it has ended by itself.
    pub(super) async fn ended(&mut self) -> Option<String> {
        let wait = async {
            loop {
                match self.child.try_wait() {
                    Ok(None) => tokio::time::sleep(Duration::from_millis(10)).await,
                    Ok(Some(status)) => return Some(status),
                    Err(_) => return None,
                }
            }
        };
        let status = tokio::time::timeout(END_MAX, wait).await.ok()??;
        let signal = status.signal().and_then(|nth| Signal::try_from(nth).ok());
        Some(match signal {
            Some(signal) => format!(
                "the coordinator that the load had started was killed by {signal}; start the load \
                 again"
            ),
            None => format!(
                "the coordinator that the load had started ended by itself ({status}); what it \
                 logged is above"
            ),
        })
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn beside_this_program(name: &str) -> PathBuf {
    let here = std::env::current_exe().ok();
    let beside = here.as_deref().and_then(Path::parent).map(|at| at.join(name));
    beside.filter(|path| path.exists()).unwrap_or_else(|| name.into())
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Usage {
    pub(super) rss_mib: f64,
    pub(super) cpu_s: f64,
}

pub(super) fn usage(pid: u32) -> Option<Usage> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let rss_kib: f64 = rss.split_whitespace().next()?.parse().ok()?;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Fields are counted after the name, which is in parentheses and may contain anything. Fields
    // 14 and 15 of the line are utime and stime.
    let (_, fields) = stat.rsplit_once(") ")?;
    let ticks = |index: usize| fields.split(' ').nth(index)?.parse::<f64>().ok();
    Some(Usage { rss_mib: rss_kib / 1024.0, cpu_s: (ticks(11)? + ticks(12)?) / 100.0 })
}
