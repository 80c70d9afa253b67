//! The scheduler thread: the only place that reads the clock and calls the policy.
//!
//! One thread serves all clients and ports, so no decision needs a lock. A round scans the lanes
//! (hot clients every round, cold ones in turns, a budget for each so that none starves the
//! others), publishes permits, asks the links that something happened to, and wakes the sleepers
//! last. Between rounds it takes commands, runs what is due, and looks whether it may sleep.
//!
//! * *Hot path.* [`intake`]: decide, write the permit, and account for it afterwards. Counters are
//!   plain integers of this thread.
//! * *Spin, then sleep.* It spins for `scheduler.spin_us` after the last record. Where a client was
//!   just woken, turns are short and it yields between them, in case that client shares its core:
//!   then spinning would cost 50 µs a permit and yielding costs 5. The sleep itself is the protocol
//!   of [`laxity_shm::sleep`].
//! * *Heartbeat.* Every five milliseconds while awake; while flows wait, a sleep ends after
//!   [`WAITING_SLEEP_MAX`]. With nothing waiting there is none to give: whoever submits wakes us.
//! * *Distrust.* A record that does not decode releases its client at once, at the first one: its
//!   memory is corrupt, and everything it waits for resolves unscheduled. Nobody else notices.

pub mod cluster;
mod commands;
pub mod credit;
pub mod deadlines;
mod ends;
pub mod fetches;
pub mod flows;
pub mod hints;
pub mod intake;
pub mod on_wire;
pub mod overdue;
mod poller;
pub mod ports;
mod publish;
mod publisher;
mod record_sink;
pub mod running;
mod scan;
mod scan_order;
mod serve;
pub mod silence;
pub mod trace;
pub mod trust;
mod watches;

use std::sync::Arc;
use std::time::Duration;

use laxity_policy::config::InvalidConfig;
use laxity_policy::{Span, Time};
use laxity_shm::layout::attention;
use laxity_shm::sleep::{current_cpu, now_ns};
use laxity_shm::sync::heavy_fence;
use tracing::{debug, info, warn};

use crate::clients::{BUDGET, Client};
use crate::config::Config;
use crate::coordinator::exchange::CoordinatorExchange;
use crate::driver::credit::CreditTerms;
use crate::driver::hints::Hints;
use crate::driver::intake::Intake;
use crate::driver::poller::Poller;
use crate::driver::publisher::Publisher;
use crate::driver::scan_order::ScanOrder;
use crate::driver::trace::Tracer;
use crate::driver::watches::{OverdueWatch, SilenceWatch};
use crate::mailbox::{Inbox, SnapshotSlot};
use crate::stats::LoopCounters;

/// Looks at lanes in a turn, i.e. between readings of the clock, and rounds that those are at
/// least. What is done between turns takes as long as a dozen looks, and a submit that comes
/// meanwhile waits. So turns are long: some microseconds, half of `DUE_MIN`.
const LOOKS_PER_TURN: usize = 1024;
const ROUNDS_MIN: usize = 4;
/// The same after a client was woken: if it shares this core, looking keeps it from answering.
const LOOKS_AFTER_WAKE: usize = 8;
/// Records after which a turn ends, since the clock goes on meanwhile.
const RECORDS_PER_TURN: usize = 64;
/// Time between heartbeats while awake.
const BEAT: Span = Span::from_millis(5);
/// Longest sleep while flows are held: clients take a scheduler for stalled after 100 ms.
const WAITING_SLEEP_MAX: Span = Span::from_millis(20);

/// Why there is no scheduler.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// A field is out of range for the policy. Fix the configuration.
    #[error(transparent)]
    Config(#[from] InvalidConfig),
    /// The system is out of descriptors. Raise `LimitNOFILE`.
    #[error("cannot make the scheduler's epoll: {0}")]
    System(nix::Error),
}

impl From<nix::Error> for DriverError {
    /// Not as a source: the text says it.
    fn from(cause: nix::Error) -> Self {
        Self::System(cause)
    }
}

/// The scheduler. Made on any thread, then [`Driver::run`] on its own.
#[derive(Debug)]
pub struct Driver {
    inbox: Inbox,
    config: Arc<Config>,
    intake: Intake,
    clients: Vec<Option<Client>>,
    order: ScanOrder,
    publisher: Publisher,
    poller: Poller,
    spin: Spin,
    silence: SilenceWatch,
    overdue: OverdueWatch,
    beaten: Time,
    /// When garbage was warned of last.
    warned: Time,
}

/// When the thread sleeps, and when it lets others have its core.
#[derive(Debug)]
struct Spin {
    /// Time after the last record in which the thread spins.
    span: Span,
    /// When the last record came that somebody waits for.
    active: Time,
    woke_client: Time,
}

impl Spin {
    /// Nothing came for so long that the thread may sleep.
    fn is_over(&self, now: Time) -> bool {
        now.since(self.active) >= self.span
    }

    /// A client slept a moment ago: perhaps because it shares this core.
    fn woke_lately(&self, now: Time) -> bool {
        now.since(self.woke_client) < self.span
    }
}

impl Driver {
    /// A scheduler with no clients.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn new(
        inbox: Inbox,
        slot: Arc<SnapshotSlot>,
        config: &Arc<Config>,
    ) -> Result<Self, DriverError> {
        let now = Time(now_ns());
        let poller = Poller::new(inbox.fd())?;
        let mut driver = Self {
            inbox,
            intake: Intake {
                now,
                ports: ports::ports(config)?,
                hints: Hints::new(now, config)?,
                counters: LoopCounters::default(),
                wakes: Vec::new(),
                quiet: 0,
                trust: trust::Trust::default(),
                holding: false,
                credit: CreditTerms::new(now),
                bypass: false,
                trace: Tracer::default(),
            },
            config: Arc::clone(config),
            clients: Vec::new(),
            order: ScanOrder::default(),
            publisher: Publisher::new(slot),
            poller,
            spin: Spin {
                span: Span::ZERO,
                active: now,
                woke_client: Time::ZERO,
            },
            silence: SilenceWatch::new(now),
            overdue: OverdueWatch::new(now),
            beaten: Time::ZERO,
            warned: Time::ZERO,
        };
        driver.configure(config)?;
        Ok(driver)
    }

    /// Reports to the coordinator behind `exchange`, and follows it.
    #[must_use]
    pub fn attending(mut self, exchange: Arc<CoordinatorExchange>) -> Self {
        self.intake.hints.attend(exchange, &self.config);
        self
    }

    /// Schedules until it is told to stop. All clients are released at the end, however it comes.
    pub fn run(mut self) {
        if let Some(cpu) = self.config.scheduler.cpu {
            pin(cpu);
        }
        while self.turn() {}
        for client in self.clients.iter_mut().flatten() {
            client.release();
        }
        self.publish();
        info!("the scheduler has released its clients and ends");
    }

    /// Rounds until something came or the clock is to be looked at, and what is due then. False to
    /// stop.
    fn turn(&mut self) -> bool {
        if self.inbox.is_pending() && !self.obey() {
            return false;
        }
        // The inner loop looks at lanes and does nothing else: half of its length is part of the
        // time that a submit waits for its permit.
        let mut records = 0;
        let quiet = self.intake.quiet;
        for _ in 0..self.rounds() {
            let taken = self.round();
            records += taken;
            // Whoever was woken may need this core.
            if taken > 0 && self.answer() || records >= RECORDS_PER_TURN {
                break;
            }
        }
        records += self.between_turns();
        self.answer();
        self.intake.now = Time(now_ns());
        // What nobody waits for is no reason to stay awake: it may take a core from those who send
        // it.
        let asked = self.is_asked(records, quiet);
        self.due();
        self.tell_idleness();
        if !asked {
            let now = self.intake.now;
            if self.spin.is_over(now) || self.clients.is_empty() {
                self.sleep();
            } else if self.spin.woke_lately(now) {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        true
    }

    /// Looks at the hot clients in the next turn.
    fn rounds(&self) -> usize {
        // Without spinning, or if what it woke for is nothing that anybody waits for, there is but
        // one look before the sleep.
        let now = self.intake.now;
        let looks = if self.spin.is_over(now) || self.spin.woke_lately(now) {
            LOOKS_AFTER_WAKE
        } else {
            LOOKS_PER_TURN
        };
        (looks / self.order.looks()).max(ROUNDS_MIN)
    }

    /// Permits what the links allow now, and wakes whom it concerns; whether it woke anybody.
    #[inline]
    fn answer(&mut self) -> bool {
        self.intake.serve(&mut self.clients);
        self.wake_clients()
    }

    /// Wakes those whom a permit awaits; whether there was one.
    fn wake_clients(&mut self) -> bool {
        if self.intake.wakes.is_empty() {
            return false;
        }
        let mut woken = false;
        for (index, lane) in core::mem::take(&mut self.intake.wakes) {
            let client = self
                .clients
                .get_mut(index as usize)
                .and_then(Option::as_mut);
            if let Some(consumer) = client.and_then(|client| client.served.consumer(lane))
                && consumer.wake()
            {
                self.intake.counters.client_wakes += 1;
                // Read anew: where the two share a core, the client has run meanwhile.
                self.spin.woke_client = Time(now_ns());
                woken = true;
            }
        }
        woken
    }

    /// What is due by the clock: links, admission, heartbeats, lost completions, the snapshot.
    fn due(&mut self) {
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
            let began = processor_time();
            let decided = intake.hints.decide(now, &mut intake.ports);
            intake.hints.rest(now, processor_time().since(began));
            if let Some(pruned) = decided {
                intake.counters.orders += 1;
                intake.counters.pruned_requests = pruned as u64;
                self.publisher.note_change();
                serve = true;
            }
        }
        if self.intake.hints.cluster.due() <= now {
            let intake = &mut self.intake;
            serve |= intake.hints.meet(now, &mut intake.ports);
        }
        if now.since(self.beaten) >= BEAT {
            self.beat();
            self.intake.trace.forget_abandoned(now);
        }
        if now >= self.silence.due() {
            self.look_for_silence();
            serve = true;
        }
        if self.overdue.take_due(now) {
            // Nothing is overdue before what was told of it is read.
            let looks = usize::from(self.config.scheduler.slots) / BUDGET + 1;
            for _ in 0..looks {
                let quiet = self.intake.quiet;
                let swept = self.sweep_lanes();
                self.is_asked(swept.records, quiet);
                if swept.is_all {
                    break;
                }
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

    fn beat(&mut self) {
        self.beaten = self.intake.now;
        self.publisher.progress();
        let cpu = current_cpu();
        for client in self.clients.iter().flatten() {
            client.served.header().set_daemon_cpu(cpu);
            client.served.header().beat(self.beaten.0);
        }
    }

    /// Sleeps until something can have happened. See [`laxity_shm::sleep`] for why nothing is
    /// missed.
    fn sleep(&mut self) {
        for client in self.clients.iter().flatten() {
            client.served.header().raise(attention::SLEEPING);
        }
        let ordered = self.clients.is_empty() || heavy_fence();
        // Woken for what nobody waits for, it goes on sleeping, so to speak: the clients were never
        // told otherwise, so that no new fence is needed, which would interrupt all of them.
        while self.nap(ordered) {}
        for client in self.clients.iter().flatten() {
            client.served.header().lower(attention::SLEEPING);
        }
        self.intake.now = Time(now_ns());
        self.intake.serve(&mut self.clients);
        self.wake_clients();
        self.beat();
    }

    /// Sleeps once, unless there is something to do; whether to sleep on.
    fn nap(&mut self, ordered: bool) -> bool {
        // Orders come first: what clients do in answer to one must not be read before it.
        if self.inbox.is_pending() {
            return false;
        }
        let before = self.intake.quiet;
        let swept = self.sweep_lanes();
        if self.is_asked(swept.records, before) || self.inbox.is_pending() {
            return false;
        }
        // What this look or the round before it left to do is due now, not after the sleep.
        self.intake.serve(&mut self.clients);
        self.wake_clients();
        self.intake.now = Time(now_ns());
        self.due();
        self.tell_idleness();
        if !swept.is_all {
            return true;
        }
        let limit = self.sleep_limit(ordered);
        if limit == Span::ZERO {
            return false;
        }
        self.beat();
        self.intake.counters.sleeps += 1;
        let woken = self.poller.sleep(limit);
        self.intake.now = Time(now_ns());
        if self.inbox.is_pending() {
            return false;
        }
        // Whoever woke it first, and everybody if that was nothing.
        let before = self.intake.quiet;
        let mut records = 0;
        for index in woken {
            self.warm(index);
            records += self.scan(index);
        }
        !self.is_asked(records, before) && ordered && !self.clients.is_empty()
    }

    /// Whether there is anything among these records that somebody waits for. `quiet` is the count
    /// before them.
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

    fn sleep_limit(&self, ordered: bool) -> Span {
        let now = self.intake.now;
        let ports = &self.intake.ports;
        let due = [
            self.intake.hints.due(),
            self.intake.hints.cluster.due(),
            self.publisher.due(),
        ];
        let ports_due = ports.iter().map(|port| port.due);
        let mut until = ports_due.chain(due).min().unwrap_or(Time::NEVER);
        // Who waits, be it for a fetch that is held, looks for signs of life.
        let waits = ports.iter().any(|port| port.link.waiting_flows() > 0);
        if waits {
            until = until.min(self.silence.due());
        }
        if self.intake.holding || self.intake.hints.cluster.fetches.holds() || !ordered {
            until = until.min(now + WAITING_SLEEP_MAX);
        }
        until.since(now)
    }
}

impl Drop for Driver {
    /// Also when the thread panics: clients must not wait for a scheduler that is gone.
    fn drop(&mut self) {
        for client in self
            .clients
            .iter_mut()
            .flatten()
            .filter(|c| !c.state.released)
        {
            client.release();
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

/// What this thread has used. Being preempted is not work that should be done less often.
fn processor_time() -> Time {
    let clock = nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID;
    let used = nix::time::clock_gettime(clock).map_or(Duration::ZERO, Duration::from);
    Time(used.as_nanos() as u64)
}
