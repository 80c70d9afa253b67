//! The `laxity-coordinator` of a round. No client may depend on it.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::Signal;

use crate::child::Guarded;
use crate::error::LabError;

/// A coordinator with an address of its own on loopback, which it keeps when it starts again.
pub(super) struct RoundCoordinator {
    program: PathBuf,
    log: PathBuf,
    pub(super) address: SocketAddr,
    process: Option<Guarded>,
}

impl RoundCoordinator {
    pub(super) fn start(program: &Path, folder: &Path) -> Result<Self, LabError> {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let mut coordinator = Self {
            program: program.to_owned(),
            log: folder.join("coordinator.log"),
            address: free.map_err(LabError::system("taking a port"))?,
            process: None,
        };
        coordinator.launch()?;
        Ok(coordinator)
    }

    pub(super) fn launch(&mut self) -> Result<(), LabError> {
        if self.process.is_some() {
            return Ok(());
        }
        // A coordinator normally runs on another host, so it must not take the processors of this
        // one.
        let mut command = Command::new("nice");
        command
            .args(["-n", "19"])
            .arg(&self.program)
            .args(["--insecure", "--log", "warn", "--listen", &self.address.to_string()])
            .env_remove("LAXITY_COORDINATOR_CONFIG");
        self.process = Some(Guarded::start("laxity-coordinator", &mut command, &self.log)?);
        Ok(())
    }

    pub(super) fn kill(&mut self) {
        self.process = None;
    }

    pub(super) fn signal(&mut self, signal: Signal) {
        if let Some(process) = &mut self.process {
            process.signal(signal);
        }
    }

    /// Returns what is wrong if the coordinator ended by itself.
    pub(super) fn look(&mut self) -> Option<String> {
        let status = self.process.as_mut()?.ended()?;
        let process = self.process.take()?;
        Some(format!("laxity-coordinator ended by itself: {status}{}", process.tail()))
    }
}
