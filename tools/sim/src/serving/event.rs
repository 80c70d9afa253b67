//! The agenda of a run: a heap of events, in the order of insertion for the same time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use laxity_policy::Time;

/// An event at a known time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Happening {
    /// The next request arrives.
    Arrival,
    /// A unit's step ends. The event is void if the unit has scheduled another step since.
    Step { unit: u32, step: u32 },
    /// A host's link must be polled.
    Wake { host: u32 },
    /// The order between batches is due.
    Order,
    /// A transfer inside a server arrives.
    Delivered { flow: u32 },
    /// A scale-out begins: a unit's weights are sent to the next unit.
    ScaleOut,
    /// Traffic that no daemon sees comes to a port.
    Burst { port: u32 },
}

/// The heap of future events.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    heap: BinaryHeap<Reverse<(u64, u64, Happening)>>,
    entered: u64,
}

impl Agenda {
    pub(super) fn push(&mut self, at: Time, what: Happening) {
        self.entered += 1;
        self.heap.push(Reverse((at.0, self.entered, what)));
    }

    pub(super) fn next(&self) -> Option<Time> {
        self.heap.peek().map(|Reverse((at, ..))| Time(*at))
    }

    /// Removes and returns the next event, if its time is `now`.
    pub(super) fn pop(&mut self, now: Time) -> Option<Happening> {
        if self.next()? > now {
            return None;
        }
        self.heap.pop().map(|Reverse((_, _, what))| what)
    }
}
