//! What a worker process of a fault campaign is started with, how it hears commands, and how it
//! writes frames.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use laxity_shm::sleep::now_ns;
use serde::{Deserialize, Serialize};

use super::frame::Frame;
use crate::error::LabError;

/// Time between two looks of the thread that notices when the process does not run.
const WATCH: Duration = Duration::from_millis(5);
/// Waits that are shorter are not reported.
const REPORTED_NS: u64 = 20_000_000;

/// Commands of the driver, one byte each. The end of the pipe ends the worker.
pub(super) const FINISH: u8 = b'e';
pub(super) const FORK: u8 = b'f';
pub(super) const LOSE_THREAD: u8 = b't';
const C_WORKER: &str = include_str!("worker.py");

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Role {
    Client,
    C,
    NcclSender,
    NcclReceiver,
    Hostile,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Task {
    pub(super) role: Role,
    pub(super) socket: PathBuf,
    pub(super) seed: u64,
    /// Whether threads end without giving their lanes back, see [`super::Plant::LeakLane`].
    pub(super) leaks_lanes: bool,
    pub(super) library: PathBuf,
    pub(super) handle: PathBuf,
}

/// Writes frames to the driver. A thread that finds the pipe closed ends the process.
#[derive(Clone)]
pub(super) struct Outlet(Arc<Mutex<File>>);

impl Outlet {
    pub(super) fn stdout() -> Result<Self, LabError> {
        let stdout = std::io::stdout().as_fd().try_clone_to_owned();
        let stdout = stdout.map_err(LabError::system("sharing the pipe to the driver"))?;
        Ok(Self(Arc::new(Mutex::new(File::from(stdout)))))
    }

    pub(super) fn put(&self, frames: &[Frame]) {
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.put(&mut bytes));
        let mut pipe = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if pipe.write_all(&bytes).is_err() {
            std::process::exit(0);
        }
    }
}

/// Counts the time in which the process wanted to run and did not: it was stopped, or the machine
/// was busy.
#[derive(Clone, Default)]
pub(super) struct Starved(Arc<AtomicU64>);

impl Starved {
    pub(super) fn watch() -> Self {
        let own = Self::default();
        let total = Arc::clone(&own.0);
        std::thread::spawn(move || {
            let mut last = now_ns();
            loop {
                std::thread::sleep(WATCH);
                let now = now_ns();
                let late = (now - last).saturating_sub(WATCH.as_nanos() as u64 + 1_000_000);
                // Relaxed, since it is a statistic.
                total.fetch_add(late, Ordering::Relaxed);
                last = now;
            }
        });
        own
    }

    pub(super) fn ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Reports a wait that began at `begin_ns`, when [`Self::ns`] was `before`.
    pub(super) fn report(&self, outlet: &Outlet, queue: u32, begin_ns: u64, before: u64) {
        let end_ns = now_ns();
        if end_ns.saturating_sub(begin_ns) > REPORTED_NS {
            // The watching thread runs at least once after the wait.
            std::thread::sleep(2 * WATCH);
            let starved_ms = ((self.ns() - before) / 1_000_000).try_into().unwrap_or(u16::MAX);
            outlet.put(&[Frame::Waited { queue, begin_ns, end_ns, starved_ms }]);
        }
    }
}

/// Reads commands until the driver says that the worker should finish. `other` gets the others.
pub(super) fn obey(stop: &AtomicBool, mut other: impl FnMut(u8)) {
    let mut command = [0];
    loop {
        match std::io::stdin().read(&mut command) {
            Ok(1) if command[0] == FINISH => return stop.store(true, Ordering::Relaxed),
            Ok(1) => other(command[0]),
            _ => std::process::exit(0),
        }
    }
}

pub(super) fn command(task: &Task) -> Result<Command, LabError> {
    let mut command = crate::sandbox::internal("faults-worker");
    if task.role == Role::C {
        command = Command::new("python3");
        command.args(["-I", "-c", C_WORKER]);
    }
    command.arg(serde_json::to_string(task)?);
    command.env("LAXITY_SOCKET", &task.socket).env("LAXITY_NET", "tcp");
    command.env("NCCL_SOCKET_IFNAME", "lo").stderr(Stdio::null());
    let stdout = if task.role == Role::Hostile { Stdio::null() } else { Stdio::piped() };
    command.stdin(Stdio::piped()).stdout(stdout);
    Ok(command)
}
