//! The agenda of a run: a heap of events, in the order of insertion for the same time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use laxity_policy::Time;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Happening {
    Arrival,
    /// A unit's step ends. The event is void if the unit has scheduled another step since.
    Step {
        unit: u32,
        step: u32,
    },
    /// A host's link must be polled.
    Wake {
        host: u32,
    },
    Order,
    Delivered {
        flow: u32,
    },
    /// Traffic that no daemon sees comes to a port.
    Burst {
        port: u32,
    },
}

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

    pub(super) fn pop(&mut self, now: Time) -> Option<Happening> {
        if self.next()? > now {
            return None;
        }
        self.heap.pop().map(|Reverse((_, _, what))| what)
    }
}
