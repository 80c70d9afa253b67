//! Waiting for permits: poll, adaptive spin, futex; and detecting that the daemon is gone.
//!
//! # How long a wait can be
//! While the daemon gives signs of life, a flow may wait for its permit. The wait ends when the
//! registration socket hangs up, or when no new heartbeat came for `stall_timeout` while something
//! waited here. All lanes of the process detach then, and every waiting flow becomes bypassed. Only
//! a change of the heartbeat counts, and not its time, because clocks differ between time
//! namespaces. Bypass, release and a change of mode end the wait, too. A sleep lasts [`SLICE`] at
//! most, so each of these is noticed even if a wake-up is lost. After a daemon that handed over, a
//! flow waits for the next one for a second at most ([`crate::lane::handover`]).
//!
//! # How long to spin
//! Waking a sleeper takes 17 to 43 µs and costs the daemon 10 to 14 µs. Spinning about as long as
//! one wake-up therefore costs at most a factor of two. If the last few spins were in vain, the
//! queue is long and the spin is short. If the daemon runs on the same CPU, spinning delays its
//! answer (8 ms, against 1.7 µs with a sleep at once). The lane then polls a few times only.

mod sleep;

use std::time::Duration;

use laxity_shm::layout::attention;
use laxity_shm::permit::{self, SlotState};
use laxity_shm::sleep::{Awaited, current_cpu};

pub use sleep::Sleep;

use crate::lane::Lane;
use crate::lane::handover::LOOK_EVERY;
use crate::lane_binding::LaneBinding;
use crate::ticket::{Permit, Ticket};

/// Longest sleep before the lane checks the daemon.
const SLICE: Duration = Duration::from_millis(20);
/// Longest sleep where `membarrier` is refused and a wake-up can be missed.
const SLICE_UNORDERED: Duration = Duration::from_millis(1);
const SPIN_MAX_NS: u64 = 50_000;
const SPIN_MIN_NS: u64 = 20_000;
/// Number of spins in vain after which a spin lasts only [`SPIN_SHORT_NS`].
const SPINS_IN_VAIN: u32 = 8;
const SPIN_SHORT_NS: u64 = 2_000;
/// Number of loads of the state word between two checks of the clock and the daemon.
const LOOKS: u32 = 64;
/// Number of loads of the state word before any other check, about two round trips.
const GLANCES: u32 = 16;
/// Number of unsuccessful polls between two checks of the clock.
const MISSES: u32 = 16;
/// Time between two checks of the socket, in nanoseconds.
const HANGUP_NS: u64 = 5_000_000;
/// Number of records without an answer between two checks of the clock.
const SAID: u32 = 64;

/// The state of a lane's waits.
#[derive(Debug)]
pub(crate) struct Spin {
    budget_ns: u64,
    in_vain: u32,
    misses: u32,
    /// The time since which this lane waits without any permit, 0 if it does not.
    pub(crate) quiet_since_ns: u64,
    looked_ns: u64,
    /// The last heartbeat by the daemon's clock, and the time of its first sight by this process's
    /// clock. The clocks differ if the process has its own time namespace, so they aren't compared.
    beat: u64,
    beat_seen_ns: u64,
    /// Whether a permit came since the last check of the socket.
    heard: bool,
    /// Number of records since the last check of the clock, see [`SAID`].
    said: u32,
    /// The time at which a work request last found no slot.
    full_at_ns: u64,
}

impl Default for Spin {
    fn default() -> Self {
        Self {
            budget_ns: SPIN_MAX_NS,
            in_vain: 0,
            misses: 0,
            quiet_since_ns: 0,
            looked_ns: 0,
            beat: 0,
            beat_seen_ns: 0,
            heard: false,
            said: 0,
            full_at_ns: 0,
        }
    }
}

impl Spin {
    fn limit_ns(&self) -> u64 {
        if self.in_vain >= SPINS_IN_VAIN { SPIN_SHORT_NS } else { self.budget_ns }
    }

    /// Returns the time of the last sign of life by this process's clock, `now` if the heartbeat
    /// changed.
    fn last_beat(&mut self, beat: u64, now: u64) -> u64 {
        if beat != self.beat {
            self.beat = beat;
            self.beat_seen_ns = now;
        }
        self.beat_seen_ns
    }

    /// Reports whether the daemon has hung up, by a check of the socket every [`HANGUP_NS`]. If
    /// permits or a sign of life came since the last check, it had not.
    fn sees_hangup(&mut self, binding: &LaneBinding, now: u64) -> bool {
        let before = self.looked_ns;
        if now.saturating_sub(before) <= HANGUP_NS {
            return false;
        }
        self.looked_ns = now;
        let heard = core::mem::take(&mut self.heard)
            | (self.last_beat(binding.header.heartbeat_ns(), now) > before);
        !heard && binding.session.is_hung_up()
    }

    fn succeeded(&mut self) {
        self.in_vain = 0;
        self.budget_ns = SPIN_MAX_NS;
    }

    fn failed(&mut self) {
        self.in_vain = self.in_vain.saturating_add(1);
        self.budget_ns = (self.budget_ns / 2).max(SPIN_MIN_NS);
    }
}

impl Lane {
    /// Returns a permit for further bytes, or `None`. Never blocks.
    #[inline]
    pub fn poll(&mut self, ticket: &mut Ticket) -> Option<Permit> {
        if !ticket.state.is_gated() {
            if ticket.state.is_on_credit() {
                self.counters.scheduled_bytes.add(ticket.total.saturating_sub(ticket.permitted));
            }
            return ticket.state.is_ready().then(|| ticket.collect());
        }
        if let Some(binding) = &mut self.binding
            && ticket.state.is_of(self.seat)
        {
            let slot = ticket.state.slot();
            let word = binding.producer.word(slot);
            if word != binding.pending.seen(slot)
                && let SlotState::Permit { cumulative, level, last } = permit::decode(word)
            {
                binding.pending.saw(slot, word);
                return Some(self.take(ticket, cumulative, level, last));
            }
            if binding.header.attention() & attention::UNSCHEDULED == 0 {
                // A thread that only polls must send waiting records, too. Its permit may depend on
                // them.
                if self.has_unsent() {
                    self.send_unsent();
                }
                self.spin.misses += 1;
                if self.spin.misses < MISSES {
                    return None;
                }
                self.spin.misses = 0;
                if self.is_daemon_alive(self.core.clock.now_ns()) {
                    return None;
                }
            }
        }
        self.poll_unscheduled(ticket)
    }

    /// Returns the permit for the bytes up to `cumulative`, and records it in the ticket.
    #[inline]
    fn take(&mut self, ticket: &mut Ticket, cumulative: u64, level: u8, last: bool) -> Permit {
        let slot = ticket.state.slot();
        let before = self.binding.as_ref().map_or(0, |binding| binding.pending.before(slot));
        let cumulative = cumulative.saturating_add(before);
        // No permit follows the last one, so the rest may go whatever its count is.
        let upto = if last { ticket.total } else { cumulative.min(ticket.total) };
        let bytes = upto.saturating_sub(ticket.permitted);
        let mut dscp = 0;
        if let Some(binding) = &mut self.binding {
            dscp = binding.header.dscp(level);
            if last {
                binding.pending.remove(slot);
                binding.producer.release(ticket.at());
            }
        }
        if last {
            ticket.finish();
        }
        ticket.permitted += bytes;
        self.spin.heard = true;
        self.spin.quiet_since_ns = 0;
        self.counters.scheduled_bytes.add(bytes);
        Permit { bytes, level, dscp, last, bypassed: false }
    }

    /// Permits the rest of a flow without the daemon, and withdraws the flow if there is a daemon.
    ///
    /// This ensures that every byte goes out once. `permitted` is what was read from the state word
    /// so far, and the word is not read again. The rest is permitted here. A permit that arrives at
    /// the same time is in a slot that nobody reads (see `laxity_shm::lane`).
    #[cold]
    pub(crate) fn bypass_rest(&mut self, ticket: &mut Ticket) -> Permit {
        // The withdrawal precedes `rest`, so that the daemon gets the permitted bytes.
        if ticket.state.is_of(self.seat) && self.binding.is_some() {
            self.withdraw(ticket);
            if self.binding.as_ref().is_some_and(|binding| binding.session.lost_at().is_some()) {
                self.lose_binding();
            }
        }
        let permit = ticket.rest();
        self.counters.bypassed_bytes.add(permit.bytes);
        self.counters.bypassed_flows.add(1);
        permit
    }

    /// Checks for signs of life. Gives up the daemon if there are none.
    #[cold]
    fn is_daemon_alive(&mut self, now: u64) -> bool {
        let Some(binding) = &self.binding else { return false };
        if binding.session.lost_at().is_some() {
            return false;
        }
        if self.spin.quiet_since_ns == 0 {
            self.spin.quiet_since_ns = now;
        }
        let sign =
            self.spin.quiet_since_ns.max(self.spin.last_beat(binding.header.heartbeat_ns(), now));
        let stalled = now.saturating_sub(sign) > self.core.options.stall_timeout.as_nanos() as u64;
        let gone = stalled || self.spin.sees_hangup(binding, now);
        if gone {
            binding.session.lose();
        }
        !gone
    }

    /// Reports whether a full lane will have room again. Gives up the daemon if it is gone.
    #[cold]
    pub(crate) fn will_have_room(&mut self) -> bool {
        let now = self.core.clock.now_ns();
        let Some(binding) = &self.binding else { return false };
        // The daemon has records to read, so it is woken if it sleeps.
        binding.notify();
        // A caller that finds the lane full tries again soon. If the last time is long ago, the
        // lane had room meanwhile, and a daemon that sleeps gives no sign of life.
        let again = now.saturating_sub(core::mem::replace(&mut self.spin.full_at_ns, now))
            < self.core.options.stall_timeout.as_nanos() as u64 / 2;
        if !again && binding.pending.is_empty() {
            self.spin.quiet_since_ns = now;
        }
        if self.is_daemon_alive(now) {
            return true;
        }
        self.lose_binding();
        false
    }

    /// Gives up a daemon that has hung up. Paths on which no flow waits need this: bypassed,
    /// observed, on credit, past a full lane. Usually it only reads the clock.
    #[cold]
    pub(crate) fn notice_hangup(&mut self) {
        self.notice_hangup_at(self.core.clock.now_ns());
    }

    /// Does the same as [`Lane::notice_hangup`] at the time `now`.
    pub(crate) fn notice_hangup_at(&mut self, now: u64) {
        if let Some(binding) = &self.binding
            && self.spin.sees_hangup(binding, now)
        {
            binding.session.lose();
            self.lose_binding();
        }
    }

    /// Calls [`Lane::notice_hangup`] from time to time, for a lane whose flows all go out on
    /// credit. Calls are counted, since reading the clock each time is too slow. Between two looks,
    /// at most as many flows as a lane has slots go to a daemon that has ended.
    #[inline]
    pub(crate) fn notice_hangup_sometimes(&mut self) {
        self.spin.said += 1;
        if self.spin.said >= SAID {
            self.spin.said = 0;
            self.notice_hangup();
        }
    }

    /// Waits until more of the flow may be sent. The wait always ends, see the module's
    /// documentation. A ticket that is done returns an empty last permit.
    pub fn wait(&mut self, ticket: &mut Ticket) -> Permit {
        loop {
            if let Some(permit) = self.poll(ticket) {
                return permit;
            }
            if ticket.is_done() {
                return Permit { last: true, ..Permit::default() };
            }
            if self.binding.is_none() {
                std::thread::sleep(LOOK_EVERY);
                continue;
            }
            let slot = ticket.state.slot();
            if self.poll_once(slot) {
                continue;
            }
            self.wait_briefly(Awaited::Slot(slot), SLICE, |binding| {
                binding.producer.word(slot) != binding.pending.seen(slot)
            });
        }
    }

    /// Polls for as long as an immediate answer takes, without any other check.
    #[inline]
    fn poll_once(&self, slot: u16) -> bool {
        let Some(binding) = &self.binding else { return false };
        let seen = binding.pending.seen(slot);
        (0..GLANCES).any(|_| {
            core::hint::spin_loop();
            binding.producer.word(slot) != seen
        })
    }

    /// Sleeps until a ticket of this lane may have a permit, or `timeout` has passed. Returns false
    /// after the timeout. Returns at once if no ticket waits for a permit.
    pub fn wait_any(&mut self, timeout: Duration) -> bool {
        let clock = self.core.clock;
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        let end = clock.now_ns().saturating_add(timeout_ns);
        while self.waits_for_next() {
            let left = end.saturating_sub(clock.now_ns());
            if left == 0 {
                return false;
            }
            std::thread::sleep(LOOK_EVERY.min(Duration::from_nanos(left)));
        }
        if self.has_moved() {
            return true;
        }
        loop {
            match &self.binding {
                None => return true,
                Some(binding) if binding.pending.is_empty() || any_news(binding) => return true,
                Some(binding) => {
                    if binding.header.attention() & attention::UNSCHEDULED != 0 {
                        return true;
                    }
                }
            }
            let now = clock.now_ns();
            if !self.is_daemon_alive(now) {
                return true;
            }
            if now >= end {
                return false;
            }
            self.wait_briefly(Awaited::Any, SLICE.min(Duration::from_nanos(end - now)), any_news);
        }
    }

    /// Spins, then sleeps one slice, until `news` holds or the caller should check the daemon.
    fn wait_briefly(
        &mut self,
        what: Awaited,
        limit: Duration,
        news: impl Fn(&LaneBinding) -> bool,
    ) {
        if self.has_unsent() {
            self.send_unsent();
        }
        let Some(binding) = &mut self.binding else { return };
        if binding.session.lost_at().is_some() {
            // Empty pages may have replaced the region.
            self.spin.misses = MISSES;
            return;
        }
        let header = &binding.header;
        let stop = |binding: &LaneBinding| {
            news(binding) || binding.header.attention() & attention::UNSCHEDULED != 0
        };
        let elsewhere = match (header.daemon_cpu(), current_cpu()) {
            (Some(daemon), Some(own)) => daemon != own,
            _ => true,
        };
        if elsewhere {
            let clock = self.core.clock;
            let began = clock.now_ns();
            let until = self.spin.limit_ns().min(limit.as_nanos() as u64);
            loop {
                for _ in 0..LOOKS {
                    if stop(binding) {
                        self.spin.succeeded();
                        return;
                    }
                    core::hint::spin_loop();
                }
                if clock.now_ns().saturating_sub(began) >= until {
                    break;
                }
            }
            self.spin.failed();
        }
        let waiter = &binding.producer.memory().header().waiter;
        binding.turn += 1;
        let announced = waiter.announce(what, binding.turn);
        if !stop(binding) {
            let slice = if announced.ordered { limit } else { limit.min(SLICE_UNORDERED) };
            waiter.sleep(announced, slice);
        }
        waiter.awake();
        // A slice is long, so the next unsuccessful poll checks the clock.
        self.spin.misses = MISSES;
    }
}

fn any_news(binding: &LaneBinding) -> bool {
    let pending = &binding.pending;
    pending.slots().any(|slot| binding.producer.word(slot) != pending.seen(slot))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_of_life_are_dated_by_the_clock_of_this_process_whatever_that_of_the_daemon_says() {
        for daemon in [1, 1_000_000_000_000] {
            let mut spin = Spin::default();
            assert_eq!(spin.last_beat(daemon, 5_000), 5_000);
            assert_eq!(spin.last_beat(daemon, 6_000), 5_000, "nothing new");
            assert_eq!(spin.last_beat(daemon + 1, 7_000), 7_000);
        }
    }
}
