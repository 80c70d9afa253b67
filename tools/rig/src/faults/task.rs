//! What a worker process of a fault campaign is started with, how it hears commands, and how it
//! writes frames.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use laxity_shm::sleep::now_ns;
use serde::{Deserialize, Serialize};

use super::frame::Frame;
use super::plant::Plant;
use super::setting::{PathPrograms, STALL_IN_GUEST};
use crate::child::lock;
use crate::error::LabError;
use crate::vm::network::DEVICES;

/// Time between two looks of the thread that notices when the process does not run.
const WATCH: Duration = Duration::from_millis(5);
/// Waits that are shorter are not reported.
const REPORTED_NS: u64 = 20_000_000;

/// Commands of the driver, one byte each. The end of the pipe ends the worker.
pub(super) const FINISH: u8 = b'e';
pub(super) const FORK: u8 = b'f';
pub(super) const LOSE_THREAD: u8 = b't';
/// For workers on verbs: put a queue pair into the error state.
pub(super) const FAIL_QUEUE_PAIR: u8 = b'q';
/// For workers with engines: kill an engine.
pub(super) const KILL_ENGINE: u8 = b'k';
const C_WORKER: &str = concat!(include_str!("outlet.py"), include_str!("worker.py"));
const MOONCAKE_WORKER: &str = concat!(include_str!("outlet.py"), include_str!("mooncake.py"));
const MOONCAKE_C: &str = include_str!("mooncake_c.py");

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Role {
    Client,
    C,
    NcclSender,
    NcclReceiver,
    MooncakeInitiator,
    MooncakeTarget,
    MooncakeCInitiator,
    MooncakeCTarget,
    VerbsReceiver,
    VerbsSender,
    Engine,
    Hostile,
}

impl Role {
    /// Whether a worker does something when it is told this, apart from [`FINISH`]. An engine does
    /// not fork.
    pub(super) fn knows(self, command: u8) -> bool {
        let pairs_and_clients = matches!(
            self,
            Self::Client
                | Self::C
                | Self::MooncakeInitiator
                | Self::MooncakeCInitiator
                | Self::VerbsSender
        );
        pairs_and_clients || self == Self::Engine && command != FORK
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Task {
    pub(super) role: Role,
    pub(super) socket: PathBuf,
    pub(super) seed: u64,
    /// Whether threads end without giving their lanes back, see [`super::Plant::LeakLane`].
    pub(super) leaks_lanes: bool,
    /// What a worker leaks all the time, see [`super::Plant::LeakMemory`].
    pub(super) leaks: Option<Plant>,
    /// Whether nothing slows the worker down. Else each permit takes a while on the wire.
    pub(super) full_rate: bool,
    #[serde(flatten)]
    pub(super) programs: PathPrograms,
    /// Whether no other path shares the NIC. Else its flows may have to wait for longer than the
    /// bound, as the policy says.
    pub(super) alone: bool,
    pub(super) device: usize,
    /// File or socket by which the two workers of a pair meet.
    pub(super) handle: PathBuf,
    /// What one engine alone answers to each prompt, see [`super::engines::prompts`].
    pub(super) answers: Vec<Vec<u32>>,
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
        if lock(&self.0).write_all(&bytes).is_err() {
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

/// Returns the command of a program on verbs, under the preload library.
fn verbs(task: &Task, role: &str, device: &str) -> Command {
    let PathPrograms { program, library, gid_index, secret, .. } = &task.programs;
    let mut command = Command::new(program);
    command.envs(secret.as_ref().map(|file| ("LAXITY_BUNDLES", file)));
    command.args([role, device, &gid_index.to_string()]).arg(&task.handle);
    command.arg(task.seed.to_string()).env("LD_PRELOAD", library);
    command.envs([STALL_IN_GUEST]).env("LAXITY_REPORT", task.report());
    command
}

impl Task {
    /// File to which libraries of the round's workers add what they counted.
    fn report(&self) -> PathBuf {
        self.handle.with_extension("report")
    }
}

/// Returns the command of a worker. `settings` are those of the NCCL plugin.
pub(super) fn command(task: &Task, settings: &[(&str, &str)]) -> Result<Command, LabError> {
    let script = |python: &Path, text: &str| {
        let mut command = Command::new(python);
        command.args(["-I", "-c", text]);
        command
    };
    let mut command = match task.role {
        Role::C => script(Path::new("python3"), C_WORKER),
        Role::MooncakeInitiator
        | Role::MooncakeTarget
        | Role::MooncakeCInitiator
        | Role::MooncakeCTarget => script(&task.programs.program, MOONCAKE_WORKER),
        Role::VerbsReceiver => verbs(task, "receive", DEVICES[0]),
        Role::VerbsSender => verbs(task, "send", DEVICES[1]),
        _ => crate::sandbox::internal("faults-worker"),
    };
    if !matches!(task.role, Role::VerbsReceiver | Role::VerbsSender) {
        command.arg(serde_json::to_string(task)?);
    }
    if task.role == Role::MooncakeCInitiator {
        let preload = std::env::join_paths(&task.programs.preload).unwrap_or_default();
        command.arg(MOONCAKE_C).env("LD_PRELOAD", preload).env("LAXITY_REPORT", task.report());
    }
    command.env("LAXITY_SOCKET", &task.socket).stderr(Stdio::null());
    if matches!(task.role, Role::NcclReceiver | Role::NcclSender) {
        command.env("LAXITY_REPORT", task.report()).envs(settings.iter().copied());
    }
    if task.role == Role::Engine {
        // What stops or kills the worker does so to its engines, too.
        command.process_group(0);
    }
    let stdout = if task.role == Role::Hostile { Stdio::null() } else { Stdio::piped() };
    command.stdin(Stdio::piped()).stdout(stdout);
    Ok(command)
}
