//! The `laxity-coordinator` of a round. No client may depend on it.

use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::daemons::tail;
use crate::error::LabError;

/// A coordinator with an address of its own on loopback, which it keeps when it starts again.
pub(super) struct RoundCoordinator {
    program: PathBuf,
    log: PathBuf,
    pub(super) address: SocketAddr,
    child: Option<Child>,
}

impl RoundCoordinator {
    pub(super) fn start(program: &Path, folder: &Path) -> Result<Self, LabError> {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let mut coordinator = Self {
            program: program.to_owned(),
            log: folder.join("coordinator.log"),
            address: free.map_err(LabError::system("taking a port"))?,
            child: None,
        };
        coordinator.launch()?;
        Ok(coordinator)
    }

    /// Starts the process, unless it runs.
    pub(super) fn launch(&mut self) -> Result<(), LabError> {
        if self.child.is_some() {
            return Ok(());
        }
        let log = File::options().create(true).append(true).open(&self.log);
        let log = log.map_err(LabError::file("opening", &self.log))?;
        let errors = log.try_clone().map_err(LabError::system("sharing a log"))?;
        // A coordinator normally runs on another host, so it must not take the processors of this
        // one.
        let child = Command::new("nice")
            .args(["-n", "19"])
            .arg(&self.program)
            .args(["--insecure", "--log", "warn", "--listen", &self.address.to_string()])
            .env_remove("LAXITY_COORDINATOR_CONFIG")
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            .spawn();
        self.child = Some(child.map_err(LabError::start("laxity-coordinator"))?);
        Ok(())
    }

    pub(super) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub(super) fn signal(&self, signal: Signal) {
        if let Some(child) = &self.child {
            // The child is not reaped yet, so the id is its own.
            let _ = kill(Pid::from_raw(child.id().cast_signed()), signal);
        }
    }

    /// Returns what is wrong if the coordinator ended by itself.
    pub(super) fn look(&mut self) -> Option<String> {
        let status = self.child.as_mut()?.try_wait().ok()??;
        self.child = None;
        Some(format!("laxity-coordinator ended by itself: {status}{}", tail(&self.log)))
    }
}

impl Drop for RoundCoordinator {
    fn drop(&mut self) {
        self.kill();
    }
}
