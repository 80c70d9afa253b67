//! Who may be pruned for the sake of a port, and the loads of the next few batches.

use core::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

use laxity_types::RequestId;

use super::Turn;
use super::traffic_table::{MemberSlot, PortSlot, Sum, TrafficTable, Weight};

/// Not in `σ`, or no pool yet.
pub(super) const NONE: u32 = u32::MAX;

/// Requests that load one port: those whose batch had its turn by load, the others by turn.
#[derive(Debug, Default)]
pub(super) struct Pool {
    candidates: BinaryHeap<Candidate>,
    /// The next to become candidates are the greatest: a heap, because few ever do.
    later: BinaryHeap<(Reverse<u32>, Candidate)>,
}

/// A request in a pool. The greatest is pruned first; equal loads as the module says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    weight: Weight,
    position: u32,
    request: RequestId,
    member: MemberSlot,
}

impl Pool {
    /// Everybody that loads `port`, the pruned included: most are never asked for.
    pub(super) fn of_port(
        traffic: &TrafficTable,
        port: PortSlot,
        turn: usize,
        positions: &[u32],
    ) -> Self {
        let users = traffic.users(port);
        let mut candidates = Vec::with_capacity(users.len());
        let mut later = Vec::with_capacity(users.len());
        for user in users {
            let position = positions[user.batch as usize];
            if user.weight.bytes() == 0 || position == NONE {
                continue;
            }
            let candidate = Candidate {
                weight: user.weight,
                position,
                request: user.request,
                member: user.member,
            };
            if position as usize <= turn {
                candidates.push(candidate);
            } else {
                later.push((Reverse(position), candidate));
            }
        }
        Self {
            candidates: candidates.into(),
            later: later.into(),
        }
    }

    /// Removes and returns the heaviest whose batch had its turn and which is not pruned yet.
    pub(super) fn take_heaviest(
        &mut self,
        traffic: &TrafficTable,
        turn: usize,
    ) -> Option<MemberSlot> {
        while let Some(next) = self.later.peek_mut() {
            if next.0.0 as usize > turn {
                break;
            }
            self.candidates.push(PeekMut::pop(next).1);
        }
        while let Some(heaviest) = self.candidates.pop() {
            // It may have been pruned in an earlier run, or for the sake of another port.
            if !traffic.member(heaviest.member).pruned {
                return Some(heaviest.member);
            }
        }
        None
    }
}

/// Turns whose sums are read together: see [`Window`].
const WINDOW_TURNS: usize = 64;

/// `L_i` of the next few batches, copied next to each other.
///
/// `σ` visits the batches in an order that memory knows nothing of, so each visit waits for memory,
/// and that is what a run over thousands of batches would cost. A loop that does nothing but copy
/// has the processor wait for many of them at once. The copies stay true for their turn: nobody is
/// pruned whose batch did not have its turn yet.
#[derive(Debug, Default)]
pub(super) struct Window {
    sums: Vec<Sum>,
    /// Where each turn's sums end.
    ends: Vec<u32>,
    /// Position of the first turn in it.
    first: usize,
}

impl Window {
    pub(super) fn clear(&mut self) {
        self.sums.clear();
        self.ends.clear();
        self.first = 0;
    }

    /// The sums of the batch at `position`; positions are asked for in ascending order.
    pub(super) fn of(&mut self, traffic: &TrafficTable, turns: &[Turn], position: usize) -> &[Sum] {
        if position >= self.first + self.ends.len() {
            self.clear();
            self.first = position;
            for turn in turns[position..].iter().take(WINDOW_TURNS) {
                self.sums.extend_from_slice(traffic.sums(turn.batch));
                self.ends.push(self.sums.len() as u32);
            }
        }
        let index = position - self.first;
        let begin = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.sums[begin as usize..self.ends[index] as usize]
    }
}
