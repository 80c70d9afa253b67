//! `laxityd` in the guest: starts it, queries it and kills it.

use std::fs;
use std::path::Path;
use std::time::Duration;

use laxity_wire::{ControlClient, Status};
use nix::sys::signal::Signal;

use super::{Lab, Programs};
use crate::child::{descriptors, status_number};
use crate::error::LabError;
use crate::vm::guest::Guest;
use crate::vm::task::{PATIENCE, Running};

const CONTROL: &str = "/run/laxity/control.sock";
const TIGHT_CONTROL: &str = "/run/laxity/tight-control.sock";
pub(super) const TIGHT_SOCKET: &str = "/run/laxity/tight.sock";
/// A time limit that is longer than any job.
const FOR_EVER: Duration = Duration::from_secs(24 * 3600);

/// DSCPs of the levels, highest first, and of the scavenger. They are the daemon's defaults.
pub(super) const LEVELS: [u8; 8] = [46, 34, 26, 18, 18, 10, 10, 10];
pub(super) const SCAVENGER: u8 = 8;
pub(super) const COLLECTIVE: u8 = 34;
pub(super) const KV_REUSE: u8 = 26;
pub(super) const P2D: u8 = 10;

/// Returns the configuration. The guest can send more than 200 Mbit/s, so work requests wait. The
/// scheduler thread does not spin, because the guest has only two emulated processors.
fn config() -> String {
    format!(
        "mode = \"enforce\"\nmetrics = \"\"\n[scheduler]\nspin_us = 0\n\
         [levels]\ncount = {}\ndscp = {LEVELS:?}\nscavenger_dscp = {SCAVENGER}\n\
         [[nic]]\nname = \"rxe0\"\nrate = \"200Mbit\"\n\
         [[nic]]\nname = \"rxe1\"\nrate = \"200Mbit\"\n",
        LEVELS.len(),
    )
}

/// A running daemon. Dropping this kills it.
#[derive(Debug)]
pub(super) struct GuestDaemon {
    running: Running,
}

impl GuestDaemon {
    pub(super) fn start(lab: &Lab<'_>) -> Result<Self, LabError> {
        let path = Path::new(scratch!("laxityd.toml"));
        Self::start_with(lab.guest, lab.programs, CONTROL, path, &config())
    }

    pub(super) fn start_tight(lab: &Lab<'_>) -> Result<Self, LabError> {
        let tight = "rate = \"200kbit\"\nchunk = \"128\"\nwindow = \"128\"\n";
        let text = format!(
            "socket = \"{TIGHT_SOCKET}\"\ncontrol = \"{TIGHT_CONTROL}\"\n{}",
            config().replace("rate = \"200Mbit\"\n", tight),
        );
        let path = Path::new(scratch!("laxityd.tight.toml"));
        Self::start_with(lab.guest, lab.programs, TIGHT_CONTROL, path, &text)
    }

    pub(super) fn start_with(
        guest: &Guest,
        programs: &Programs,
        control: &str,
        path: &Path,
        config: &str,
    ) -> Result<Self, LabError> {
        fs::write(path, config).map_err(LabError::file("writing", &path))?;
        let argv = [&programs.laxityd, Path::new("--config"), path];
        let argv = argv.map(|word| word.display().to_string());
        let mut running = guest.task(argv, FOR_EVER).start()?;
        // The socket of a killed daemon still exists, so the process id is compared.
        let id = running.id();
        running
            .until(|| status_at(control).is_ok_and(|status| status.pid == id).then_some(()))
            .ok_or_else(|| {
                let how = format!("does not come up in the guest; it said: {}", running.said());
                LabError::program("laxityd", how)
            })?;
        Ok(Self { running })
    }

    /// Kills the daemon with SIGKILL, and returns when it has ended.
    pub(super) fn kill(self) {
        self.running.signal(Signal::SIGKILL);
        self.running.kill();
    }

    /// Returns the number of open file descriptors and the resident memory in KiB.
    pub(super) fn footprint(&self) -> Result<(usize, u64), LabError> {
        let pid = self.running.id();
        descriptors(pid).zip(status_number(pid, "VmRSS")).ok_or_else(|| {
            LabError::unreadable("the daemon's descriptors and memory", "it has none in /proc")
        })
    }

    pub(super) fn log(&self) -> String {
        self.running.said()
    }
}

pub(super) fn status() -> Result<Status, LabError> {
    status_at(CONTROL)
}

fn status_at(control: &str) -> Result<Status, LabError> {
    let mut client = ControlClient::connect(control, PATIENCE)?;
    Ok(client.status()?)
}
