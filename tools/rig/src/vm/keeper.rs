//! The process that QEMU cannot outlive.
//!
//! ```text
//! the caller ──pipe──▶ keeper ──▶ QEMU
//! ```
//!
//! The keeper starts QEMU and owns the folder with its files. When the pipe ends, which the kernel
//! sees to for whatever reason the caller goes (return, Ctrl-C, SIGKILL), it kills QEMU and removes
//! the folder. It is in a process group of its own, so Ctrl-C reaches the caller only.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead as _, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::sandbox;

/// How often QEMU's end is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// What to keep.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Charge {
    /// QEMU.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// File that takes what QEMU itself says.
    pub log: PathBuf,
    /// Folder to remove at the end.
    pub folder: PathBuf,
}

/// How QEMU ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Exit status, unless a signal ended it.
    pub code: Option<i32>,
    /// Signal that ended it.
    pub signal: Option<i32>,
}

/// *vm-keeper*: keeps what its standard input's first line says until that input ends.
///
/// # Errors
/// The line cannot be read, or QEMU cannot be started.
pub fn keep() -> anyhow::Result<()> {
    let mut stdin = std::io::stdin().lock();
    let mut line = String::new();
    stdin.read_line(&mut line).context("reading what to keep")?;
    let charge: Charge = serde_json::from_str(&line).context("reading what to keep")?;
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
        // The caller may still read what is in the folder.
        while gone.recv().is_ok() {}
    }
    let removed = fs::remove_dir_all(&charge.folder)
        .with_context(|| format!("removing {}", charge.folder.display()));
    kept.and(removed)
}

/// Runs QEMU until it ends or `caller_is_gone`.
fn watch(charge: &Charge, mut caller_is_gone: impl FnMut() -> bool) -> anyhow::Result<()> {
    let log =
        File::create(&charge.log).with_context(|| format!("creating {}", charge.log.display()))?;
    let mut qemu = Command::new(&charge.program)
        .args(&charge.args)
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("the log")?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("starting {}", charge.program.display()))?;
    loop {
        if let Some(status) = qemu.try_wait().context("waiting for QEMU")? {
            let ended = Ended {
                code: status.code(),
                signal: status.signal(),
            };
            // Nobody listening is no reason to fail.
            let _ = writeln!(std::io::stdout(), "{}", serde_json::to_string(&ended)?);
            return Ok(());
        }
        if caller_is_gone() {
            let _ = qemu.kill();
            let _ = qemu.wait();
            return Ok(());
        }
    }
}

/// The caller's end of a keeper. Dropped, it ends QEMU and removes the folder.
#[derive(Debug)]
pub struct Keeper {
    child: Child,
}

impl Keeper {
    /// Starts a keeper; the other value brings one line, an [`Ended`], when QEMU ends.
    ///
    /// # Errors
    /// This program cannot be run again. The folder is removed.
    pub fn start(charge: &Charge) -> anyhow::Result<(Self, ChildStdout)> {
        let start = || -> anyhow::Result<(Self, ChildStdout)> {
            let mut child = sandbox::internal("vm-keeper")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .process_group(0)
                .spawn()
                .context("running this program again")?;
            let events = child.stdout.take().context("the keeper has no output")?;
            let line = serde_json::to_string(charge)? + "\n";
            let stdin = child.stdin.as_mut().context("the keeper has no input")?;
            stdin
                .write_all(line.as_bytes())
                .context("telling the keeper")?;
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
