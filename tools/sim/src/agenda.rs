//! The agenda of a run: a heap of events, in the order of insertion for the same time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use laxity_policy::Time;

#[derive(Debug)]
pub(crate) struct Agenda<E> {
    heap: BinaryHeap<Reverse<(Time, u64, E)>>,
    entered: u64,
}

impl<E: Ord> Default for Agenda<E> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), entered: 0 }
    }
}

impl<E: Ord> Agenda<E> {
    pub(crate) fn push(&mut self, at: Time, what: E) {
        self.entered += 1;
        self.heap.push(Reverse((at, self.entered, what)));
    }

    pub(crate) fn next(&self) -> Option<Time> {
        self.heap.peek().map(|Reverse((at, ..))| *at)
    }

    /// Removes and returns the first event if it is due.
    pub(crate) fn pop(&mut self, now: Time) -> Option<E> {
        if self.next()? > now {
            return None;
        }
        self.heap.pop().map(|Reverse((_, _, what))| what)
    }
}
