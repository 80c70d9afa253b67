//! The sleep of the scheduler, as steps between which the caller waits.
//!
//! [`laxity_shm::sleep`] explains why no wake-up is lost.

use laxity_policy::{Span, Time};
use laxity_shm::layout::attention;
use laxity_shm::sync::heavy_fence;

use super::{Asleep, Driver, NextStep, WAITING_SLEEP_MAX};

impl Driver {
    /// Waits for `limit` at most. Returns early if a client or a command wakes the scheduler. The
    /// result says whether anything did, and the next [`Driver::step`] looks there first.
    pub fn wait(&mut self, limit: Span) -> bool {
        self.rung = self.poller.sleep(limit);
        !self.rung.is_empty() || self.inbox.is_pending()
    }

    /// Goes to sleep, unless there is work.
    pub(super) fn fall_asleep(&mut self) -> NextStep {
        for client in self.clients.iter().flatten() {
            client.served.header().raise(attention::SLEEPING);
        }
        let ordered = self.clients.is_empty() || heavy_fence();
        self.look_before_sleep(Asleep { ordered })
    }

    /// Goes on after a wait: sleeps again, or wakes up.
    ///
    /// The clients see one long sleep, even if the thread wakes for records that none waits on. So
    /// it needs no new fence, which would interrupt all clients.
    pub(super) fn sleep_on(&mut self, asleep: Asleep) -> NextStep {
        self.intake.now = self.clock.now();
        let rung = core::mem::take(&mut self.rung);
        if self.inbox.is_pending() {
            return self.wake_up();
        }
        // The clients that woke the thread come first. If they sent nothing, it scans all.
        let before = self.intake.quiet;
        let mut records = 0;
        for index in rung {
            self.warm(index);
            records += self.scan(index);
        }
        if self.is_asked(records, before) || !asleep.ordered || self.clients.is_empty() {
            return self.wake_up();
        }
        self.look_before_sleep(asleep)
    }

    /// Looks for work once more. Returns the longest wait if there is none.
    fn look_before_sleep(&mut self, asleep: Asleep) -> NextStep {
        loop {
            // Commands come first, because records that answer a command must be read after it.
            if self.inbox.is_pending() {
                return self.wake_up();
            }
            let before = self.intake.quiet;
            let swept = self.sweep_lanes();
            if self.is_asked(swept.records, before) || self.inbox.is_pending() {
                return self.wake_up();
            }
            // Work that this scan or the last round left is due before the sleep.
            self.intake.serve(&mut self.clients);
            self.wake_clients();
            self.intake.now = self.clock.now();
            self.run_due_work();
            self.announce_idle_ports();
            if swept.is_all {
                break;
            }
        }
        let limit = self.sleep_limit(asleep.ordered);
        if limit == Span::ZERO {
            return self.wake_up();
        }
        self.beat();
        self.intake.counters.status.sleeps += 1;
        self.asleep = Some(asleep);
        NextStep::Wait(limit)
    }

    fn wake_up(&mut self) -> NextStep {
        self.asleep = None;
        for client in self.clients.iter().flatten() {
            client.served.header().lower(attention::SLEEPING);
        }
        self.intake.now = self.clock.now();
        self.intake.serve(&mut self.clients);
        self.wake_clients();
        self.beat();
        NextStep::Turn
    }

    fn sleep_limit(&self, ordered: bool) -> Span {
        let now = self.intake.now;
        let ports = &self.intake.ports;
        let due = [self.intake.hints.due(), self.intake.hints.cluster.due(), self.publisher.due()];
        let ports_due = ports.iter().map(|port| port.due);
        let mut until = ports_due.chain(due).min().unwrap_or(Time::NEVER);
        // A waiting client looks for heartbeats, even if its flows are held.
        let waits = ports.iter().any(|port| port.link.waiting_flows() > 0);
        if waits {
            until = until.min(self.silence.due());
        }
        if self.intake.holding || !ordered {
            until = until.min(now + WAITING_SLEEP_MAX);
        }
        until.since(now)
    }
}
