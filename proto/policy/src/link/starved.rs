//! No flow waits for ever: flows that have waited for long are served by turns.
//!
//! A strict order can starve its last flows for as long as others have work. The papers accept
//! starvation; a shared port cannot. A flow that has waited for [`STARVED_AFTER`] in the levels is
//! *starved*. Starved flows get one chunk each by turns, [`STARVED_PERMILLE`] of what the levels
//! send, until they have all permits or their rank serves them. So beside `n − 1` other starved
//! flows a flow of `S` bytes leaves a port of `B` bytes per second, however loaded, within
//!
//! ```text
//! STARVED_AFTER + n · (S + 2 chunks) / (B · STARVED_PERMILLE / 1000)
//! ```
//!
//! Scavenged work has a share of its own (`scavenger.rs`). A starved chunk may exceed the window
//! once, if it is larger than the free part. Otherwise small pieces of other flows could use up
//! each completion before a chunk fits. Where pieces that exceed the window follow one another, the
//! window is never free: there a starved flow goes when the next piece may.
//!
//! The queues are linked through the records of the flows, so each step is O(1).

use super::flows::{Age, FlowTable, NONE, SlotId};
use crate::scavenger::Guarantee;
use crate::time::{Span, Time};

/// Wait in the levels after which a flow is starved.
pub const STARVED_AFTER: Span = Span::from_millis(1000);
/// Guaranteed share of starved flows together, in parts per thousand of what the levels send.
pub const STARVED_PERMILLE: u16 = 50;

/// Maximum number of flows that become starved in one step, which bounds the time until the next
/// permit.
const STARVED_PER_STEP: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Fifo {
    first: SlotId,
    last: SlotId,
}

impl Fifo {
    const EMPTY: Self = Self { first: NONE, last: NONE };

    fn push(&mut self, flows: &mut FlowTable, slot: SlotId) {
        let age = &mut flows.get_mut(slot).age;
        (age.previous, age.next) = (self.last, NONE);
        if self.last == NONE {
            self.first = slot;
        } else {
            flows.get_mut(self.last).age.next = slot;
        }
        self.last = slot;
    }

    fn remove(&mut self, flows: &mut FlowTable, slot: SlotId) {
        let Age { next, previous, .. } = flows.get(slot).age;
        if previous == NONE {
            self.first = next;
        } else {
            flows.get_mut(previous).age.next = next;
        }
        if next == NONE {
            self.last = previous;
        } else {
            flows.get_mut(next).age.previous = previous;
        }
    }
}

/// The flows in the levels, by age.
#[derive(Clone, Debug)]
pub(crate) struct Starved {
    /// Flows that are not starved, the oldest first.
    fresh: Fifo,
    /// Starved flows, in the order of their turns.
    starved: Fifo,
    guarantee: Guarantee,
}

impl Starved {
    pub(crate) fn new(chunk_bytes: u64) -> Self {
        Self {
            fresh: Fifo::EMPTY,
            starved: Fifo::EMPTY,
            guarantee: Guarantee::new(STARVED_PERMILLE, chunk_bytes),
        }
    }

    /// Adds a flow that waits in the levels, unless it was added before.
    pub(crate) fn enter(&mut self, flows: &mut FlowTable, slot: SlotId, now: Time) {
        let age = &mut flows.get_mut(slot).age;
        if age.since == Time::NEVER {
            age.since = now;
            self.fresh.push(flows, slot);
        }
    }

    /// Removes a flow that no longer waits in the levels.
    pub(crate) fn leave(&mut self, flows: &mut FlowTable, slot: SlotId) {
        let age = flows.get(slot).age;
        if age.since != Time::NEVER {
            self.fifo(age.starved).remove(flows, slot);
            flows.get_mut(slot).age = Age::default();
        }
    }

    fn fifo(&mut self, starved: bool) -> &mut Fifo {
        if starved { &mut self.starved } else { &mut self.fresh }
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.starved.first == NONE
    }

    /// Returns the starved flow whose turn it is.
    pub(crate) fn next(&mut self, flows: &mut FlowTable, now: Time) -> Option<SlotId> {
        for _ in 0..STARVED_PER_STEP {
            let slot = self.fresh.first;
            if slot == NONE || now.since(flows.get(slot).age.since) < STARVED_AFTER {
                break;
            }
            self.fresh.remove(flows, slot);
            flows.get_mut(slot).age.starved = true;
            self.starved.push(flows, slot);
        }
        (self.starved.first != NONE).then_some(self.starved.first)
    }

    pub(crate) fn covers(&self, bytes: u64) -> bool {
        self.guarantee.covers(bytes)
    }

    /// Charges `bytes` to the share and passes the turn from the flow at `slot` to the next one.
    pub(crate) fn spend(&mut self, flows: &mut FlowTable, slot: SlotId, bytes: u64) {
        self.guarantee.spend(bytes);
        self.pass(flows, slot);
    }

    /// Passes the turn from the flow at `slot` to the next one.
    pub(crate) fn pass(&mut self, flows: &mut FlowTable, slot: SlotId) {
        self.starved.remove(flows, slot);
        self.starved.push(flows, slot);
    }

    /// Earns credit for `bytes` of a flow in the levels that is not starved.
    pub(crate) fn earn(&mut self, bytes: u64) {
        if !self.is_empty() {
            self.guarantee.earn(bytes);
        }
    }
}
