//! Two lanes by `T_tot`, so that short requests don't wait behind long ones (H-MAS §3.5). Ranks
//! within a lane are by slack, `S_r = D_r − V_sys − T_tot` (eq. 5), without the constant `V_sys`.
//!
//! The paper doesn't define how the lanes share. Here the slow lane gets one part in `fast_weight +
//! 1` of the *work* while requests wait in both lanes. Start-time fair queueing between the lanes
//! enforces it: a starting request is charged its `T_tot`. The concurrency is divided likewise. An
//! empty lane's part goes to the other lane. A charge by prompt tokens would favour the slow lane,
//! because most of its work is in the answers. Begun prompts go first, because they hold memory.

use super::{Hints, Policy, Room};
use crate::Span;
use crate::discipline::{Rank, Start};
use crate::hmas::Estimate;
use crate::job::Job;
use crate::request::Spec;

/// First rank of the slow lane, larger than any slack of the fast lane.
const SLOW: i64 = 1 << 62;

#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    waiting: u32,
    running: u32,
    /// Sum of the `T_tot` of all started requests in ns, divided by the lane's weight.
    service: f64,
}

#[derive(Clone, Debug)]
pub struct TwoLane {
    split: Span,
    fast_weight: u32,
    lanes: [Lane; 2],
}

impl TwoLane {
    /// Creates the policy with the split and weight of `hints`.
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

    /// Returns the number of requests that may run in a lane while both lanes wait, at least 1.
    fn slots(&self, lane: usize, concurrency: u32) -> u32 {
        let slow = (concurrency / (self.fast_weight + 1)).max(1);
        if lane == 1 { slow } else { concurrency.saturating_sub(slow).max(1) }
    }

    fn is_full(&self, lane: usize, room: Room) -> bool {
        self.lanes[1 - lane].waiting > 0
            && self.lanes[lane].running >= self.slots(lane, room.concurrency)
    }
}

impl Policy for TwoLane {
    fn rank(&self, _: &Job, estimate: &Estimate) -> Rank {
        let due = i64::try_from(estimate.due.0).unwrap_or(i64::MAX);
        let total = i64::try_from(estimate.total().0).unwrap_or(i64::MAX);
        let slack = due.saturating_sub(total).clamp(-SLOW / 2, SLOW / 2);
        Rank(if self.lane(estimate) == 0 { slack } else { SLOW + slack })
    }

    fn arrived(&mut self, _: &Spec, estimate: &Estimate) {
        let lane = self.lane(estimate);
        if self.lanes[lane].waiting == 0 {
            // An empty lane must not save up service.
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
        let count = if running { &mut lane.running } else { &mut lane.waiting };
        *count = count.saturating_sub(1);
    }

    fn start(&mut self, _: &Spec, estimate: &Estimate, room: Room) -> Start {
        let lane = self.lane(estimate);
        if lane == 1 {
            // All requests behind this one are slow, too.
            return if self.is_full(1, room) { Start::Nobody } else { Start::Now };
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
