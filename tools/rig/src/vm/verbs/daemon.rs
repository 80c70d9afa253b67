//! `laxityd` in the guest: started, asked, killed.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use laxity_wire::{ControlClient, Status};
use nix::sys::signal::Signal;

use super::{Lab, Programs};
use crate::vm::guest::Guest;
use crate::vm::task::Running;

const CONTROL: &str = "/run/laxity/control.sock";
const TIGHT_CONTROL: &str = "/run/laxity/tight-control.sock";
/// Where clients find the daemon that lets next to nothing go.
pub(super) const TIGHT_SOCKET: &str = "/run/laxity/tight.sock";
const START_WITHIN: Duration = Duration::from_secs(20);
/// Longer than any job.
const FOR_EVER: Duration = Duration::from_secs(24 * 3600);

/// DSCPs of the levels, the highest first, and of the scavenger: as the daemon's defaults.
pub(super) const LEVELS: [u8; 8] = [46, 34, 26, 18, 18, 10, 10, 10];
pub(super) const SCAVENGER: u8 = 8;
/// Where collectives are.
pub(super) const COLLECTIVE: u8 = 34;
/// The lowest that is not the scavenger's: where the last stage is.
pub(super) const P2D: u8 = 10;

/// 200 Mbit/s is less than the guest can do, so work requests wait; and the scheduler's thread does
/// not spin, having two emulated processors to share.
fn config() -> String {
    format!(
        "mode = \"enforce\"\nmetrics = \"\"\n[scheduler]\nspin_us = 0\n\
         [levels]\ncount = {}\ndscp = {LEVELS:?}\nscavenger_dscp = {SCAVENGER}\n\
         [[nic]]\nname = \"rxe0\"\nrate = \"200Mbit\"\n\
         [[nic]]\nname = \"rxe1\"\nrate = \"200Mbit\"\n",
        LEVELS.len(),
    )
}

/// A running daemon; killed when dropped.
#[derive(Debug)]
pub(super) struct Daemon {
    running: Running,
}

impl Daemon {
    /// Starts one that enforces, at a rate at which work requests wait.
    pub(super) fn start(lab: &Lab<'_>) -> anyhow::Result<Self> {
        let path = Path::new(scratch!("laxityd.toml"));
        Self::start_with(lab.guest, lab.programs, CONTROL, path, &config())
    }

    /// Starts one that lets 128 bytes be in flight at a time, at sockets of its own.
    pub(super) fn start_tight(lab: &Lab<'_>) -> anyhow::Result<Self> {
        let tight = "rate = \"200kbit\"\nchunk = \"128\"\nwindow = \"128\"\n";
        let text = format!(
            "socket = \"{TIGHT_SOCKET}\"\ncontrol = \"{TIGHT_CONTROL}\"\n{}",
            config().replace("rate = \"200Mbit\"\n", tight),
        );
        let path = Path::new(scratch!("laxityd.tight.toml"));
        Self::start_with(lab.guest, lab.programs, TIGHT_CONTROL, path, &text)
    }

    /// Starts one with this configuration, which is written to `path`.
    pub(super) fn start_with(
        guest: &Guest,
        programs: &Programs,
        control: &str,
        path: &Path,
        config: &str,
    ) -> anyhow::Result<Self> {
        fs::write(path, config).with_context(|| format!("writing {}", path.display()))?;
        let argv = [&programs.laxityd, Path::new("--config"), path];
        let argv = argv.map(|word| word.display().to_string());
        let mut running = guest.task(argv, FOR_EVER).start()?;
        let give_up = Instant::now() + START_WITHIN;
        loop {
            // The socket of one that was killed is still there.
            match status_at(control) {
                Ok(status) if status.pid == running.id() => return Ok(Self { running }),
                _ if !running.is_running() || Instant::now() > give_up => bail!(
                    "laxityd does not come up in the guest; it said: {}",
                    running.said()
                ),
                _ => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// SIGKILL; returns when it is gone.
    pub(super) fn kill(self) {
        self.running.signal(Signal::SIGKILL);
        self.running.kill();
    }

    /// Open file descriptors and resident memory (KiB).
    pub(super) fn footprint(&self) -> anyhow::Result<(usize, u64)> {
        let process = Path::new("/proc").join(self.running.id().to_string());
        let descriptors = fs::read_dir(process.join("fd"))
            .context("the daemon's file descriptors")?
            .count();
        let status = fs::read_to_string(process.join("status")).context("the daemon's memory")?;
        let resident = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .and_then(|rest| rest.split_whitespace().next())
            .and_then(|kib| kib.parse().ok())
            .context("no VmRSS in the daemon's status")?;
        Ok((descriptors, resident))
    }

    /// What it logged.
    pub(super) fn log(&self) -> String {
        self.running.said()
    }
}

/// What the daemon at the default socket says.
pub(super) fn status() -> anyhow::Result<Status> {
    status_at(CONTROL)
}

fn status_at(control: &str) -> anyhow::Result<Status> {
    let mut client = ControlClient::connect(control, Duration::from_secs(10))?;
    Ok(client.status()?)
}
