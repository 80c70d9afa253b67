//! Child processes: those with a log, those with an output, and waiting for what they do.

use std::fmt::Display;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use crate::error::LabError;

const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Locks a mutex, also after a thread that held it has panicked.
pub(crate) fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks for something until it is there, at most for `limit`, with pauses of `every`.
pub(crate) fn poll<T>(
    limit: Duration,
    every: Duration,
    mut look: impl FnMut() -> Option<T>,
) -> Option<T> {
    let give_up = Instant::now() + limit;
    loop {
        let found = look();
        if found.is_some() || Instant::now() > give_up {
            return found;
        }
        std::thread::sleep(every);
    }
}

/// Runs a program with an input, and returns its output without white space around it. `name` is
/// the program in errors.
pub(crate) fn output(
    name: impl Display,
    command: &mut Command,
    input: &str,
) -> Result<String, LabError> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(LabError::start(&name))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that stops reading reports why. Its message is read below.
        let _ = stdin.write_all(input.as_bytes());
    }
    succeeded(name, &child.wait_with_output().map_err(LabError::system("waiting for a program"))?)
}

/// Runs a program with the input and output that the command says, and returns what it captured.
pub(crate) fn run(command: &mut Command) -> Result<String, LabError> {
    let name = format!("{command:?}");
    let output = command.output().map_err(LabError::start(&name))?;
    succeeded(name, &output)
}

fn succeeded(name: impl Display, output: &Output) -> Result<String, LabError> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if !output.status.success() {
        let how = format!("failed ({}): {}", output.status, text(&output.stderr));
        return Err(LabError::program(name, how));
    }
    Ok(text(&output.stdout))
}

/// Returns the last lines of a log, for an error.
pub(crate) fn tail(log: &Path) -> String {
    const LINES: usize = 15;
    let Ok(text) = fs::read(log) else { return String::new() };
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(LINES)..];
    if last.is_empty() { String::new() } else { format!("\n  {}", last.join("\n  ")) }
}

pub(crate) fn descriptors(pid: u32) -> Option<usize> {
    Some(fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count())
}

/// Returns a number of a process's `status` file, such as `VmRSS`, which is in KiB.
pub(crate) fn status_number(pid: u32, name: &str) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    value.split_whitespace().next()?.parse().ok()
}

/// A process that writes a log. Dropping this kills it, and its process group if it leads one.
#[derive(Debug)]
pub(crate) struct Guarded {
    child: Child,
    leads_group: bool,
    pub(crate) log: PathBuf,
}

impl Guarded {
    /// Starts a program without input. `name` is the program in errors.
    pub(crate) fn start(
        name: impl Display,
        command: &mut Command,
        log: &Path,
    ) -> Result<Self, LabError> {
        let out = File::options().create(true).append(true).open(log);
        let out = out.map_err(LabError::file("opening", log))?;
        let errors = out.try_clone().map_err(LabError::system("sharing a log"))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(errors)
            .spawn()
            .map_err(LabError::start(name))?;
        Ok(Self { child, leads_group: false, log: log.to_owned() })
    }

    /// Starts a program as the leader of a process group of its own.
    pub(crate) fn start_group(
        name: impl Display,
        command: &mut Command,
        log: &Path,
    ) -> Result<Self, LabError> {
        let mut leader = Self::start(name, command.process_group(0), log)?;
        leader.leads_group = true;
        Ok(leader)
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    pub(crate) fn signal(&mut self, signal: Signal) {
        if self.ended().is_none() {
            let _ = kill(self.pid(), signal);
        }
    }

    /// Returns how the process ended, or `None` if it runs. One that can't be waited for has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap_or_else(|_| Some(ExitStatus::from_raw(0)))
    }

    /// Waits until the process ends, at most until `give_up`.
    pub(crate) fn await_end(&mut self, give_up: Instant) -> Option<ExitStatus> {
        poll(give_up.saturating_duration_since(Instant::now()), LOOK_EVERY, || self.ended())
    }

    pub(crate) fn kill(&mut self) {
        // Another process may have the number of a group that is gone.
        if core::mem::take(&mut self.leads_group) {
            let _ = killpg(self.pid(), Signal::SIGKILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub(crate) fn tail(&self) -> String {
        tail(&self.log)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.kill();
    }
}
