//! What is to happen when: a heap of small records, ties in the order in which they were put in.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use laxity_policy::Time;

/// Something that happens at a known time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Happening {
    /// The next request arrives.
    Arrival,
    /// A unit's step ends, unless its steps have been counted on since.
    Step { unit: u32, step: u32 },
    /// A host's link wants to be asked.
    Wake { host: u32 },
    /// The order between batches is due.
    Order,
    /// A transfer that no NIC carries is there.
    Delivered { flow: u32 },
    /// A unit's weights go to another.
    ScaleOut,
}

/// See the module.
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

    /// The next one, if its time is `now`.
    pub(super) fn pop(&mut self, now: Time) -> Option<Happening> {
        if self.next()? > now {
            return None;
        }
        self.heap.pop().map(|Reverse((_, _, what))| what)
    }
}
