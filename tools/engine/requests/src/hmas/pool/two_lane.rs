//! Two lanes by `T_tot`: short requests do not wait behind long ones (H-MAS §3.5). Inside a lane by slack,
//! `S_r = D_r − V_sys − T_tot` (eq. 5; `V_sys` never changes order and is left out).
//!
//! The paper does not say how lanes share. Here the slow lane is owed one prompt token for each `fast_weight` of the fast one while
//! both wait (start-time fair queueing between two flows), and as large a part of the concurrency; a lane that nobody waits in lends its part.
//! So the slow lane slows down and never starves, and the fast lane loses at most that share.

use std::collections::HashSet;

use super::{Hints, Kind, Policy, Room};
use crate::Span;
use crate::discipline::{Rank, Start};
use crate::hmas::Estimate;
use crate::job::Job;
use crate::request::{RequestId, Spec};

/// Ranks of the slow lane begin here: later than any slack of the fast lane.
const SLOW: i64 = 1 << 62;

#[derive(Clone, Debug, Default)]
struct Lane {
    /// Requests with prompt tokens to compute, begun or not: one that has begun starves as well.
    wanting: HashSet<RequestId>,
    waiting: u32,
    running: u32,
    /// Tokens of service, over the lane's weight.
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
            lanes: [Lane::default(), Lane::default()],
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

    fn arrived(&mut self, spec: &Spec, estimate: &Estimate) {
        let lane = self.lane(estimate);
        if self.lanes[lane].wanting.is_empty() {
            // A lane saves nothing up while nobody is in it.
            self.lanes[lane].service = self.lanes[lane].service.max(self.lanes[1 - lane].service);
        }
        self.lanes[lane].waiting += 1;
        self.lanes[lane].wanting.insert(spec.id);
    }

    fn began(&mut self, _: &Spec, estimate: &Estimate) {
        let lane = &mut self.lanes[usize::from(estimate.total() > self.split)];
        lane.waiting = lane.waiting.saturating_sub(1);
        lane.running += 1;
    }

    fn dropped(&mut self, spec: &Spec, estimate: &Estimate) {
        let lane = &mut self.lanes[usize::from(estimate.total() > self.split)];
        lane.running = lane.running.saturating_sub(1);
        lane.waiting += 1;
        lane.wanting.insert(spec.id);
    }

    fn prefilled(&mut self, spec: &Spec, estimate: &Estimate, tokens: u32, left: u32) {
        let lane = self.lane(estimate);
        let weight = if lane == 0 { self.fast_weight } else { 1 };
        self.lanes[lane].service += f64::from(tokens) / f64::from(weight);
        if left == 0 {
            self.lanes[lane].wanting.remove(&spec.id);
        }
    }

    fn left(&mut self, spec: &Spec, estimate: &Estimate, running: bool) {
        let lane = &mut self.lanes[usize::from(estimate.total() > self.split)];
        lane.wanting.remove(&spec.id);
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
        let begun = self.lanes[1].wanting.len() > self.lanes[1].waiting as usize;
        let slow_turn = !self.lanes[1].wanting.is_empty()
            && self.lanes[1].service < self.lanes[0].service
            && (begun || !self.is_full(1, room));
        if slow_turn || self.is_full(0, room) {
            return Start::Skip(Rank(SLOW - SLOW / 2));
        }
        Start::Now
    }
}
