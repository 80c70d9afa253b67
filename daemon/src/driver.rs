//! The scheduler thread, which reads the clock and calls the policy.
//!
//! One thread serves all clients and ports, so no decision needs a lock. A round scans lanes: those
//! of hot clients in every round, those of cold clients in turns, each with a budget. Then it
//! publishes permits, asks the changed links, and wakes sleeping clients. Between rounds, the
//! thread runs commands and due work, and checks whether it may sleep.
//!
//! * *Hot path.* [`intake`] decides, writes the permit and accounts for it afterwards. Counters are
//!   plain integers of this thread.
//! * *Spin, then sleep.* The thread spins for `scheduler.spin_us` after the last record. After it
//!   woke a client, it spins briefly and yields. On a shared core, a permit takes 5 µs with a yield
//!   and 50 µs without. [`laxity_shm::sleep`] has the protocol of the sleep.
//! * *Heartbeat.* It changes every five milliseconds while the thread is awake, and before each
//!   sleep. While flows wait, a sleep ends at the next check for silent clients. While flows are
//!   held, it ends after [`WAITING_SLEEP_MAX`]. Without waiting flows, clients expect no heartbeat.
//! * *Distrust.* The first record that does not decode releases its client, whose memory is
//!   corrupt. Its flows go out unscheduled, and other clients are not affected.

pub mod ahead;
mod clock;
pub mod cluster;
mod commands;
pub mod credit;
pub mod deadlines;
mod ends;
mod explain;
pub mod fetches;
pub mod flows;
pub mod hint_time;
pub mod hints;
pub mod id_owners;
pub mod intake;
pub mod on_wire;
pub mod overdue;
pub mod peers;
mod poller;
pub mod ports;
mod publish;
mod publisher;
mod record_sink;
mod residual;
pub mod running;
mod scan;
mod scan_order;
mod serve;
pub mod shadow_link;
pub mod silence;
mod sleeping;
pub mod trace;
pub mod trust;
mod watches;

use std::sync::Arc;

use laxity_policy::config::InvalidConfig;
use laxity_policy::{Span, Time};
use laxity_shm::marking::Treatments;
use laxity_shm::sleep::current_cpu;
use tracing::{debug, info, warn};

use crate::clients::{AttachedClient, BUDGET};
use crate::config::Config;
use crate::coordinator::exchange::CoordinatorExchange;
use crate::domains::Domains;
pub use crate::driver::clock::SchedulerClock;
use crate::driver::credit::CreditConditions;
use crate::driver::hint_time::HintTime;
use crate::driver::hints::Hints;
use crate::driver::intake::Intake;
use crate::driver::peers::PeerNumbers;
use crate::driver::poller::Poller;
use crate::driver::publisher::Publisher;
use crate::driver::scan_order::{DomainRecords, ScanOrder};
use crate::driver::trace::Tracer;
use crate::driver::watches::{OverdueWatch, SilenceWatch};
use crate::mailbox::{Inbox, SnapshotSlot};
use crate::stats::LoopCounters;

/// Lanes that are scanned between two readings of the clock. The work between turns takes as long
/// as a dozen lanes and delays submits, so turns are long: some microseconds, half of `DUE_MIN`.
const LOOKS_PER_TURN: usize = 1024;
/// Fewest rounds of a turn, even if they scan more lanes than `LOOKS_PER_TURN`.
const ROUNDS_MIN: usize = 4;
/// Lanes scanned in a turn after a wake-up. A client on the same core waits until the turn ends.
const LOOKS_AFTER_WAKE: usize = 8;
/// Records after which a turn ends and the clock is read again.
const RECORDS_PER_TURN: usize = 64;
/// The time between heartbeats while the thread is awake.
const BEAT: Span = Span::from_millis(5);
/// Longest sleep while flows are held, or if the fence before the sleep failed. Clients assume a
/// stall after 100 ms.
const WAITING_SLEEP_MAX: Span = Span::from_millis(20);

/// Why the scheduler can't be made.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    #[error(transparent)]
    Config(#[from] InvalidConfig),
    #[error("cannot make the scheduler's epoll")]
    System(#[from] nix::Error),
}

/// What the caller of [`Driver::step`] does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// There may be more records, so the next step follows at once.
    Turn,
    /// Run another step after a pause, because nothing was to be done.
    Spin,
    /// Run another step after other threads ran. A client that was woken may share this core.
    Yield,
    /// Wait for this time at most with [`Driver::wait`], then run another step.
    Wait(Span),
    /// A command ended the scheduler. [`Driver::finish`] then releases its clients.
    Stop,
}

/// The scheduler. It is a state machine: [`Driver::step`] does all pending work and never waits.
/// Any thread may make it, and [`Driver::run`] needs its own thread.
#[derive(Debug)]
pub struct Driver {
    inbox: Inbox,
    config: Arc<Config>,
    intake: Intake,
    clients: Vec<Option<AttachedClient>>,
    /// Which DSCPs the NICs treat alike.
    treatments: Treatments,
    domains: Domains,
    order: ScanOrder,
    domain_records: DomainRecords,
    publisher: Publisher,
    poller: Poller,
    clock: SchedulerClock,
    /// The sleep between two steps, if the last one ended in a wait.
    asleep: Option<Asleep>,
    /// The clients that ended the last wait.
    rung: Vec<u32>,
    spin: SleepRule,
    silence: SilenceWatch,
    overdue: OverdueWatch,
    last_heartbeat: Time,
    /// When the last warning of garbage was logged.
    warned: Time,
    /// Whether the next daemon takes the clients over.
    hands_over: bool,
}

#[derive(Clone, Copy, Debug)]
struct Asleep {
    /// Whether the fence before it took effect. If not, the sleep is short.
    ordered: bool,
}

/// The rule by which the thread sleeps and yields its core.
#[derive(Debug)]
struct SleepRule {
    /// How long the thread spins after the last record.
    span: Span,
    /// When the last record came that a client waits on.
    active: Time,
    woke_client: Time,
}

impl SleepRule {
    /// Reports whether the thread has spun long enough to sleep.
    fn is_over(&self, now: Time) -> bool {
        now.since(self.active) >= self.span
    }

    /// Reports whether a client was woken within the span. It may share this core.
    fn woke_lately(&self, now: Time) -> bool {
        now.since(self.woke_client) < self.span
    }
}

impl Driver {
    pub fn new(
        inbox: Inbox,
        slot: Arc<SnapshotSlot>,
        config: &Arc<Config>,
    ) -> Result<Self, DriverError> {
        Self::by(SchedulerClock::SYSTEM, inbox, slot, config)
    }

    /// Does the same as [`Driver::new`] with other clocks, for tests in virtual time.
    pub fn by(
        clock: SchedulerClock,
        inbox: Inbox,
        slot: Arc<SnapshotSlot>,
        config: &Arc<Config>,
    ) -> Result<Self, DriverError> {
        let now = clock.now();
        let poller = Poller::new(inbox.fd())?;
        let mut driver = Self {
            inbox,
            intake: Intake {
                now,
                ports: Vec::new(),
                hints: Hints::new(now, config)?,
                hint_time: HintTime::new(clock.processor_time),
                counters: LoopCounters::default(),
                wakes: Vec::new(),
                quiet: 0,
                trust: trust::OwnerTrust::default(),
                holding: false,
                credit: CreditConditions::new(now),
                bypass: false,
                trace: Tracer::default(),
                peers: PeerNumbers::default(),
            },
            config: Arc::clone(config),
            clients: Vec::new(),
            treatments: Treatments::UNKNOWN,
            domains: Domains::default(),
            order: ScanOrder::default(),
            domain_records: DomainRecords::new(),
            publisher: Publisher::new(slot),
            poller,
            clock,
            asleep: None,
            rung: Vec::new(),
            spin: SleepRule { span: Span::ZERO, active: now, woke_client: Time::ZERO },
            silence: SilenceWatch { looked: now, warned: Time::ZERO },
            overdue: OverdueWatch::new(now),
            last_heartbeat: Time::ZERO,
            warned: Time::ZERO,
            hands_over: false,
        };
        driver.configure(config)?;
        Ok(driver)
    }

    #[must_use]
    pub fn attending(mut self, exchange: Arc<CoordinatorExchange>) -> Self {
        self.intake.hints.attend(exchange, &self.config);
        self
    }

    /// Runs until the mailbox has a command to stop. All clients are released, even by a panic.
    pub fn run(mut self) {
        if let Some(cpu) = self.config.scheduler.cpu {
            pin(cpu);
        }
        loop {
            match self.step() {
                NextStep::Turn => {}
                NextStep::Spin => std::hint::spin_loop(),
                NextStep::Yield => std::thread::yield_now(),
                NextStep::Wait(limit) => {
                    self.wait(limit);
                }
                NextStep::Stop => break,
            }
        }
        self.finish();
    }

    /// Does the pending work: a turn, or the end of a sleep. Never waits.
    #[inline]
    pub fn step(&mut self) -> NextStep {
        match self.asleep {
            Some(asleep) => self.sleep_on(asleep),
            None => self.run_turn(),
        }
    }

    /// Releases all clients after [`NextStep::Stop`]. The next daemon may take them over.
    pub fn finish(mut self) {
        for client in self.clients.iter_mut().flatten() {
            client.release(self.hands_over);
        }
        self.publish();
        info!("the scheduler has released its clients and ends");
    }

    fn run_turn(&mut self) -> NextStep {
        if self.inbox.is_pending() && !self.run_commands() {
            return NextStep::Stop;
        }
        // The loop only scans lanes, because a submit waits half of its length on average.
        let mut records = 0;
        let quiet = self.intake.quiet;
        for _ in 0..self.rounds() {
            let taken = self.round();
            records += taken;
            // A woken client may need this core.
            if taken > 0 && self.serve_and_wake() || records >= RECORDS_PER_TURN {
                break;
            }
        }
        records += self.between_turns();
        self.serve_and_wake();
        self.intake.now = self.clock.now();
        // Records that no client waits on don't keep the thread awake, which may take a core from
        // their senders.
        let asked = self.is_asked(records, quiet);
        self.run_due_work();
        self.announce_idle_ports();
        let now = self.intake.now;
        if asked {
            NextStep::Turn
        } else if self.spin.is_over(now) || self.clients.is_empty() {
            self.fall_asleep()
        } else if self.spin.woke_lately(now) {
            NextStep::Yield
        } else {
            NextStep::Spin
        }
    }

    fn rounds(&self) -> usize {
        // The look is short if the thread is about to sleep, or if it woke a client lately, which
        // may wait for this core.
        let now = self.intake.now;
        let looks = if self.spin.is_over(now) || self.spin.woke_lately(now) {
            LOOKS_AFTER_WAKE
        } else {
            LOOKS_PER_TURN
        };
        (looks / self.order.looks()).max(ROUNDS_MIN)
    }

    /// Permits what the links allow now, and wakes the clients. Returns whether it woke any.
    #[inline]
    fn serve_and_wake(&mut self) -> bool {
        self.intake.serve(&mut self.clients);
        self.wake_clients()
    }

    /// Wakes the clients that sleep until a permit. Returns whether there were any.
    fn wake_clients(&mut self) -> bool {
        if self.intake.wakes.is_empty() {
            return false;
        }
        let mut woken = false;
        for (index, lane) in core::mem::take(&mut self.intake.wakes) {
            let client = self.clients.get_mut(index as usize).and_then(Option::as_mut);
            if let Some(consumer) = client.and_then(|client| client.served.consumer(lane))
                && consumer.wake()
            {
                self.intake.counters.status.client_wakes += 1;
                // The clock is read again, because a client on the same core has run meanwhile.
                self.spin.woke_client = self.clock.now();
                woken = true;
            }
        }
        woken
    }

    /// Runs what is due: links, admission, heartbeats, overdue bytes and the snapshot.
    fn run_due_work(&mut self) {
        let now = self.intake.now;
        let mut serve = false;
        for port in &mut self.intake.ports {
            if port.due <= now {
                port.dirty = true;
                serve = true;
            }
        }
        if self.intake.hints.due() <= now {
            let intake = &mut self.intake;
            let decided = intake.hints.decide(now, &mut intake.ports, self.clock.processor_time);
            if let Some(pruned) = decided {
                intake.counters.orders += 1;
                intake.counters.pruned_requests = pruned as u64;
                self.publisher.note_change();
                serve = true;
            }
        }
        if self.intake.hints.cluster.due() <= now {
            let intake = &mut self.intake;
            intake.hints.exchange_with_coordinator(now);
        }
        if now.since(self.last_heartbeat) >= BEAT {
            self.beat();
            self.intake.trace.forget_abandoned(now);
        }
        if now >= self.silence.due() {
            self.look_for_silence();
            serve = true;
        }
        if self.overdue.take_due(now) {
            // All completions that were sent have to be read before bytes count as overdue.
            let looks = usize::from(self.config.scheduler.slots) / BUDGET + 1;
            for _ in 0..looks {
                let quiet = self.intake.quiet;
                let swept = self.sweep_lanes();
                self.is_asked(swept.records, quiet);
                if swept.is_all {
                    break;
                }
                self.attend_to_others();
            }
            self.write_off();
            serve = true;
        }
        if serve {
            self.intake.serve(&mut self.clients);
            self.wake_clients();
        }
        if now >= self.publisher.due() {
            self.publish();
        }
    }

    /// Gives others what they wait for, between parts of long work: permits and a heartbeat.
    fn attend_to_others(&mut self) {
        self.intake.now = self.clock.now();
        for port in &mut self.intake.ports {
            port.dirty |= port.due <= self.intake.now;
        }
        self.serve_and_wake();
        if self.intake.now.since(self.last_heartbeat) >= BEAT {
            self.beat();
        }
    }

    fn beat(&mut self) {
        self.last_heartbeat = self.intake.now;
        self.publisher.progress();
        let cpu = current_cpu();
        for client in self.clients.iter().flatten() {
            client.served.header().set_daemon_cpu(cpu);
            client.served.header().beat(self.last_heartbeat.0);
        }
    }

    /// Reports whether a client waits for an answer to any of the last `records` records. `quiet`
    /// is the number of records without a waiting client that were read before these.
    fn is_asked(&mut self, records: usize, quiet: u64) -> bool {
        if records > 0 {
            self.publisher.note_change();
        }
        let asked = records as u64 > self.intake.quiet - quiet;
        if asked {
            self.spin.active = self.intake.now;
        }
        asked
    }

    /// Ends without releasing the clients, as SIGKILL does.
    pub fn abandon(mut self) {
        self.clients.clear();
    }
}

impl Drop for Driver {
    /// Releases all clients, even after a panic: they must not wait for a dead thread.
    fn drop(&mut self) {
        for client in self.clients.iter_mut().flatten().filter(|c| !c.state.released) {
            client.release(false);
        }
    }
}

fn pin(cpu: usize) {
    let mut set = nix::sched::CpuSet::new();
    let pinned = set
        .set(cpu)
        .and_then(|()| nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set));
    match pinned {
        Ok(()) => debug!(cpu, "the scheduler is pinned"),
        Err(error) => warn!(cpu, %error, "cannot pin the scheduler; check scheduler.cpu"),
    }
}
