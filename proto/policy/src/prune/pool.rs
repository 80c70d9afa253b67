//! Who may be pruned for the sake of a port.

use core::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

use laxity_types::RequestId;

use super::traffic_table::{MemberSlot, PortSlot, TrafficTable, Weight};

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
