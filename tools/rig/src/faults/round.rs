//! One round: a daemon, its workers, and the faults of a schedule.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use laxity_client::{Client, Options};
use laxity_shm::sleep::now_ns;
use laxity_wire::{ControlClient, ControlError, PortStatus};
use nix::sys::signal::Signal;

use super::cast::{Cast, Setting, lock};
use super::client;
use super::daemon::Daemon;
use super::oracle::{Oracle, TransferCounts};
use super::plant::Plant;
use super::schedule::{Fault, FaultKind, Schedule};
use super::task::{FORK, LOSE_THREAD};
use crate::error::LabError;

/// Longest time until the daemon has forgotten the clients that are gone.
const FORGET_MAX: Duration = Duration::from_secs(3);
/// Time until the daemon has closed the connection that asked for its status.
const CLOSED_WITHIN: Duration = Duration::from_millis(5);
/// Time until a worker has found the daemon.
const ATTACHED_WITHIN: Duration = Duration::from_secs(1);
/// Time until some threads of the workers have ended. If they need more, a leak is found in another
/// round.
const THREADS_END: Duration = Duration::from_millis(60);
/// Growth of the daemon's memory over a round that is no leak: buffers of its log and runtime.
const GROWTH_KIB: u64 = 4096;
const POLICIES: [&str; 5] = ["laxity", "mfs", "fair", "edf", "two_class"];

#[derive(Clone, Debug, Default)]
pub(super) struct Outcome {
    pub(super) by_kind: BTreeMap<String, u64>,
    pub(super) by_path: BTreeMap<String, TransferCounts>,
    pub(super) violations: Vec<String>,
    /// The longest wait for a permit in milliseconds, apart from time in which the worker did not
    /// run.
    pub(super) longest_stall_ms: u64,
    /// Whether a worker was seen with the lanes of its queues.
    pub(super) saw_lanes: bool,
    /// Events of a round in virtual time.
    pub(super) events: u64,
    /// A digest of these events.
    #[cfg(feature = "virtual-time")]
    pub(super) digest: u64,
    /// Orders of the coordinator that daemons applied, in virtual time.
    #[cfg(feature = "virtual-time")]
    pub(super) orders: u64,
}

#[derive(Clone, Copy, Debug)]
enum Undo {
    Launch,
    ContinueDaemon,
    ContinueWorker(usize),
    EndHostile(u64),
    GiveDescriptors,
    EndBypass,
    Enforce,
}

struct Scene<'a> {
    setting: &'a Setting,
    cast: Cast<'a>,
    daemon: Daemon,
    oracle: Arc<Mutex<Oracle>>,
    undo: Vec<(u64, Undo)>,
    stopped_ns: Option<u64>,
    stops: Vec<(u64, u64)>,
    leaked: Option<Client>,
}

pub(super) fn play(setting: &Setting, schedule: &Schedule) -> Result<Outcome, LabError> {
    // A hostile client of another user has to reach the socket.
    let open = Permissions::from_mode(0o755);
    let folder = tempfile::Builder::new().prefix("laxity-faults").permissions(open).tempdir();
    let folder = folder.map_err(LabError::system("making a folder"))?;
    let oracle = Arc::<Mutex<Oracle>>::default();
    let mut daemon = Daemon::new(&setting.laxityd, setting.then.as_ref(), folder.path())?;
    daemon.launch()?;
    let before = daemon.status().map(|_| {
        std::thread::sleep(CLOSED_WITHIN);
        daemon.size().unwrap_or_default()
    });
    let cast = Cast::start(setting, folder.path(), daemon.socket(), schedule.seed, &oracle)?;
    let mut scene = Scene {
        setting,
        cast,
        daemon,
        oracle,
        undo: Vec::new(),
        stopped_ns: None,
        stops: Vec::new(),
        leaked: None,
    };
    let mut outcome = Outcome::default();
    match before {
        Ok(before) => scene.play(schedule, &mut outcome, before)?,
        Err(wrong) => scene.blame(wrong),
    }
    let mut oracle = lock(&scene.oracle);
    outcome.by_path = std::mem::take(&mut oracle.counts);
    outcome.violations = std::mem::take(&mut oracle.violations);
    Ok(outcome)
}

impl Scene<'_> {
    fn blame(&self, text: impl Into<String>) {
        lock(&self.oracle).blame(text);
    }

    fn note(&self, wrong: Option<String>) {
        if let Some(wrong) = wrong {
            self.blame(wrong);
        }
    }

    fn play(
        &mut self,
        schedule: &Schedule,
        outcome: &mut Outcome,
        before: (usize, u64),
    ) -> Result<(), LabError> {
        let begin = Instant::now();
        let mut faults = schedule.faults.iter().peekable();
        while lock(&self.oracle).violations.is_empty() {
            let fault_at = faults.peek().map(|fault| fault.at_ms);
            let undo_at = self.undo.first().map(|(at, _)| *at);
            let Some(at_ms) = fault_at.into_iter().chain(undo_at).min() else { break };
            std::thread::sleep(Duration::from_millis(at_ms).saturating_sub(begin.elapsed()));
            let wrong = self.daemon.look();
            self.note(wrong);
            if undo_at == Some(at_ms) {
                let (_, undo) = self.undo.remove(0);
                self.end_of(undo)?;
            } else if let Some(fault) = faults.next() {
                self.apply(fault)?;
                *outcome.by_kind.entry(fault.kind.name()).or_default() += 1;
            }
        }
        while !self.undo.is_empty() {
            let (_, undo) = self.undo.remove(0);
            self.end_of(undo)?;
        }
        self.bring_up()?;
        self.leak(outcome);
        match self.most_lanes() {
            Some(lanes) if lanes > client::LANES => {
                self.blame(format!("a worker has {lanes} lanes, not at most {}", client::LANES));
                // Flows in lost lanes would keep the others waiting.
                return Ok(());
            }
            lanes => outcome.saw_lanes = lanes >= Some(client::QUEUES),
        }
        self.cast.finish();
        let longest = lock(&self.oracle).judge_waits(&self.stops);
        outcome.longest_stall_ms = longest.as_millis() as u64;
        self.check_accounts(before);
        Ok(())
    }

    /// Leaves a client behind if the test asks for that bug, which needs a daemon that was killed.
    fn leak(&mut self, outcome: &Outcome) {
        let killed = outcome.by_kind.contains_key(&FaultKind::DaemonKilled.name());
        if self.setting.plant == Some(Plant::Leak) && killed {
            self.wait_ready();
            let socket = self.daemon.socket();
            self.leaked = Some(Client::attach(Options { socket, ..Options::default() }));
        }
    }

    fn later(&mut self, fault: &Fault, undo: Undo) {
        let at = fault.at_ms + fault.for_ms;
        let place = self.undo.partition_point(|(other, _)| *other <= at);
        self.undo.insert(place, (at, undo));
    }

    fn apply(&mut self, fault: &Fault) -> Result<(), LabError> {
        match fault.kind {
            FaultKind::ClientKilled => return self.cast.kill(fault.choice),
            FaultKind::ClientStopped => {
                let number = self.cast.stop(fault.choice);
                self.later(fault, Undo::ContinueWorker(number));
            }
            FaultKind::ClientForked => self.cast.tell(fault.choice, FORK),
            FaultKind::ThreadLost => self.cast.tell(fault.choice, LOSE_THREAD),
            FaultKind::Hostile => {
                let number = self.cast.add_hostile(fault.choice)?;
                self.later(fault, Undo::EndHostile(number));
            }
            _ => {
                self.bring_up()?;
                self.apply_to_daemon(fault)?;
            }
        }
        Ok(())
    }

    fn apply_to_daemon(&mut self, fault: &Fault) -> Result<(), LabError> {
        if !matches!(fault.kind, FaultKind::DaemonKilled | FaultKind::DaemonStopped) {
            self.wait_ready();
        }
        let ends = matches!(
            fault.kind,
            FaultKind::DaemonKilled | FaultKind::DaemonRestarted | FaultKind::LogFull
        );
        self.cast.armed.fetch_or(ends, Ordering::Relaxed);
        match fault.kind {
            FaultKind::DaemonKilled => {
                self.daemon.signal(Signal::SIGKILL);
                let wrong = self.daemon.wait_end();
                self.note(wrong);
                self.later(fault, Undo::Launch);
            }
            FaultKind::DaemonStopped => {
                self.daemon.signal(Signal::SIGSTOP);
                self.stopped_ns.get_or_insert_with(now_ns);
                self.later(fault, Undo::ContinueDaemon);
            }
            FaultKind::DaemonRestarted | FaultKind::LogFull => {
                self.daemon.signal(Signal::SIGTERM);
                let wrong = self.daemon.wait_end();
                self.note(wrong);
                self.daemon.log_is_full = fault.kind == FaultKind::LogFull;
                self.daemon.launch()?;
            }
            FaultKind::Reloaded => {
                self.daemon.window_kib = 64 << (fault.choice % 3);
                self.reload()?;
            }
            FaultKind::ReloadedBroken => {
                self.daemon.break_configuration(fault.choice)?;
                let answer = self.daemon.ask(|operator| Ok(operator.reload()));
                self.daemon.configure()?;
                match answer {
                    Ok(Err(ControlError::Refused(_))) => {}
                    Ok(other) => self.blame(format!("a broken file was not refused: {other:?}")),
                    Err(wrong) => self.blame(wrong),
                }
            }
            FaultKind::PolicyChanged => {
                self.daemon.policy = POLICIES[(fault.choice % POLICIES.len() as u64) as usize];
                self.reload()?;
            }
            FaultKind::ModeChanged => {
                self.daemon.mode = ["off", "observe"][(fault.choice % 2) as usize];
                self.reload()?;
                self.later(fault, Undo::Enforce);
            }
            FaultKind::Bypassed => {
                let answer = self.daemon.ask(|operator| operator.bypass(true));
                self.note(answer.err());
                self.later(fault, Undo::EndBypass);
            }
            FaultKind::DescriptorsTaken => {
                let wrong = self.daemon.limit_descriptors();
                self.note(wrong);
                self.later(fault, Undo::GiveDescriptors);
            }
            FaultKind::ClientKilled
            | FaultKind::ClientStopped
            | FaultKind::ClientForked
            | FaultKind::ThreadLost
            | FaultKind::Hostile
            // In virtual time only:
            | FaultKind::LaneFilled
            | FaultKind::PortStalled
            | FaultKind::RateChanged
            | FaultKind::ClockStepped
            | FaultKind::CoordinatorLost
            | FaultKind::OrdersLost
            | FaultKind::OrderRepeated
            | FaultKind::LeaderChanged => {}
        }
        Ok(())
    }

    /// Waits until a starting daemon answers. Earlier it could read a half-written configuration,
    /// and SIGTERM would not end it in order.
    fn wait_ready(&mut self) {
        let operator = self.daemon.operator();
        self.note(operator.err());
    }

    fn reload(&mut self) -> Result<(), LabError> {
        self.daemon.configure()?;
        let answer = self.daemon.ask(ControlClient::reload);
        self.note(answer.err());
        Ok(())
    }

    fn bring_up(&mut self) -> Result<(), LabError> {
        if !self.daemon.is_up() {
            self.daemon.launch()?;
        }
        self.daemon.signal(Signal::SIGCONT);
        if let Some(since) = self.stopped_ns.take() {
            self.stops.push((since, now_ns()));
        }
        self.daemon.give_descriptors();
        Ok(())
    }

    fn end_of(&mut self, undo: Undo) -> Result<(), LabError> {
        match undo {
            Undo::Launch if self.daemon.is_up() => {}
            Undo::Launch => self.daemon.launch()?,
            Undo::ContinueDaemon => {
                self.daemon.signal(Signal::SIGCONT);
                if let Some(since) = self.stopped_ns.take() {
                    self.stops.push((since, now_ns()));
                }
            }
            Undo::ContinueWorker(number) => self.cast.go_on(number),
            Undo::EndHostile(number) => self.cast.end_hostile(number),
            Undo::GiveDescriptors => self.daemon.give_descriptors(),
            Undo::EndBypass => {
                self.bring_up()?;
                let answer = self.daemon.ask(|operator| operator.bypass(false));
                self.note(answer.err());
            }
            Undo::Enforce => {
                self.bring_up()?;
                self.wait_ready();
                self.daemon.mode = "enforce";
                self.reload()?;
            }
        }
        Ok(())
    }

    /// Ends threads of the workers, and returns how many lanes a Rust worker has then at most.
    fn most_lanes(&mut self) -> Option<u32> {
        self.wait_ready();
        let give_up = Instant::now() + ATTACHED_WITHIN;
        while self.lanes() < Some(client::QUEUES) && Instant::now() < give_up {
            std::thread::sleep(CLOSED_WITHIN);
        }
        self.cast.tell_all(LOSE_THREAD);
        std::thread::sleep(THREADS_END);
        self.lanes()
    }

    /// Returns how many lanes a Rust worker has at most, or `None` if none is attached.
    fn lanes(&mut self) -> Option<u32> {
        match self.daemon.status() {
            Ok(status) => {
                let workers = status.clients.iter().filter(|client| client.name == client::NAME);
                workers.map(|worker| worker.lanes).max()
            }
            Err(wrong) => {
                self.blame(wrong);
                None
            }
        }
    }

    /// Checks that the daemon has forgotten all clients, and returned what it had for them.
    fn check_accounts(&mut self, before: (usize, u64)) {
        let start = Instant::now();
        let mut left = String::new();
        while start.elapsed() < FORGET_MAX {
            match self.daemon.status() {
                Ok(status) => {
                    let clients = status.clients.len();
                    let sum = |of: fn(&PortStatus) -> u64| status.ports.iter().map(of).sum::<u64>();
                    let (flows, bytes) = (sum(|p| p.waiting_flows), sum(|p| p.in_flight_bytes));
                    std::thread::sleep(CLOSED_WITHIN);
                    let (descriptors, memory) = self.daemon.size().unwrap_or_default();
                    left = format!(
                        "{clients} clients, {flows} waiting flows, {bytes} bytes in flight, \
                         {descriptors} descriptors instead of {}, {memory} KiB of memory instead \
                         of {}",
                        before.0, before.1
                    );
                    let small = descriptors <= before.0 && memory <= before.1 + GROWTH_KIB;
                    if clients == 0 && flows == 0 && bytes == 0 && small {
                        return self.note(self.daemon.panicked());
                    }
                }
                Err(wrong) => return self.blame(wrong),
            }
        }
        self.blame(format!("{FORGET_MAX:?} after the end the daemon has {left}"));
        self.note(self.daemon.panicked());
    }
}
