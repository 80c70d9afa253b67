//! A coordinator of the load's own, that ends with it, however the load ends.
//!
//! Its configuration, certificates and keys are files in memory that it inherits (memfd_create(2)):
//! whatever signal ends the load leaves nothing on a disk.

use std::ffi::CStr;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::unix::pipe;

use super::tls::Identities;
use super::{LoadError, LoadPlan, LoadTls};

/// How long it may take to say where it listens.
const START_MAX: Duration = Duration::from_secs(30);
/// How long after its streams have ended its end is waited for, to say how it came.
const END_MAX: Duration = Duration::from_secs(2);

/// A file in memory, and the path by which a child opens it.
pub(super) struct Handed {
    /// Inherited by children: it is closed here when the load has ended.
    _file: File,
    pub(super) path: String,
}

impl Handed {
    pub(super) fn new(name: &CStr, text: &str) -> std::io::Result<Self> {
        let mut file = File::from(memfd_create(name, MFdFlags::empty())?);
        file.write_all(text.as_bytes())?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        Ok(Self { _file: file, path })
    }
}

pub(super) struct Own {
    program: PathBuf,
    child: Child,
    out: Option<ChildStdout>,
    scheme: &'static str,
    _files: Vec<Handed>,
}

impl Own {
    /// With TLS, if the plan says so; then with what its daemons connect with, too. Call it on a
    /// thread that lives as long as what it gives: the coordinator ends with that thread.
    pub(super) fn start(plan: &LoadPlan) -> Result<(Self, Option<Identities>), LoadError> {
        let program = beside_this_program("laxity-coordinator");
        let fail = |cause: String| LoadError::Start {
            program: program.clone(),
            cause,
        };
        let (identities, section, mut files) = match plan.tls {
            LoadTls::ThrowAway => {
                let made = Identities::throw_away(plan.daemons);
                let (identities, section, files) = made.map_err(|error| fail(error.to_string()))?;
                (Some(identities), section, files)
            }
            _ => (None, String::new(), Vec::new()),
        };
        let configuration = Handed::new(c"coordinator.toml", &section);
        let configuration = configuration.map_err(|cause| fail(cause.to_string()))?;
        let mut child = Command::new(&program)
            .args(["--config", &configuration.path])
            .args(["--listen", "127.0.0.1:0", "--log", "warn"])
            .args(["--parent", &std::process::id().to_string()])
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .map_err(|cause| fail(cause.to_string()))?;
        files.push(configuration);
        let own = Self {
            out: child.stdout.take(),
            program,
            child,
            scheme: identities.as_ref().map_or("http", |_| "https"),
            _files: files,
        };
        Ok((own, identities))
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where it listens, once it says so.
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
            Some(address) => Ok(format!("{}://{address}", self.scheme)),
            None => Err(LoadError::Start {
                program: self.program.clone(),
                cause: self
                    .ended()
                    .await
                    .unwrap_or_else(|| "it did not say where it listens".into()),
            }),
        }
    }

    /// How it has ended by itself, if it has.
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
    let beside = here
        .as_deref()
        .and_then(Path::parent)
        .map(|at| at.join(name));
    beside
        .filter(|path| path.exists())
        .unwrap_or_else(|| name.into())
}
