//! The requests that may be pruned to relieve a port.

use core::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

use laxity_types::RequestId;

use super::traffic_table::{MemberSlot, PortSlot, TrafficTable, Weight};

/// No position in `σ`, or no pool.
pub(super) const NONE: u32 = u32::MAX;

/// The requests that load one port. Requests of batches whose turn has not come are in `later`.
#[derive(Debug, Default)]
pub(super) struct Pool {
    candidates: BinaryHeap<Candidate>,
    /// Requests of later batches, the next turn first. It is a heap because few become candidates.
    later: BinaryHeap<(Reverse<u32>, Candidate)>,
}

/// A request in a pool. The greatest is pruned first; see point 3 in [`prune`](super).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    weight: Weight,
    position: u32,
    request: RequestId,
    member: MemberSlot,
}

impl Pool {
    /// Collects all requests that load `port`. [`Pool::take_heaviest`] skips pruned ones.
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
        Self { candidates: candidates.into(), later: later.into() }
    }

    /// Removes and returns the heaviest request that is not pruned and whose batch had its turn.
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
            // An earlier run, or this run for another port, may have pruned it.
            if !traffic.member(heaviest.member).pruned {
                return Some(heaviest.member);
            }
        }
        None
    }
}
