//! Credit: what clients may send before they ask (architecture §3).
//!
//! [`CreditTerms`] is what all clients are told. [`PortCredit`] is what one port has handed out.

use std::collections::VecDeque;

use laxity_policy::link::Link;
use laxity_policy::{Level, Span, Stage, Time};
use laxity_shm::consumer::Consumer;
use laxity_shm::layout::{CREDIT_PORTS, CREDIT_WHOLE};

/// Collectives are the only stage that may always be sent on credit. They enter the highest level
/// that is not reserved, so nothing that may precede them is ever behind them.
const COLLECTIVES: u8 = Stage::Collective.bit();
/// Nothing must have waited on any port for this long before whole flows of other stages may go on
/// credit too: a queue that empties and fills again is contention.
const IDLE_AFTER: Span = Span::from_millis(1);

/// What all clients are told of credit.
#[derive(Debug)]
pub struct CreditTerms {
    /// Credit may be given: the mode is `enforce` and nothing is bypassed.
    pub is_given: bool,
    /// Level of collectives that are sent on credit.
    pub level: Level,
    is_idle: bool,
    idle_since: Time,
}

impl CreditTerms {
    /// No credit is given yet.
    #[must_use]
    pub const fn new(now: Time) -> Self {
        Self {
            is_given: false,
            level: Level::FIRST_UNRESERVED,
            is_idle: false,
            idle_since: now,
        }
    }

    /// Whether the clients were told that nothing waits on any port.
    #[inline]
    #[must_use]
    pub const fn is_idle(&self) -> bool {
        self.is_idle
    }

    /// The stages that may go on credit, as the header of a region has them.
    #[must_use]
    pub const fn stages(&self) -> u8 {
        if self.is_idle {
            COLLECTIVES | CREDIT_WHOLE
        } else {
            COLLECTIVES
        }
    }

    /// Takes note of whether anything waits. Returns whether other stages may go on credit than
    /// before: fewer at once, more after [`IDLE_AFTER`].
    pub fn note_waiting(&mut self, now: Time, waits: bool) -> bool {
        if waits {
            self.idle_since = now;
        }
        let is_idle = now.since(self.idle_since) >= IDLE_AFTER;
        core::mem::replace(&mut self.is_idle, is_idle) != is_idle
    }
}

/// Bytes that a user who is alone on a port may have in flight: 10 ms of the port, 16 MiB at most.
pub(super) fn alone_bytes(link: &Link) -> u64 {
    let config = link.config();
    (config.rate / 100).min(16 << 20).max(config.window_bytes)
}

/// What one port has handed out.
#[derive(Debug, Default)]
pub struct PortCredit {
    /// Bytes handed out and not spent, over all lanes.
    out: u64,
    /// Lanes that ran out of credit while there was none, as (client, lane).
    pub hungry: VecDeque<(u32, u16)>,
}

impl PortCredit {
    /// Hands credit to a lane that has used up half of its share. False if the port has none to
    /// give now, so that the lane is to be fed later.
    ///
    /// A lane's share is an eighth of the window, and it gets at most a quarter of what is left
    /// for credit at all, half the window: later lanes get less, never nothing. Credit cannot be
    /// taken back, so what is out bounds by how much a port may exceed its window.
    #[inline]
    pub fn feed(&mut self, link: &Link, now: Time, index: usize, consumer: &mut Consumer) -> bool {
        let share = link.config().window_bytes / 8;
        self.feed_from(self.left(link, now) / 4, share, index, consumer)
    }

    /// The same for a lane of flows that may use credit only while nothing waits here. It is not
    /// fed later: then something did. `is_alone` if its client is the only user of the port.
    #[inline]
    pub fn feed_idle(
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
        let most = alone_bytes(link);
        // In all as much as to one; but what is in flight has to be within the window.
        let left = match is_alone || link.idle_allowance() > 0 {
            true => most.saturating_sub(link.in_flight_bytes()),
            false => 0,
        };
        let share = if is_alone { most } else { window / 2 };
        // Work requests are as large as their program makes them: less than one is no use. What
        // others hold and do not use keeps nobody from the least: it holds as long as nothing
        // waits, and ends at once when something does.
        let give = left.saturating_sub(self.out) / 2;
        self.feed_from(give.max(left.min(window / 16)), share, index, consumer);
    }

    #[inline]
    fn feed_from(&mut self, most: u64, share: u64, index: usize, consumer: &mut Consumer) -> bool {
        if index >= CREDIT_PORTS {
            return true;
        }
        let (granted, spent) = consumer.credit(index);
        let held = granted.saturating_sub(spent);
        if held > share / 2 {
            return true;
        }
        let give = (share - held).min(most);
        if give == 0 {
            return false;
        }
        consumer.grant_credit(index, granted.saturating_add(give));
        self.out += give;
        true
    }

    /// Bytes of credit that may be handed out now, over all lanes.
    fn left(&self, link: &Link, now: Time) -> u64 {
        let most = link.config().window_bytes / 2;
        let allowance = link.credit_allowance(now).min(most);
        allowance.saturating_sub(self.out)
    }

    /// Whether [`Self::feed`] would give anything to a lane that has nothing.
    #[must_use]
    pub fn is_available(&self, link: &Link, now: Time) -> bool {
        self.left(link, now) >= 4
    }

    /// Credit was spent, or is held by a lane that is gone.
    #[inline]
    pub fn take_back(&mut self, bytes: u64) {
        self.out = self.out.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_flows_may_use_credit_after_a_pause_without_waiting_flows_and_not_beside_any() {
        let mut terms = CreditTerms::new(Time::ZERO);
        let idle = Time::ZERO + IDLE_AFTER;
        assert!(!terms.note_waiting(Time(1), false));
        assert!(terms.note_waiting(idle, false));
        assert_eq!(terms.stages(), COLLECTIVES | CREDIT_WHOLE);
        assert!(!terms.note_waiting(idle, false));
        assert!(terms.note_waiting(idle + Span(1), true));
        assert_eq!(terms.stages(), COLLECTIVES);
        assert!(!terms.note_waiting(idle + IDLE_AFTER, false));
    }
}
