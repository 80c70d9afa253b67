//! The keeper process, which ends QEMU when the caller ends.
//!
//! ```text
//! the caller ──pipe──▶ keeper ──▶ QEMU
//! ```
//!
//! The keeper starts QEMU and owns the folder with QEMU's files. The kernel closes the pipe however
//! the caller ends (return, Ctrl-C, SIGKILL). The keeper then kills QEMU and removes the folder. It
//! has a process group of its own, so Ctrl-C only reaches the caller.

use std::ffi::OsString;
use std::fs;
use std::io::{BufRead as _, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::child::Guarded;
use crate::error::LabError;
use crate::sandbox;

const LOOK_EVERY: Duration = Duration::from_millis(10);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Charge {
    pub program: PathBuf,
    pub args: Vec<OsString>,
    pub log: PathBuf,
    pub folder: PathBuf,
}

/// *vm-keeper*: runs QEMU as the first line of standard input says, until that input ends.
pub fn keep() -> Result<(), LabError> {
    let mut stdin = std::io::stdin().lock();
    let mut line = String::new();
    stdin.read_line(&mut line).map_err(LabError::system("reading what to keep"))?;
    let charge: Charge = serde_json::from_str(&line)
        .map_err(|error| LabError::unreadable("reading what to keep", error))?;
    drop(stdin);
    let (gone_in, gone) = channel::<()>();
    std::thread::spawn(move || {
        let mut stdin = std::io::stdin().lock();
        let mut rest = [0; 64];
        while let Ok(1..) = stdin.read(&mut rest) {}
        drop(gone_in);
    });
    let kept = watch(&charge, || match gone.recv_timeout(LOOK_EVERY) {
        Ok(()) | Err(RecvTimeoutError::Timeout) => false,
        Err(RecvTimeoutError::Disconnected) => true,
    });
    if kept.is_ok() {
        // The caller may still read files in the folder.
        while gone.recv().is_ok() {}
    }
    let removed =
        fs::remove_dir_all(&charge.folder).map_err(LabError::file("removing", &charge.folder));
    kept.and(removed)
}

/// Runs QEMU until it ends or `caller_is_gone` returns true.
fn watch(charge: &Charge, mut caller_is_gone: impl FnMut() -> bool) -> Result<(), LabError> {
    let mut command = Command::new(&charge.program);
    command.args(&charge.args);
    let mut qemu = Guarded::start(charge.program.display(), &mut command, &charge.log)?;
    while !caller_is_gone() {
        if let Some(status) = qemu.ended() {
            // A caller that does not read is no error.
            let _ = writeln!(std::io::stdout(), "{}", status.into_raw());
            break;
        }
    }
    Ok(())
}

/// The caller's end of a keeper. Dropping it ends QEMU and removes the folder.
#[derive(Debug)]
pub struct Keeper {
    child: Child,
}

impl Keeper {
    /// Starts a keeper. The returned output has one line after QEMU ended: its status, as the
    /// kernel encodes it.
    pub fn start(charge: &Charge) -> Result<(Self, ChildStdout), LabError> {
        let start = || -> Result<(Self, ChildStdout), LabError> {
            let mut child = sandbox::internal("vm-keeper")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .process_group(0)
                .spawn()
                .map_err(LabError::start("this program"))?;
            let events = child.stdout.take().ok_or_else(LabError::no_pipe)?;
            let line = serde_json::to_string(charge)? + "\n";
            let stdin = child.stdin.as_mut().ok_or_else(LabError::no_pipe)?;
            stdin.write_all(line.as_bytes()).map_err(LabError::system("telling the keeper"))?;
            Ok((Self { child }, events))
        };
        start().inspect_err(|_| {
            let _ = fs::remove_dir_all(&charge.folder);
        })
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}
