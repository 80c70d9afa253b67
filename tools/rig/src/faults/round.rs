//! One round: a daemon, its workers, and the faults of a schedule.

use std::collections::BTreeMap;
use std::io::{BufReader, Write as _};
use std::path::PathBuf;
use std::process::Child;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use laxity_client::{Client, Options};
use laxity_shm::sleep::now_ns;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::daemon::Daemon;
use super::frame::Frame;
use super::oracle::{Counts, Oracle};
use super::schedule::{Fault, Kind, Schedule};
use super::worker::{self, FINISH, Plant, Task};
use crate::error::LabError;

/// Workers on the client library.
const CLIENTS: usize = 2;
/// Longest time until a worker that was told to finish has done so.
const FINISH_MAX: Duration = Duration::from_secs(10);
/// Longest time until the daemon has forgotten the clients that are gone.
const FORGET_MAX: Duration = Duration::from_secs(5);
/// Growth of the daemon's memory over a round that is no leak: buffers of its log and runtime.
const GROWTH_KIB: u64 = 4096;

/// The result of a round.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Outcome {
    /// Faults that were done, by kind.
    pub(super) by_kind: BTreeMap<String, u64>,
    /// What was checked, by path.
    pub(super) by_path: BTreeMap<String, Counts>,
    /// What was wrong.
    pub(super) violations: Vec<String>,
    /// The longest wait for a permit in milliseconds, apart from time in which the worker did not
    /// run.
    pub(super) longest_stall_ms: u64,
}

/// What a round needs besides its schedule.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Path of `laxityd`.
    pub laxityd: PathBuf,
    /// The bug to plant, in tests.
    pub plant: Option<Plant>,
}

struct Worker {
    number: usize,
    path: &'static str,
    child: Child,
    reader: JoinHandle<()>,
}

/// The end of a fault that lasts.
#[derive(Clone, Copy, Debug)]
enum Undo {
    Launch,
    ContinueDaemon,
    ContinueWorker(u32),
}

struct Scene<'a> {
    setting: &'a Setting,
    seed: u64,
    daemon: Daemon,
    oracle: Arc<Mutex<Oracle>>,
    workers: Vec<Worker>,
    /// Ends of faults, by time.
    undo: Vec<(u64, Undo)>,
    stopped_ns: Option<u64>,
    stops: Vec<(u64, u64)>,
    started: u64,
    /// A client that a planted bug leaves behind.
    leaked: Option<Client>,
    outcome: Outcome,
    /// The daemon's folder, which must be dropped after the daemon.
    _folder: tempfile::TempDir,
}

fn lock(oracle: &Mutex<Oracle>) -> MutexGuard<'_, Oracle> {
    oracle.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Plays a schedule and returns what came of it.
///
/// # Errors
/// Fails if a program can't be started. What a program does wrong is a violation instead.
pub(super) fn play(setting: &Setting, schedule: &Schedule) -> Result<Outcome, LabError> {
    let folder = tempfile::Builder::new().prefix("laxity-faults").tempdir();
    let folder = folder.map_err(LabError::system("making a folder"))?;
    let daemon = Daemon::new(&setting.laxityd, folder.path())?;
    let mut scene = Scene {
        setting,
        seed: schedule.seed,
        daemon,
        oracle: Arc::default(),
        workers: Vec::new(),
        undo: Vec::new(),
        stopped_ns: None,
        stops: Vec::new(),
        started: 0,
        leaked: None,
        outcome: Outcome::default(),
        _folder: folder,
    };
    scene.play(schedule)?;
    let mut outcome = std::mem::take(&mut scene.outcome);
    let mut oracle = lock(&scene.oracle);
    outcome.by_path = std::mem::take(&mut oracle.counts);
    outcome.violations = std::mem::take(&mut oracle.violations);
    drop(oracle);
    Ok(outcome)
}

impl Scene<'_> {
    fn blame(&self, text: impl Into<String>) {
        lock(&self.oracle).blame(text);
    }

    /// Notes what a step says is wrong.
    fn note(&self, wrong: Option<String>) {
        if let Some(wrong) = wrong {
            self.blame(wrong);
        }
    }

    fn play(&mut self, schedule: &Schedule) -> Result<(), LabError> {
        self.daemon.launch()?;
        let before = match self.daemon.status() {
            Ok(_) => self.daemon.size(),
            Err(wrong) => {
                self.blame(wrong);
                return Ok(());
            }
        };
        for _ in 0..CLIENTS {
            self.start_worker("client")?;
        }
        let begin = Instant::now();
        let mut faults = schedule.faults.iter().peekable();
        while lock(&self.oracle).violations.is_empty() {
            let fault_at = faults.peek().map(|fault| fault.at_ms);
            let undo_at = self.undo.first().map(|(at, _)| *at);
            let Some(at_ms) = fault_at.into_iter().chain(undo_at).min() else {
                break;
            };
            let now = begin.elapsed();
            std::thread::sleep(Duration::from_millis(at_ms).saturating_sub(now));
            let wrong = self.daemon.look();
            self.note(wrong);
            if undo_at == Some(at_ms) {
                let (_, undo) = self.undo.remove(0);
                self.end_of(undo)?;
            } else if let Some(fault) = faults.next() {
                self.apply(fault)?;
                *self.outcome.by_kind.entry(fault.kind.name()).or_default() += 1;
            }
        }
        while !self.undo.is_empty() {
            let (_, undo) = self.undo.remove(0);
            self.end_of(undo)?;
        }
        self.finish(before)
    }

    fn later(&mut self, fault: &Fault, undo: Undo) {
        let at = fault.at_ms + fault.for_ms;
        let place = self.undo.partition_point(|(other, _)| *other <= at);
        self.undo.insert(place, (at, undo));
    }

    fn start_worker(&mut self, path: &'static str) -> Result<(), LabError> {
        let seed = self.seed.wrapping_add(self.started);
        self.started += 1;
        let plant = self.setting.plant;
        let task = Task { socket: self.daemon.socket(), seed, plant };
        let mut child = worker::command(&task)?.spawn().map_err(LabError::start("a worker"))?;
        let number = lock(&self.oracle).add(path);
        let mut pipe =
            BufReader::with_capacity(1 << 17, child.stdout.take().ok_or_else(LabError::no_pipe)?);
        let oracle = Arc::clone(&self.oracle);
        let reader = std::thread::spawn(move || {
            loop {
                match Frame::read(&mut pipe) {
                    Ok(Some(frame)) => lock(&oracle).take(number, &frame),
                    Ok(None) => return,
                    Err(error) => return lock(&oracle).blame(format!("{path}: {error}")),
                }
            }
        });
        self.workers.push(Worker { number, path, child, reader });
        Ok(())
    }

    /// Chooses a worker that runs.
    fn chosen(&self, fault: &Fault) -> usize {
        (fault.choice % self.workers.len().max(1) as u64) as usize
    }

    fn apply(&mut self, fault: &Fault) -> Result<(), LabError> {
        match fault.kind {
            Kind::DaemonKilled => {
                self.bring_up()?;
                self.daemon.signal(Signal::SIGKILL);
                self.daemon_goes_on();
                let wrong = self.daemon.wait_end();
                self.note(wrong);
                self.later(fault, Undo::Launch);
            }
            Kind::DaemonStopped => {
                self.bring_up()?;
                self.daemon.signal(Signal::SIGSTOP);
                self.stopped_ns.get_or_insert_with(now_ns);
                self.later(fault, Undo::ContinueDaemon);
            }
            Kind::DaemonRestarted => {
                self.bring_up()?;
                // A daemon that is being started can't be told to end in order yet.
                let operator = self.daemon.operator();
                self.note(operator.err());
                self.daemon.signal(Signal::SIGTERM);
                let wrong = self.daemon.wait_end();
                self.note(wrong);
                self.daemon.launch()?;
            }
            Kind::ClientKilled => {
                let mut worker = self.workers.remove(self.chosen(fault));
                lock(&self.oracle).counts.entry(worker.path.to_owned()).or_default();
                let _ = worker.child.kill();
                let _ = worker.child.wait();
                let _ = worker.reader.join();
                lock(&self.oracle).killed(worker.number);
                self.start_worker(worker.path)?;
            }
            Kind::ClientStopped => {
                let pid = self.workers[self.chosen(fault)].child.id();
                signal_worker(pid, Signal::SIGSTOP);
                self.later(fault, Undo::ContinueWorker(pid));
            }
        }
        Ok(())
    }

    /// Makes sure that there is a daemon that runs.
    fn bring_up(&mut self) -> Result<(), LabError> {
        if !self.daemon.is_up() {
            self.daemon.launch()?;
        }
        self.daemon.signal(Signal::SIGCONT);
        self.daemon_goes_on();
        Ok(())
    }

    fn daemon_goes_on(&mut self) {
        if let Some(since) = self.stopped_ns.take() {
            self.stops.push((since, now_ns()));
        }
    }

    fn end_of(&mut self, undo: Undo) -> Result<(), LabError> {
        match undo {
            Undo::Launch if self.daemon.is_up() => {}
            Undo::Launch => {
                self.daemon.launch()?;
                if self.setting.plant == Some(Plant::Leak) && self.leaked.is_none() {
                    let ready = self.daemon.status();
                    self.note(ready.err());
                    let socket = self.daemon.socket();
                    self.leaked = Some(Client::attach(Options { socket, ..Options::default() }));
                }
            }
            Undo::ContinueDaemon => {
                self.daemon.signal(Signal::SIGCONT);
                self.daemon_goes_on();
            }
            Undo::ContinueWorker(pid) => {
                // Not the id of another process: a worker that was killed is not in the list.
                if self.workers.iter().any(|worker| worker.child.id() == pid) {
                    signal_worker(pid, Signal::SIGCONT);
                }
            }
        }
        Ok(())
    }

    /// Lets the workers finish, and looks at what is left.
    fn finish(&mut self, before: Option<(usize, u64)>) -> Result<(), LabError> {
        self.bring_up()?;
        for worker in &mut self.workers {
            if let Some(pipe) = &mut worker.child.stdin {
                // A worker that is gone is found below.
                let _ = pipe.write_all(&[FINISH]);
            }
        }
        let give_up = Instant::now() + FINISH_MAX;
        for mut worker in std::mem::take(&mut self.workers) {
            let status = loop {
                match worker.child.try_wait() {
                    Ok(None) if Instant::now() < give_up => {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    Ok(None) => {
                        let _ = worker.child.kill();
                        let _ = worker.child.wait();
                        break "still waits for a permit".to_owned();
                    }
                    Ok(Some(status)) if status.success() => break String::new(),
                    Ok(Some(status)) => break format!("ended with {status}"),
                    Err(error) => break error.to_string(),
                }
            };
            let _ = worker.reader.join();
            let mut oracle = lock(&self.oracle);
            if !status.is_empty() {
                oracle.blame(format!("{}: worker {} {status}", worker.path, worker.number));
            }
            oracle.ended(worker.number);
        }
        let longest = lock(&self.oracle).judge_waits(&self.stops);
        self.outcome.longest_stall_ms = longest.as_millis() as u64;
        self.check_books(before);
        Ok(())
    }

    /// Checks that the daemon has forgotten all clients, and returned what it had for them.
    fn check_books(&mut self, before: Option<(usize, u64)>) {
        let start = Instant::now();
        let mut left = String::new();
        while start.elapsed() < FORGET_MAX {
            match self.daemon.status() {
                Ok(status) => {
                    let clients = status.clients.len();
                    let sum = |of: fn(&laxity_wire::PortStatus) -> u64| {
                        status.ports.iter().map(of).sum::<u64>()
                    };
                    let (flows, bytes) = (sum(|p| p.waiting_flows), sum(|p| p.in_flight_bytes));
                    let (was, is) = (before.unwrap_or_default(), self.daemon.size());
                    let is = is.unwrap_or_default();
                    left = format!(
                        "{clients} clients, {flows} waiting flows, {bytes} bytes in flight, {} \
                         descriptors instead of {}, {} KiB of memory instead of {}",
                        is.0, was.0, is.1, was.1
                    );
                    let small = is.0 <= was.0 && is.1 <= was.1 + GROWTH_KIB;
                    if clients == 0 && flows == 0 && bytes == 0 && small {
                        return self.note(self.daemon.panicked());
                    }
                }
                Err(wrong) => return self.blame(wrong),
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        self.blame(format!("{FORGET_MAX:?} after the end the daemon has {left}"));
        self.note(self.daemon.panicked());
    }
}

fn signal_worker(pid: u32, signal: Signal) {
    // The worker is not reaped while it is in the list, so the id is its own.
    let _ = kill(Pid::from_raw(pid.cast_signed()), signal);
}

impl Drop for Scene<'_> {
    fn drop(&mut self) {
        for mut worker in std::mem::take(&mut self.workers) {
            let _ = worker.child.kill();
            let _ = worker.child.wait();
            let _ = worker.reader.join();
        }
    }
}
