//! Two lanes by `T_tot`: short requests do not wait behind long ones (H-MAS §3.5). Inside a lane by
//! slack, `S_r = D_r − V_sys − T_tot` (eq. 5; `V_sys` never changes order and is left out).
//!
//! The paper does not say how lanes share. Here the slow lane is owed a part of the *work*, one in
//! `fast_weight + 1`, while both wait, by start-time fair queueing between two flows: who starts is
//! charged its `T_tot`; and as large a part of the concurrency. A lane that nobody waits in lends
//! its part. So the slow lane never starves, and the fast lane loses at most that share. Charged by
//! prompt tokens, the slow lane, whose work is in its answers, would get several times its share.
//! Whoever has begun computes the rest of its prompt first: it holds memory.

use super::{Hints, Kind, Policy, Room};
use crate::Span;
use crate::discipline::{Rank, Start};
use crate::hmas::Estimate;
use crate::job::Job;
use crate::request::Spec;

/// Ranks of the slow lane begin here: later than any slack of the fast lane.
const SLOW: i64 = 1 << 62;

#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    waiting: u32,
    running: u32,
    /// `T_tot` of those that started, ns, over the lane's weight.
    service: f64,
}

/// Two lanes.
#[derive(Clone, Debug)]
pub struct TwoLane {
    split: Span,
    fast_weight: u32,
    /// Fast, slow.
    lanes: [Lane; 2],
}

impl TwoLane {
    /// With such a split and weight.
    #[must_use]
    pub fn new(hints: &Hints) -> Self {
        Self {
            split: hints.lane_split,
            fast_weight: hints.fast_weight.max(1),
            lanes: [Lane::default(); 2],
        }
    }

    fn lane(&self, estimate: &Estimate) -> usize {
        usize::from(estimate.total() > self.split)
    }

    /// Slots of a lane while both want some: one at least.
    fn slots(&self, lane: usize, concurrency: u32) -> u32 {
        let slow = (concurrency / (self.fast_weight + 1)).max(1);
        if lane == 1 {
            slow
        } else {
            concurrency.saturating_sub(slow).max(1)
        }
    }

    fn is_full(&self, lane: usize, room: Room) -> bool {
        self.lanes[1 - lane].waiting > 0
            && self.lanes[lane].running >= self.slots(lane, room.concurrency)
    }
}

impl Policy for TwoLane {
    fn kind(&self) -> Kind {
        Kind::TwoLane
    }

    fn rank(&self, _: &Job, estimate: &Estimate) -> Rank {
        let due = i64::try_from(estimate.due.0).unwrap_or(i64::MAX);
        let total = i64::try_from(estimate.total().0).unwrap_or(i64::MAX);
        let slack = due.saturating_sub(total).clamp(-SLOW / 2, SLOW / 2);
        Rank(if self.lane(estimate) == 0 {
            slack
        } else {
            SLOW + slack
        })
    }

    fn arrived(&mut self, _: &Spec, estimate: &Estimate) {
        let lane = self.lane(estimate);
        if self.lanes[lane].waiting == 0 {
            // A lane saves nothing up while nobody is in it.
            self.lanes[lane].service = self.lanes[lane].service.max(self.lanes[1 - lane].service);
        }
        self.lanes[lane].waiting += 1;
    }

    fn began(&mut self, _: &Spec, estimate: &Estimate) {
        let slow = estimate.total() > self.split;
        let weight = if slow { 1 } else { self.fast_weight };
        let lane = &mut self.lanes[usize::from(slow)];
        lane.waiting = lane.waiting.saturating_sub(1);
        lane.running += 1;
        lane.service += estimate.total().0 as f64 / f64::from(weight);
    }

    fn dropped(&mut self, _: &Spec, estimate: &Estimate) {
        let lane = &mut self.lanes[usize::from(estimate.total() > self.split)];
        lane.running = lane.running.saturating_sub(1);
        lane.waiting += 1;
    }

    fn left(&mut self, _: &Spec, estimate: &Estimate, running: bool) {
        let lane = &mut self.lanes[usize::from(estimate.total() > self.split)];
        let count = if running {
            &mut lane.running
        } else {
            &mut lane.waiting
        };
        *count = count.saturating_sub(1);
    }

    fn start(&mut self, _: &Spec, estimate: &Estimate, room: Room) -> Start {
        let lane = self.lane(estimate);
        if lane == 1 {
            // All behind it are slow, too.
            return if self.is_full(1, room) {
                Start::Nobody
            } else {
                Start::Now
            };
        }
        let slow_turn = self.lanes[1].waiting > 0
            && self.lanes[1].service < self.lanes[0].service
            && !self.is_full(1, room);
        if slow_turn || self.is_full(0, room) {
            return Start::Skip(Rank(SLOW - SLOW / 2));
        }
        Start::Now
    }

    fn begun_first(&self) -> bool {
        true
    }
}
