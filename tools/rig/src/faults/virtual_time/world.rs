//! A virtual world: the queue of events, the wire, and what is checked.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::{Hash as _, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use laxity_client::{Client, Lane, Sleep};
use laxity_daemon::driver::NextStep;
use laxity_policy::Time;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::cluster::VirtualCoordinator;
use super::host::VirtualHost;
use super::port::VirtualPort;
use super::process::{QUEUES, VirtualProcess, path_of};
use super::queue::{Done, VirtualQueue};
use super::{chaos, clock, settings};
use crate::error::LabError;
use crate::faults::frame::Frame;
use crate::faults::oracle::{Oracle, WAIT_MAX};
use crate::faults::plant::Plant;
use crate::faults::round::Outcome;
use crate::faults::schedule::Schedule;

/// Applications of a world at its begin.
const APPLICATIONS: u32 = 4;
/// Mean time between two looks of registration at its sockets.
const SERVE_NS: u64 = 600_000;
/// Mean time between two looks at the stream to the coordinator.
const COORDINATE_NS: u64 = 2_000_000;
/// Time between two things that a hostile client does.
const HARM_NS: u64 = 1_000_000;
/// Time in which all processes find a daemon that is there.
const ATTACHED_NS: u64 = 60_000_000;
/// Time in which all transfers complete after the last fault.
const FINISH_NS: u64 = 5_000_000_000;
/// Time in which the daemon forgets all clients after their end.
const FORGET_NS: u64 = 1_000_000_000;
/// Events of a round, after which something runs without end.
const EVENTS_MAX: u64 = 1_000_000;

/// What happens next in a world. Equal times are in the order of their plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum WorldEvent {
    /// A step of the scheduler, unless another one was planned since.
    Step(u64),
    Serve,
    /// A queue acts, unless another act was planned since.
    Act {
        process: usize,
        queue: usize,
        plan: u64,
    },
    /// The fabric delivered bytes of a transfer to its receiver.
    Arrived {
        process: usize,
        queue: usize,
        number: u64,
        bytes: u64,
    },
    Harm(usize),
    Coordinate,
    Fault(usize),
    Undo(chaos::FaultEnd),
}

pub(super) struct VirtualWorld<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) plant: Option<Plant>,
    /// Whether the planted bug may happen.
    pub(super) armed: Arc<AtomicBool>,
    pub(super) rng: ChaCha8Rng,
    pub(super) now_ns: u64,
    pub(super) host: VirtualHost,
    pub(super) coordinator: VirtualCoordinator,
    pub(super) port: VirtualPort,
    pub(super) processes: Vec<VirtualProcess>,
    pub(super) oracle: Oracle,
    pub(super) outcome: Outcome,
    /// Periods in which the daemon or the port was stopped.
    pub(super) stops: Vec<(u64, u64)>,
    /// Since when the daemon is stopped.
    pub(super) stopped_ns: Option<u64>,
    /// Time in which nothing ran.
    pub(super) starved_ns: u64,
    /// Number of faults and ends of faults that are still to come.
    pub(super) planned: usize,
    /// Lanes and a client that a planted bug leaves behind.
    pub(super) leaked_lanes: Vec<Lane>,
    leaked: Option<Client>,
    events: BinaryHeap<Reverse<(u64, u64, WorldEvent)>>,
    number: u64,
    step: u64,
    digest: std::hash::DefaultHasher,
}

pub(super) fn play(schedule: &Schedule, plant: Option<Plant>) -> Result<Outcome, LabError> {
    let folder = tempfile::tempdir().map_err(LabError::system("making a folder"))?;
    let now_ns = clock::begin();
    let mut rng = ChaCha8Rng::seed_from_u64(schedule.seed);
    let config = settings::draw(&mut rng);
    let bytes_per_s = config.nic[0].rate.bytes_per_s;
    let mut world = VirtualWorld {
        schedule,
        plant,
        armed: Arc::new(AtomicBool::new(false)),
        rng,
        now_ns,
        host: VirtualHost::new(folder.path(), config),
        coordinator: VirtualCoordinator::new(Time(now_ns))?,
        port: VirtualPort::new(bytes_per_s),
        processes: Vec::new(),
        oracle: Oracle::default(),
        outcome: Outcome::default(),
        stops: Vec::new(),
        stopped_ns: None,
        starved_ns: 0,
        planned: schedule.faults.len(),
        leaked_lanes: Vec::new(),
        leaked: None,
        events: BinaryHeap::new(),
        number: 0,
        step: 0,
        digest: std::hash::DefaultHasher::new(),
    };
    world.play()?;
    let mut outcome = world.outcome;
    outcome.digest = world.digest.finish();
    outcome.by_path = std::mem::take(&mut world.oracle.counts);
    outcome.violations = std::mem::take(&mut world.oracle.violations);
    Ok(outcome)
}

impl VirtualWorld<'_> {
    fn play(&mut self) -> Result<(), LabError> {
        self.launch()?;
        for _ in 0..APPLICATIONS {
            self.start_application();
        }
        self.plan(0, WorldEvent::Serve);
        self.plan(0, WorldEvent::Coordinate);
        for (index, fault) in self.schedule.faults.iter().enumerate() {
            // Steps are short, so a round needs less time than one with processes.
            let at_ns = self.now_ns + fault.at_ms * 500_000 + fault.choice % 500_000;
            self.push(at_ns, WorldEvent::Fault(index));
        }
        if self.run(u64::MAX, |world| world.planned == 0)? {
            self.recover()?;
            self.run(self.now_ns + ATTACHED_NS, |_| false)?;
            self.finish()?;
        }
        Ok(())
    }

    /// Lets all queues and then all clients end, and checks that nothing is left.
    fn finish(&mut self) -> Result<(), LabError> {
        for process in self.applications() {
            self.lose_threads(process, 0);
            for queue in 0..QUEUES {
                self.processes[process].queues[queue].finishing = true;
                self.act_in(process, queue, 0);
            }
        }
        let is_over = |world: &Self| {
            let queues = world.processes.iter().flat_map(|process| &process.queues);
            queues.into_iter().all(|queue| queue.ended)
        };
        if !self.run(self.now_ns + FINISH_NS, is_over)? {
            self.blame_for_open();
            return Ok(());
        }
        self.check_lanes();
        if self.plant == Some(Plant::Leak) && self.outcome.by_kind.contains_key("daemon_killed") {
            self.leaked = self.processes.iter().find_map(|process| process.client.clone());
        }
        for process in self.applications() {
            self.count(process);
        }
        for process in 0..self.processes.len() {
            let is_leaked = self.leaked.is_some() && self.processes[process].is_application();
            if !is_leaked {
                self.host.cut_off(self.processes[process].number);
            }
            self.processes[process].die();
        }
        let is_idle = self.run(self.now_ns + FORGET_NS, |world| world.host.is_idle())?;
        self.check_accounts();
        if !is_idle && self.oracle.violations.is_empty() && self.host.is_up() {
            self.blame("the scheduler does not sleep, although all clients are gone");
        }
        if let Some(wrong) = self.coordinator.audit() {
            self.blame(format!("coordinator: {wrong}"));
        }
        self.outcome.orders = self.coordinator.orders;
        let longest = self.oracle.judge_waits(&self.stops, WAIT_MAX);
        self.outcome.longest_stall_ms = longest.as_millis() as u64;
        Ok(())
    }

    /// Reports a violation for each transfer that is still open.
    fn blame_for_open(&mut self) {
        if self.oracle.violations.is_empty() {
            let open = self.processes.iter().flat_map(|process| {
                let path = path_of(process.number);
                let open = process.queues.iter().filter_map(VirtualQueue::open);
                open.map(move |what| format!("{path}, process {}: {what}", process.number))
            });
            let open: Vec<String> = open.collect();
            self.blame(format!("never completed: {}", open.join("; ")));
        }
    }

    /// Checks that threads which ended gave their lanes back.
    fn check_lanes(&mut self) {
        let Some(snapshot) = self.host.snapshot() else { return };
        let lanes = snapshot.clients.iter().map(|client| client.lanes).max().unwrap_or_default();
        self.outcome.saw_lanes = lanes as usize >= QUEUES;
        if lanes as usize > QUEUES + 1 {
            self.blame(format!("a process has {lanes} lanes, not at most {}", QUEUES + 1));
        }
    }

    /// Checks that the daemon has forgotten all clients, and accounts for none of their bytes.
    fn check_accounts(&mut self) {
        let Some(snapshot) = self.host.snapshot() else {
            return self.blame("the scheduler makes no snapshot");
        };
        let (mut flows, mut bytes) = (0, 0);
        for port in &snapshot.ports {
            let tallies = port.link.waiting_by_level.iter().chain([&port.link.held]);
            flows += tallies.map(|tally| tally.flows).sum::<u64>();
            bytes += port.link.in_flight_bytes;
        }
        format!("{:?}", snapshot.ports).hash(&mut self.digest);
        let (clients, fetches) = (snapshot.clients.len(), snapshot.fetches);
        if clients > 0 || flows > 0 || bytes > 0 || fetches > 0 {
            self.blame(format!(
                "at the end the daemon has {clients} clients, {flows} waiting flows, {bytes} bytes \
                 in flight, {fetches} fetches"
            ));
        }
    }

    pub(super) fn blame(&mut self, text: impl Into<String>) {
        self.oracle.blame(text);
    }

    fn push(&mut self, at_ns: u64, event: WorldEvent) {
        self.number += 1;
        self.events.push(Reverse((at_ns, self.number, event)));
    }

    pub(super) fn plan(&mut self, after_ns: u64, event: WorldEvent) {
        self.push(self.now_ns.saturating_add(after_ns), event);
    }

    fn act_in(&mut self, process: usize, queue: usize, after_ns: u64) {
        let plans = &mut self.processes[process].plans;
        plans[queue] += 1;
        let plan = plans[queue];
        self.plan(after_ns, WorldEvent::Act { process, queue, plan });
    }

    pub(super) fn step_in(&mut self, after_ns: u64) {
        self.step += 1;
        self.plan(after_ns, WorldEvent::Step(self.step));
    }

    /// Stops everything for a time: timers are late, and the wire and later faults move.
    pub(super) fn pause(&mut self, for_ns: u64) {
        self.now_ns += for_ns;
        self.starved_ns += for_ns;
        for free_ns in &mut self.port.free_ns {
            *free_ns += for_ns;
        }
        let events = std::mem::take(&mut self.events).into_iter();
        let later = events.map(|Reverse((at_ns, number, event))| match event {
            WorldEvent::Fault(_) | WorldEvent::Undo(_) | WorldEvent::Arrived { .. } => {
                Reverse((at_ns + for_ns, number, event))
            }
            _ => Reverse((at_ns, number, event)),
        });
        self.events = later.collect();
    }

    /// Plays events until `is_over`, or until `limit_ns` and then returns false.
    fn run(&mut self, limit_ns: u64, is_over: impl Fn(&Self) -> bool) -> Result<bool, LabError> {
        while !is_over(self) {
            let Some(&Reverse((at_ns, _, event))) = self.events.peek() else { return Ok(false) };
            if at_ns > limit_ns || !self.oracle.violations.is_empty() {
                return Ok(false);
            }
            self.events.pop();
            self.outcome.events += 1;
            if self.outcome.events > EVENTS_MAX {
                self.blame(format!("after {EVENTS_MAX} events something still runs"));
            }
            // After a pause of everything, events are late.
            self.now_ns = self.now_ns.max(at_ns);
            clock::set(self.now_ns);
            (self.now_ns, event).hash(&mut self.digest);
            self.happen(event)?;
            if self.stopped_ns.is_none() && self.host.is_rung() {
                let after_ns = self.rng.random_range(1_000..30_000);
                self.step_in(after_ns);
            }
        }
        Ok(true)
    }

    fn happen(&mut self, event: WorldEvent) -> Result<(), LabError> {
        match event {
            WorldEvent::Step(number) if number == self.step && self.stopped_ns.is_none() => {
                self.step();
            }
            WorldEvent::Step(_) => {}
            WorldEvent::Serve => {
                if self.stopped_ns.is_none() {
                    self.host.serve()?;
                }
                let after_ns = self.rng.random_range(0..2 * SERVE_NS);
                self.plan(after_ns, WorldEvent::Serve);
            }
            WorldEvent::Coordinate => {
                self.coordinate();
                let after_ns = self.rng.random_range(0..2 * COORDINATE_NS);
                self.plan(after_ns, WorldEvent::Coordinate);
            }
            WorldEvent::Act { process, queue, plan } => {
                if self.processes[process].plans.get(queue) == Some(&plan) {
                    self.act(process, queue);
                }
            }
            WorldEvent::Arrived { process, queue, number, bytes } => {
                self.arrive(event, process, queue, (number, bytes));
            }
            WorldEvent::Harm(process) => {
                if self.processes[process].harm(&self.host.socket) {
                    self.plan(HARM_NS, WorldEvent::Harm(process));
                }
            }
            WorldEvent::Fault(index) => {
                self.planned -= 1;
                let fault = self.schedule.faults[index].clone();
                *self.outcome.by_kind.entry(fault.kind.name()).or_default() += 1;
                self.apply(&fault)?;
            }
            WorldEvent::Undo(end) => {
                self.planned -= 1;
                self.end_of(end)?;
            }
        }
        Ok(())
    }

    fn coordinate(&mut self) {
        if self.stopped_ns.is_none()
            && let Some(daemon) = self.host.stream()
            && let Some(wrong) = self.coordinator.look(Time(self.now_ns), daemon)
        {
            self.blame(format!("coordinator: {wrong}"));
        }
    }

    fn step(&mut self) {
        match self.host.step() {
            Some(NextStep::Turn | NextStep::Yield) => {
                let after_ns = self.rng.random_range(1_000..4_000);
                self.step_in(after_ns);
            }
            Some(NextStep::Spin) => self.step_in(5_000),
            Some(NextStep::Wait(limit)) => {
                // A scheduler without work waits for ever.
                self.step += 1;
                if limit.0 < 1 << 60 {
                    self.plan(limit.0, WorldEvent::Step(self.step));
                }
            }
            Some(NextStep::Stop) => self.blame("the scheduler stopped by itself"),
            None => return,
        }
        self.wake();
    }

    /// Wakes the queues whose sleep a wake-up of the scheduler has ended.
    fn wake(&mut self) {
        for process in 0..self.processes.len() {
            for queue in 0..self.processes[process].queues.len() {
                let sleep = &mut self.processes[process].queues[queue].sleep;
                if sleep.as_ref().is_some_and(Sleep::is_over) {
                    *sleep = None;
                    let after_ns = self.rng.random_range(2_000..40_000);
                    self.act_in(process, queue, after_ns);
                }
            }
        }
    }

    fn act(&mut self, index: usize, queue: usize) {
        let starved_ns = self.starved_ns + self.processes[index].starved_ns;
        let process = &mut self.processes[index];
        let Some(client) = process.client.as_ref().filter(|_| !process.stopped) else { return };
        let times = (self.now_ns, starved_ns);
        let mut done = Vec::new();
        let at_ns = process.queues[queue].act(client, times, &mut done);
        for done in done {
            match done {
                Done::Frame(frame) => self.tell(index, frame),
                Done::Wrong(wrong) => {
                    let path = path_of(self.processes[index].number);
                    self.blame(format!("{path}, queue {queue}: {wrong}"));
                }
                Done::Post { number, bytes, direction, .. } => {
                    let at_ns = self.port.post(self.now_ns, direction, bytes);
                    self.push(at_ns, WorldEvent::Arrived { process: index, queue, number, bytes });
                }
            }
        }
        if let Some(at_ns) = at_ns {
            self.act_in(index, queue, at_ns - self.now_ns);
        }
    }

    pub(super) fn tell(&mut self, process: usize, frame: Frame) {
        let worker = self.processes[process].worker;
        for frame in self.processes[process].reported.pass(frame) {
            self.oracle.take(worker, &frame);
        }
    }

    pub(super) fn count(&mut self, process: usize) {
        let stats = self.processes[process].client.as_ref().map(Client::stats);
        if let Some(stats) = stats {
            let (scheduled, bypassed) = (stats.scheduled_bytes, stats.bypassed_bytes);
            self.tell(process, Frame::Counted { scheduled, bypassed });
        }
    }

    fn arrive(
        &mut self,
        event: WorldEvent,
        index: usize,
        queue: usize,
        (number, bytes): (u64, u64),
    ) {
        let process = &mut self.processes[index];
        if process.stopped {
            // The application sees it when it runs again.
            return self.plan(1_000_000, event);
        }
        if let Some(found) = process.queues.get_mut(queue) {
            if let Some(wrong) = found.complete(number, bytes) {
                let path = path_of(process.number);
                self.blame(format!("{path}, queue {queue}: {wrong}"));
            }
            self.act_in(index, queue, 0);
        }
    }

    fn applications(&self) -> Vec<usize> {
        let applications = self.processes.iter().enumerate();
        applications.filter(|(_, it)| it.is_application()).map(|(index, _)| index).collect()
    }

    pub(super) fn application(&self, choice: u64) -> Option<usize> {
        let all = self.applications();
        all.get((choice % all.len().max(1) as u64) as usize).copied()
    }

    pub(super) fn start_application(&mut self) {
        let (index, number) = (self.processes.len(), self.processes.len() as u32);
        let worker = self.oracle.add(path_of(number));
        let plant = (self.plant, &self.armed);
        let (seed, socket) = (self.schedule.seed, &self.host.socket);
        self.processes.push(VirtualProcess::application(number, worker, seed, socket, plant));
        self.wake_up(index);
    }

    pub(super) fn wake_up(&mut self, process: usize) {
        for queue in 0..self.processes[process].queues.len() {
            self.act_in(process, queue, 0);
        }
    }

    pub(super) fn start_hostile(&mut self, choice: u64) -> usize {
        let (index, number) = (self.processes.len(), self.processes.len() as u32);
        let (seed, socket) = (self.schedule.seed, &self.host.socket);
        self.processes.push(VirtualProcess::hostile(number, seed, socket, choice));
        self.plan(0, WorldEvent::Harm(index));
        index
    }
}
