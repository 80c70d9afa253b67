//! Sharing: the weighted max-min rates of one class within the capacity that higher classes leave.
//!
//! The level `λ_p` of a port is the rate per unit of weight of the transfers that the port bounds.
//! It is infinite where the transfers do not use up the room `R_p`. A transfer's rate is `w · min
//! λ` over its path. The rates are max-min (Bertsekas and Gallager, Data Networks, §6.5.2) and
//! unique if at every port with a finite level
//!
//! ```text
//! Σ min(w_f · b_f, w_f · λ_p) = R_p        b_f = least λ of the other ports of f
//! ```
//!
//! and at every other port `Σ w_f · b_f ≤ R_p`. Each transfer then has a port that is used up and
//! where no transfer gets more per weight. It is therefore enough to solve the equation at ports
//! where something has changed and to propagate the changes:
//!
//! * Ports are solved in ascending order of a lower bound of their level. Lower levels affect
//!   higher ones and never the reverse, so most ports are solved once.
//! * A port whose new level is above the next lower bound is requeued behind that bound.
//! * A port that a class does not use up passes on few changes: either all of its transfers stay
//!   below an even share ([`Care::Above`]), or they fit into the unused rest ([`Care::Beyond`]).
//!
//! Nearly equal levels can make this slow. In that case the connected component is filled
//! progressively: all levels are raised to infinity, and the same steps find one final level each.
//!
//! The rest that a class leaves, `R_p − Σ rates`, is the room of the next lower class that has
//! transfers. That class is computed only if its room changes. Classes with a guaranteed share
//! ([`Network::guarantee`](super::Network::guarantee)) reduce the room of the highest class by it
//! while they have transfers on the port, and get it in addition to that rest.

use super::lane::{LaneEntry, LaneState, MANY};
use super::lanes::{Care, Lanes, Level};
use super::transfer::{NONE, Slab, Stage};
use super::water;

pub(super) const SAME: f64 = 1e-12;

/// Share of the capacity below which a rest counts as zero.
pub(super) const DUST: f64 = 1e-9;

pub(super) fn same(a: f64, b: f64, scale: f64) -> bool {
    a == b || (a - b).abs() <= SAME * scale
}

fn same_level(a: f64, b: f64) -> bool {
    a == b || (a.is_finite() && b.is_finite() && same(a, b, a.max(b)))
}

struct Solution {
    /// Room `R` of the lane, in bytes per second.
    room: f64,
    left: f64,
    /// Sum of the weights, `Σ w`.
    weight: f64,
    level: Level,
}

#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Bounds `b` of the lane that is being solved, by place.
    bounds: Vec<f64>,
    /// Weights `w` of that lane's transfers, if there are several.
    weights: Vec<f64>,
    moves: Vec<(u32, u8)>,
    component: Vec<u32>,
}

pub(super) struct Sharing<'a> {
    pub(super) now_ns: u64,
    pub(super) lanes: &'a mut Lanes,
    pub(super) slab: &'a mut Slab,
    pub(super) scratch: &'a mut Scratch,
    /// Number of visits per entry of a class before the component is filled from scratch.
    pub(super) patience: usize,
    #[cfg(debug_assertions)]
    pub(super) audit: &'a mut Vec<u32>,
}

impl Sharing<'_> {
    pub(super) fn run(&mut self) {
        let mut class = None;
        let (mut work, mut budget) = (0, 0);
        while let Some(number) = self.lanes.pop_dirty() {
            let lane = &mut self.lanes.lanes[number as usize];
            if lane.is_empty() {
                lane.state.clear(LaneState::DIRTY);
                self.lanes.release(number);
                continue;
            }
            #[cfg(debug_assertions)]
            self.audit.push(lane.port);
            let (here, count) = (lane.class, lane.len());
            if class != Some(here) {
                class = Some(here);
                self.unseal();
                work = 0;
                budget = self.patience * (self.lanes.members[usize::from(here)] + 64);
            }
            work += count;
            if self.step(number) && work > budget {
                budget = usize::MAX;
                self.lift(here);
            }
        }
        self.unseal();
    }

    /// Computes a lane. Returns false if it has to wait for others.
    fn step(&mut self, number: u32) -> bool {
        let room = self.room(number);
        let before = self.lanes.levels[number as usize].level;
        let lane = &mut self.lanes.lanes[number as usize];
        if room == 0.0 && before == 0.0 && !lane.state.has(LaneState::FRESH) {
            // The lane stays without capacity, as before.
            lane.state.clear(LaneState::DIRTY);
            lane.room = 0.0;
            return true;
        }
        let class = lane.class;
        let solution = self.solve(number, room, before);
        let level = solution.level.level;
        if level < before
            && let Some(least) = self.lanes.next_least(class)
            && level * (1.0 - SAME) > least
        {
            self.lanes.requeue(number, class, level);
            return false;
        }
        self.commit(number, &solution);
        true
    }

    fn room(&self, number: u32) -> f64 {
        let lane = &self.lanes.lanes[number as usize];
        match self.lanes.above(lane.port, lane.class) {
            Some(above) => match self.lanes.levels[above as usize].care {
                Care::Every(left) => self.lanes.left_to(above, lane.class, left),
                _ => unreachable!("a lane with transfers below keeps account"),
            },
            None => {
                let kept = self.lanes.kept(lane.port, lane.class);
                self.lanes.ports[lane.port as usize].capacity - kept
            }
        }
    }

    /// Writes the bounds of a lane's transfers by other ports into the scratch buffers. Returns `Σ
    /// w·b` and `Σ w`.
    fn look(&mut self, number: u32) -> (f64, f64) {
        let Scratch { bounds, weights, .. } = &mut *self.scratch;
        let lane = &self.lanes.lanes[number as usize];
        bounds.resize(lane.len(), 0.0);
        if let [entry] = lane.parts()[0]
            && lane.len() == 1
        {
            bounds[0] = self.lanes.bound_elsewhere(entry, number, self.slab);
            return (bounds[0] * entry.weight, entry.weight);
        }
        weights.resize(lane.len(), 0.0);
        let mut start = 0;
        for entries in lane.parts() {
            let places = start..start + entries.len();
            start = places.end;
            let places = bounds[places.clone()].iter_mut().zip(&mut weights[places]);
            for (entry, (bound, weight)) in entries.iter().zip(places) {
                *weight = entry.weight;
                *bound = self.lanes.bound_elsewhere(entry, number, self.slab);
            }
        }
        water::sums(bounds, weights)
    }

    /// Solves the equation of a lane, given the levels of the others.
    fn solve(&mut self, number: u32, room: f64, before: f64) -> Solution {
        let (need, weight) = self.look(number);
        let Scratch { bounds, weights, .. } = &*self.scratch;
        let lane = &self.lanes.lanes[number as usize];
        if room <= 0.0 || need > room * (1.0 + SAME) {
            let level = match bounds.len() {
                _ if room <= 0.0 => 0.0,
                1 => room / weight,
                _ => water::level(room, bounds, weights, weight, before),
            };
            return Solution { room, left: 0.0, weight, level: Level::of(level) };
        }
        let even = room / weight;
        let dust = self.lanes.ports[lane.port as usize].capacity * DUST;
        let left = (room - need).max(0.0);
        let left = if left < dust { 0.0 } else { left };
        let care = if self.lanes.below(lane.port, lane.class).is_some() {
            Care::Every(left)
        } else if bounds.iter().all(|&bound| bound <= even) {
            Care::Above(even)
        } else if left > dust {
            Care::Beyond(left - dust)
        } else {
            Care::Every(left)
        };
        Solution { room, left, weight, level: Level { level: f64::INFINITY, care } }
    }

    /// Applies the solution to the lane. Transfers that the lane starts or stops to bound are
    /// moved, and other lanes of transfers whose rate changes are queued.
    fn commit(&mut self, number: u32, solution: &Solution) {
        let level = &mut self.lanes.levels[number as usize];
        let (before, mut now) = (level.level, solution.level.level);
        let changed = !same_level(before, now);
        if !changed {
            now = before;
        }
        *level = Level { level: now, ..solution.level };
        let lane = &mut self.lanes.lanes[number as usize];
        if changed {
            lane.settle(before, self.now_ns);
        }
        if lane.state.has(LaneState::VISITED) {
            lane.state.set(LaneState::SEALED);
        }
        lane.room = solution.room;
        lane.set_weight(solution.weight);
        lane.state.clear(LaneState::DIRTY);
        let fresh = lane.state.clear(LaneState::FRESH);
        let (port, class) = (lane.port, lane.class);
        if changed {
            self.lanes.touch(number);
        }
        if changed && !self.is_contained(number, now, fresh) {
            self.tell(number, before, now, 0, fresh);
        } else if fresh {
            let from = self.lanes.lanes[number as usize].bound();
            self.tell(number, before, now, from, fresh);
        }
        if let Some(below) = self.lanes.below(port, class) {
            let capacity = self.lanes.ports[port as usize].capacity;
            let lane = &self.lanes.lanes[below as usize];
            let left = self.lanes.left_to(number, lane.class, solution.left);
            if !same(lane.room, left, capacity) {
                self.lanes.mark(below);
            }
        }
    }

    /// Reports whether the lane's new level affects no other lane: no transfer changes its
    /// bottleneck, and no other lane must be computed for the changed rates.
    fn is_contained(&self, number: u32, level: f64, fresh: bool) -> bool {
        let lane = &self.lanes.lanes[number as usize];
        let mut start = 0;
        for entries in lane.parts() {
            let ours = lane.bound().saturating_sub(start).min(entries.len());
            let bounds = &self.scratch.bounds[start..start + entries.len()];
            start += entries.len();
            let quiet = |entry| self.lanes.is_ignored(entry, level);
            let stays = |(entry, bound): (&LaneEntry, &f64)| {
                level >= bound * (1.0 - SAME)
                    || (fresh && self.slab[entry.transfer()].stage == Stage::Fresh)
            };
            let others = entries[ours..].iter().zip(&bounds[ours..]);
            if !entries[..ours].iter().all(quiet) || !others.into_iter().all(stays) {
                return false;
            }
        }
        true
    }

    /// Propagates a change of level from `before` to `now` to the lane's transfers past `from`.
    fn tell(&mut self, number: u32, before: f64, now: f64, from: usize, fresh: bool) {
        let mut moves = std::mem::take(&mut self.scratch.moves);
        let lane = &self.lanes.lanes[number as usize];
        let (count, ours) = (lane.len(), lane.bound());
        for place in from..count {
            let entry = *self.lanes.lanes[number as usize].get(place);
            let bound = self.scratch.bounds[place];
            if place < ours {
                let rate = if bound < now * (1.0 - SAME) {
                    moves.push(self.least(&entry));
                    bound
                } else {
                    now
                };
                self.tell_others(&entry, number, before, rate);
            } else if fresh && self.slab[entry.transfer()].stage == Stage::Fresh {
                // All lanes of this transfer are queued already.
                moves.push(self.least(&entry));
            } else if now < bound * (1.0 - SAME) {
                moves.push((entry.transfer(), entry.hop() as u8));
                self.tell_others(&entry, number, bound, now);
            }
        }
        for (transfer, hop) in moves.drain(..) {
            self.rebind(transfer, hop);
        }
        self.scratch.moves = moves;
    }

    fn least(&self, entry: &LaneEntry) -> (u32, u8) {
        let mut least = (f64::INFINITY, entry.hop());
        for (hop, lane) in self.slab[entry.transfer()].path() {
            let level = self.lanes.levels[lane as usize].level;
            if level < least.0 {
                least = (level, hop);
            }
        }
        (entry.transfer(), least.1 as u8)
    }

    fn tell_others(&mut self, entry: &LaneEntry, number: u32, before: f64, now: f64) {
        if same_level(before, now) || entry.other == NONE {
            return;
        }
        if entry.other == MANY {
            for (_, other) in self.slab[entry.transfer()].path() {
                if other != number {
                    self.tell_one(other, entry.weight, before, now);
                }
            }
        } else {
            self.tell_one(entry.other, entry.weight, before, now);
        }
    }

    fn tell_one(&mut self, number: u32, weight: f64, before: f64, now: f64) {
        if self.lanes.levels[number as usize].hear(now, weight * (now - before)) {
            self.lanes.mark(number);
        }
    }

    fn rebind(&mut self, transfer: u32, hop: u8) {
        let one = &self.slab[transfer];
        let bytes = one.bytes;
        let stage = one.stage;
        let (to, place) = (one.lanes[usize::from(hop)], one.places[usize::from(hop)]);
        let norm = match stage {
            Stage::Bound(old) if old == hop => return,
            Stage::Bound(old) => {
                let from = one.lanes[usize::from(old)];
                let place = one.places[usize::from(old)];
                self.lanes.settle(from, self.now_ns);
                self.lanes.touch(from);
                self.lanes.lanes[from as usize].demote(place, self.slab)
            }
            Stage::Fresh => {
                let lane = &self.lanes.lanes[to as usize];
                bytes as f64 / lane.get(place as usize).weight
            }
            Stage::Ended | Stage::Free => unreachable!("not in any lane"),
        };
        self.lanes.settle(to, self.now_ns);
        self.lanes.touch(to);
        self.lanes.lanes[to as usize].promote(place, norm, self.slab);
        self.slab[transfer].stage = Stage::Bound(hop);
    }

    fn lift(&mut self, class: u8) {
        let mut component = std::mem::take(&mut self.scratch.component);
        self.lanes.drain_class(class, &mut component);
        component.retain(|&number| {
            let lane = &mut self.lanes.lanes[number as usize];
            lane.state.clear(LaneState::DIRTY);
            if lane.is_empty() {
                self.lanes.release(number);
                return false;
            }
            !lane.state.set(LaneState::VISITED)
        });
        let mut next = 0;
        while let Some(&number) = component.get(next) {
            next += 1;
            for place in 0..self.lanes.lanes[number as usize].len() {
                let entry = *self.lanes.lanes[number as usize].get(place);
                for (_, other) in self.slab[entry.transfer()].path() {
                    let lane = &mut self.lanes.lanes[other as usize];
                    if !lane.state.set(LaneState::VISITED) {
                        component.push(other);
                    }
                }
            }
            self.lanes.settle(number, self.now_ns);
            self.lanes.touch(number);
            self.lanes.levels[number as usize] = Level::OPEN;
            self.lanes.lanes[number as usize].room = self.room(number);
            self.lanes.mark(number);
        }
        self.scratch.component = component;
    }

    fn unseal(&mut self) {
        for number in self.scratch.component.drain(..) {
            let lane = &mut self.lanes.lanes[number as usize];
            lane.state.clear(LaneState::VISITED | LaneState::SEALED);
        }
    }
}
