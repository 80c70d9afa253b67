//! Credit: the bytes that clients may send before they ask (architecture §3).
//!
//! [`CreditConditions`] has the conditions in all regions. [`PortCredit`] counts the credit of a
//! port.

use std::collections::VecDeque;

use laxity_policy::link::Link;
use laxity_policy::{Level, LinkConfig, Span, Stage, Time};
use laxity_shm::consumer::Consumer;
use laxity_shm::layout::{CREDIT_PORTS, CREDIT_WHOLE};

/// The stage that may always use credit. Collectives enter the highest level that is not reserved,
/// so no flow that precedes them waits behind them.
const COLLECTIVES: u8 = Stage::Collective.bit();
/// How long all ports must be without waiting flows before whole flows of other stages may use
/// credit. A queue that empties and fills again is contention.
const IDLE_AFTER: Span = Span::from_millis(1);

/// The conditions of credit, which are the same for all clients.
#[derive(Debug)]
pub struct CreditConditions {
    /// Whether credit is given: the mode is `enforce` and there is no bypass.
    pub is_given: bool,
    pub level: Level,
    is_idle: bool,
    idle_since: Time,
}

impl CreditConditions {
    /// Makes conditions without credit.
    pub const fn new(now: Time) -> Self {
        Self { is_given: false, level: Level::FIRST_UNRESERVED, is_idle: false, idle_since: now }
    }

    /// Reports whether no port has had waiting flows for [`IDLE_AFTER`].
    #[inline]
    pub const fn is_idle(&self) -> bool {
        self.is_idle
    }

    /// Returns the stages that may use credit, in the format of a region's header.
    pub const fn stages(&self) -> u8 {
        if self.is_idle { COLLECTIVES | CREDIT_WHOLE } else { COLLECTIVES }
    }

    /// Records whether any flow waits. Returns whether the stages that may use credit have changed:
    /// fewer at once, more after [`IDLE_AFTER`].
    pub fn note_waiting(&mut self, now: Time, waits: bool) -> bool {
        if waits {
            self.idle_since = now;
        }
        let is_idle = now.since(self.idle_since) >= IDLE_AFTER;
        core::mem::replace(&mut self.is_idle, is_idle) != is_idle
    }
}

/// Returns the bytes that a port's only user may have in flight: 10 ms of the port, up to 16 MiB,
/// but at least a window.
pub(super) fn alone_bytes(config: &LinkConfig) -> u64 {
    (config.rate / 100).min(16 << 20).max(config.window_bytes)
}

#[derive(Debug, Default)]
pub struct PortCredit {
    /// Credit that was given and not spent, in bytes, over all lanes.
    outstanding: u64,
    /// Lanes that used up their credit when no more was available, as (client, lane).
    pub lanes_without_credit: VecDeque<(u32, u16)>,
}

impl PortCredit {
    /// Gives credit to a lane that has used half of its share. Returns false if the port has no
    /// credit now, so that the lane gets some later.
    ///
    /// A lane's share is an eighth of the window. It gets at most a quarter of the credit that is
    /// left, of half a window in all. So later lanes get less, but some while any is left. Credit
    /// can't be revoked. So a port may exceed its window by this half of a window at most.
    #[inline]
    pub fn refill(&mut self, link: &Link, index: usize, consumer: &mut Consumer) -> bool {
        let share = link.config().window_bytes / 8;
        let most = |credit: &Self| credit.available(link) / 4;
        self.refill_from(most, share, index, consumer)
    }

    /// Gives credit to a lane whose flows may use it only while nothing waits here. Such a lane
    /// gets no credit later, because something waited. `is_alone` says that its client is the
    /// port's only user.
    #[inline]
    pub fn refill_idle(
        &mut self,
        link: &Link,
        is_alone: bool,
        index: usize,
        consumer: &mut Consumer,
    ) {
        if link.waiting_flows() > 0 {
            return;
        }
        let window = link.config().window_bytes;
        let most = alone_bytes(link.config());
        // All lanes together get as much as a single user, but bytes in flight have to fit the
        // window.
        let left = match is_alone || link.idle_allowance() > 0 {
            true => most.saturating_sub(link.in_flight_bytes()),
            false => 0,
        };
        let share = if is_alone { most } else { window / 2 };
        // Programs choose the size of their work requests, and credit for less than one is useless.
        // So every lane gets a minimum, whatever others hold unused. Once something waits, this
        // credit can't be used any more.
        let give = left.saturating_sub(self.outstanding) / 2;
        self.refill_from(|_| give.max(left.min(window / 16)), share, index, consumer);
    }

    #[inline]
    fn refill_from(
        &mut self,
        most: impl FnOnce(&Self) -> u64,
        share: u64,
        index: usize,
        consumer: &mut Consumer,
    ) -> bool {
        if index >= CREDIT_PORTS {
            return true;
        }
        let (permitted, spent) = consumer.credit(index);
        let held = permitted.saturating_sub(spent);
        if held > share / 2 {
            return true;
        }
        let give = (share - held).min(most(self));
        if give == 0 {
            return false;
        }
        consumer.give_credit(index, permitted.saturating_add(give));
        self.outstanding += give;
        true
    }

    /// Returns the bytes of credit that may be given now, over all lanes.
    fn available(&self, link: &Link) -> u64 {
        let most = link.config().window_bytes / 2;
        let allowance = link.credit_allowance().min(most);
        allowance.saturating_sub(self.outstanding)
    }

    /// Reports whether [`Self::refill`] would give credit to a lane that has none.
    pub fn is_available(&self, link: &Link) -> bool {
        self.available(link) >= 4
    }

    pub const fn unspent(&self) -> u64 {
        self.outstanding
    }

    /// Removes credit that was spent, or that a lane held when it went away.
    #[inline]
    pub fn take_back(&mut self, bytes: u64) {
        self.outstanding = self.outstanding.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_flows_may_use_credit_after_a_pause_without_waiting_flows_and_not_beside_any() {
        let mut conditions = CreditConditions::new(Time::ZERO);
        let idle = Time::ZERO + IDLE_AFTER;
        assert!(!conditions.note_waiting(Time(1), false));
        assert!(conditions.note_waiting(idle, false));
        assert_eq!(conditions.stages(), COLLECTIVES | CREDIT_WHOLE);
        assert!(!conditions.note_waiting(idle, false));
        assert!(conditions.note_waiting(idle + Span(1), true));
        assert_eq!(conditions.stages(), COLLECTIVES);
        assert!(!conditions.note_waiting(idle + IDLE_AFTER, false));
    }
}
