//! One round: a daemon, its workers, and the faults of a schedule.

mod accounts;

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use laxity_client::{Client, Options};
use laxity_shm::sleep::now_ns;
use laxity_wire::{ControlClient, ControlError};
use nix::sys::signal::Signal;
use tempfile::TempDir;

use super::client;
use super::coordinator::RoundCoordinator;
use super::daemon::Daemon;
use super::oracle::{Oracle, TransferCounts};
use super::plant::Plant;
use super::schedule::{Fault, FaultKind, Schedule};
use super::setting::Setting;
use super::task::{FAIL_QUEUE_PAIR, FORK, LOSE_THREAD};
use super::workers::RoundWorkers;
use crate::child::lock;
use crate::error::LabError;
use crate::vm::clock;
use crate::vm::network::Disturber;

/// Longest time until the daemon has forgotten the clients that are gone.
pub(super) const FORGET_MAX: Duration = Duration::from_secs(3);
/// Time until the daemon has closed the connection that asked for its status.
pub(super) const CLOSED_WITHIN: Duration = Duration::from_millis(5);
/// At a lower rate, waits for others that use the port may be longer than the bound.
const RATES: [&str; 4] = ["1Gbit", "2Gbit", "5Gbit", "40Gbit"];
/// A starved process runs for 5 ms of each 20 ms.
const STARVED_PERIOD_MS: usize = 20;
const STARVED_STOP_MS: u64 = 15;
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
    pub(super) events: u64,
    #[cfg(feature = "virtual-time")]
    pub(super) digest: u64,
    #[cfg(feature = "virtual-time")]
    pub(super) orders: u64,
}

#[derive(Clone, Copy, Debug)]
enum Undo {
    Launch,
    ContinueDaemon,
    ContinueWorker(usize),
    StopDaemon,
    StopWorker(usize),
    GiveMemory,
    LaunchCoordinator,
    ContinueCoordinator,
    EndHostile(u64),
    GiveDescriptors,
    EndBypass,
    Enforce,
    MendLink(usize),
    MoveClock(i64),
}

struct Scene<'a> {
    setting: &'a Setting,
    workers: RoundWorkers<'a>,
    daemon: Daemon,
    coordinator: Option<RoundCoordinator>,
    oracle: Arc<Mutex<Oracle>>,
    undo: Vec<(u64, Undo)>,
    stopped_ns: Option<u64>,
    stops: Vec<(u64, u64)>,
    leaked: Option<Client>,
    /// The network of a campaign on verbs.
    router: Option<Disturber>,
}

/// Makes a folder for the socket, which a hostile client of another user has to reach.
pub(super) fn folder(prefix: &str) -> Result<TempDir, LabError> {
    let open = Permissions::from_mode(0o755);
    let folder = tempfile::Builder::new().prefix(prefix).permissions(open).tempdir();
    folder.map_err(LabError::system("making a folder"))
}

pub(super) fn play(setting: &Setting, schedule: &Schedule) -> Result<Outcome, LabError> {
    let folder = folder("laxity-faults")?;
    let schedule = &schedule.slowed(setting.pace.slowness);
    let setting = &setting.of_round(schedule.seed);
    let oracle = Arc::<Mutex<Oracle>>::default();
    let mut daemon =
        Daemon::new(&setting.laxityd, setting.then.as_ref(), folder.path(), setting.pace)?;
    let coordinator = match &setting.coordinator {
        Some(program) if schedule.faults.iter().any(|fault| fault.kind.needs_coordinator()) => {
            let coordinator = RoundCoordinator::start(program, folder.path())?;
            daemon.coordinator = Some(coordinator.address);
            daemon.configure()?;
            Some(coordinator)
        }
        _ => None,
    };
    daemon.launch()?;
    let before = daemon.await_coordinator().map(|()| {
        std::thread::sleep(CLOSED_WITHIN);
        daemon.size().unwrap_or_default()
    });
    let workers =
        RoundWorkers::start(setting, folder.path(), daemon.socket(), schedule.seed, &oracle)?;
    let mut scene = Scene {
        setting,
        workers,
        daemon,
        coordinator,
        oracle,
        undo: Vec::new(),
        stopped_ns: None,
        stops: Vec::new(),
        leaked: None,
        router: setting.uses("verbs").then(Disturber::start).transpose()?,
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

fn note(oracle: &Mutex<Oracle>, wrong: Option<String>) {
    if let Some(wrong) = wrong {
        lock(oracle).blame(wrong);
    }
}

impl Scene<'_> {
    fn blame(&self, text: impl Into<String>) {
        lock(&self.oracle).blame(text);
    }

    fn play(
        &mut self,
        schedule: &Schedule,
        outcome: &mut Outcome,
        before: (usize, u64),
    ) -> Result<(), LabError> {
        self.workers.await_pairs();
        let begin = Instant::now();
        let mut faults = schedule.faults.iter().peekable();
        while lock(&self.oracle).violations.is_empty() {
            let fault_at = faults.peek().map(|fault| fault.at_ms);
            let undo_at = self.undo.first().map(|(at, _)| *at);
            let Some(at_ms) = fault_at.into_iter().chain(undo_at).min() else { break };
            std::thread::sleep(Duration::from_millis(at_ms).saturating_sub(begin.elapsed()));
            note(&self.oracle, self.daemon.look());
            note(&self.oracle, self.coordinator.as_mut().and_then(RoundCoordinator::look));
            self.stops.extend(self.daemon.had_no_processor());
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
        self.check_nics();
        self.workers.finish();
        self.stops.extend(self.daemon.had_no_processor());
        let longest = lock(&self.oracle).judge_waits(&self.stops, self.setting.pace.wait_max);
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
        self.do_at(fault.at_ms + fault.for_ms, undo);
    }

    /// Lets the daemon or a worker run in a small part of each period only, as `cpu.max` of a
    /// control group does.
    fn starve(&mut self, fault: &Fault) {
        let worker = (fault.choice % 2 == 1).then(|| self.workers.number(fault.choice / 2));
        let [stop, go_on] = match worker {
            Some(number) => [Undo::StopWorker(number), Undo::ContinueWorker(number)],
            None => [Undo::StopDaemon, Undo::ContinueDaemon],
        };
        for at_ms in (fault.at_ms..=fault.at_ms + fault.for_ms).step_by(STARVED_PERIOD_MS) {
            self.do_at(at_ms, stop);
            self.do_at(at_ms + STARVED_STOP_MS, go_on);
        }
    }

    fn do_at(&mut self, at: u64, undo: Undo) {
        let place = self.undo.partition_point(|(other, _)| *other <= at);
        self.undo.insert(place, (at, undo));
    }

    fn apply(&mut self, fault: &Fault) -> Result<(), LabError> {
        match fault.kind {
            FaultKind::ClientKilled => return self.workers.kill(fault.choice),
            FaultKind::ClientStopped => {
                let number = self.workers.stop(fault.choice);
                self.later(fault, Undo::ContinueWorker(number));
            }
            FaultKind::ClientForked => self.workers.tell(fault.choice, FORK),
            FaultKind::ThreadLost => self.workers.tell(fault.choice, LOSE_THREAD),
            FaultKind::QueuePairFailed => self.workers.tell(fault.choice, FAIL_QUEUE_PAIR),
            FaultKind::PacketsLost | FaultKind::LinkDown => {
                let port = (fault.choice % 2) as usize;
                let percent = if fault.kind == FaultKind::LinkDown { 100 } else { 3 };
                self.router.iter_mut().try_for_each(|router| router.lose(port, percent))?;
                self.later(fault, Undo::MendLink(port));
            }
            FaultKind::ClockSet => {
                let step_s = clock::set(fault.choice)?;
                self.later(fault, Undo::MoveClock(-step_s));
            }
            FaultKind::Hostile => {
                let number = self.workers.add_hostile(fault.choice)?;
                self.later(fault, Undo::EndHostile(number));
            }
            FaultKind::CpuStarved => self.starve(fault),
            FaultKind::CoordinatorKilled => {
                self.coordinator.iter_mut().for_each(RoundCoordinator::kill);
                self.later(fault, Undo::LaunchCoordinator);
            }
            FaultKind::CoordinatorStopped => {
                self.coordinator.iter_mut().for_each(|it| it.signal(Signal::SIGSTOP));
                self.later(fault, Undo::ContinueCoordinator);
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
        self.workers.armed.fetch_or(ends, Ordering::Relaxed);
        match fault.kind {
            FaultKind::DaemonKilled => {
                self.daemon.signal(Signal::SIGKILL);
                note(&self.oracle, self.daemon.wait_end());
                self.later(fault, Undo::Launch);
            }
            FaultKind::DaemonStopped => {
                self.daemon.signal(Signal::SIGSTOP);
                self.stopped_ns.get_or_insert_with(now_ns);
                self.later(fault, Undo::ContinueDaemon);
            }
            FaultKind::DaemonRestarted | FaultKind::LogFull => {
                self.daemon.signal(Signal::SIGTERM);
                note(&self.oracle, self.daemon.wait_end());
                self.daemon.log_is_full = fault.kind == FaultKind::LogFull;
                self.daemon.launch()?;
            }
            FaultKind::Reloaded => {
                self.daemon.window_kib = 64 << (fault.choice % 3);
                self.reload()?;
            }
            FaultKind::ReloadedBroken => self.reload_broken(fault.choice)?,
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
                note(&self.oracle, self.daemon.ask(|operator| operator.bypass(true)).err());
                self.later(fault, Undo::EndBypass);
            }
            FaultKind::DescriptorsTaken => {
                note(&self.oracle, self.daemon.limit_descriptors());
                self.later(fault, Undo::GiveDescriptors);
            }
            FaultKind::MemoryExhausted => {
                note(&self.oracle, self.daemon.limit_memory());
                self.later(fault, Undo::GiveMemory);
            }
            FaultKind::MemoryGroupFull => {
                self.daemon.limit_group()?;
                self.later(fault, Undo::GiveMemory);
            }
            FaultKind::RateChanged => {
                self.daemon.rate = RATES[(fault.choice % RATES.len() as u64) as usize];
                self.reload()?;
            }
            // Others are not the daemon's, or in virtual time only.
            _ => {}
        }
        Ok(())
    }

    /// Waits until a starting daemon answers. Earlier it could read a half-written configuration,
    /// and SIGTERM would not end it in order.
    fn wait_ready(&mut self) {
        note(&self.oracle, self.daemon.operator().err());
    }

    fn reload(&mut self) -> Result<(), LabError> {
        self.daemon.configure()?;
        note(&self.oracle, self.daemon.ask(ControlClient::reload).err());
        Ok(())
    }

    fn reload_broken(&mut self, choice: u64) -> Result<(), LabError> {
        self.daemon.break_configuration(choice)?;
        let answer = self.daemon.ask(|operator| Ok(operator.reload()));
        self.daemon.configure()?;
        match answer {
            Ok(Err(ControlError::Refused(_))) => {}
            // The daemon ended for lack of memory.
            Ok(Err(_)) if self.daemon.may_abort() => {}
            Ok(other) => self.blame(format!("a broken file was not refused: {other:?}")),
            Err(wrong) => self.blame(wrong),
        }
        Ok(())
    }

    fn bring_up(&mut self) -> Result<(), LabError> {
        self.daemon.give_memory();
        note(&self.oracle, self.daemon.look());
        if !self.daemon.is_up() {
            self.daemon.launch()?;
        }
        self.continue_daemon();
        self.daemon.give_descriptors();
        Ok(())
    }

    fn continue_daemon(&mut self) {
        self.daemon.signal(Signal::SIGCONT);
        if let Some(since) = self.stopped_ns.take() {
            self.stops.push((since, now_ns()));
        }
    }

    fn end_of(&mut self, undo: Undo) -> Result<(), LabError> {
        match undo {
            Undo::Launch if self.daemon.is_up() => {}
            Undo::Launch => self.daemon.launch()?,
            Undo::ContinueDaemon => self.continue_daemon(),
            Undo::ContinueWorker(number) => self.workers.signal(number, Signal::SIGCONT),
            Undo::MendLink(port) => {
                self.router.iter_mut().try_for_each(|router| router.lose(port, 0))?;
            }
            Undo::MoveClock(step_s) => clock::advance(step_s)?,
            Undo::StopWorker(number) => self.workers.signal(number, Signal::SIGSTOP),
            Undo::StopDaemon if self.daemon.is_up() => {
                self.daemon.signal(Signal::SIGSTOP);
                self.stopped_ns.get_or_insert_with(now_ns);
            }
            Undo::StopDaemon => {}
            Undo::GiveMemory => self.bring_up()?,
            Undo::LaunchCoordinator => {
                self.coordinator.iter_mut().try_for_each(RoundCoordinator::launch)?;
            }
            Undo::ContinueCoordinator => {
                self.coordinator.iter_mut().for_each(|it| it.signal(Signal::SIGCONT));
            }
            Undo::EndHostile(number) => self.workers.end_hostile(number),
            Undo::GiveDescriptors => self.daemon.give_descriptors(),
            Undo::EndBypass => {
                self.bring_up()?;
                note(&self.oracle, self.daemon.ask(|operator| operator.bypass(false)).err());
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
}
