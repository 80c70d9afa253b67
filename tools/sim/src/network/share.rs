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

use super::band::{BandEntry, BandState, MANY};
use super::bands::{Bands, Care, Level};
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
    /// Room `R` of the band, in bytes per second.
    room: f64,
    left: f64,
    /// Sum of the weights, `Σ w`.
    weight: f64,
    level: Level,
}

#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Bounds `b` of the band that is being solved, by place.
    bounds: Vec<f64>,
    /// Weights `w` of that band's transfers, if there are several.
    weights: Vec<f64>,
    moves: Vec<(u32, u8)>,
    component: Vec<u32>,
}

pub(super) struct Sharing<'a> {
    pub(super) now_ns: u64,
    pub(super) bands: &'a mut Bands,
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
        while let Some(number) = self.bands.pop_dirty() {
            let band = &mut self.bands.bands[number as usize];
            if band.is_empty() {
                band.state.clear(BandState::DIRTY);
                self.bands.release(number);
                continue;
            }
            #[cfg(debug_assertions)]
            self.audit.push(band.port);
            let (here, count) = (band.class, band.len());
            if class != Some(here) {
                class = Some(here);
                self.unseal();
                work = 0;
                budget = self.patience * (self.bands.members[usize::from(here)] + 64);
            }
            work += count;
            if self.step(number) && work > budget {
                budget = usize::MAX;
                self.lift(here);
            }
        }
        self.unseal();
    }

    /// Computes a band. Returns false if it has to wait for others.
    fn step(&mut self, number: u32) -> bool {
        let room = self.room(number);
        let before = self.bands.levels[number as usize].level;
        let band = &mut self.bands.bands[number as usize];
        if room == 0.0 && before == 0.0 && !band.state.has(BandState::FRESH) {
            // The band stays without capacity, as before.
            band.state.clear(BandState::DIRTY);
            band.room = 0.0;
            return true;
        }
        let class = band.class;
        let solution = self.solve(number, room, before);
        let level = solution.level.level;
        if level < before
            && let Some(least) = self.bands.next_least(class)
            && level * (1.0 - SAME) > least
        {
            self.bands.requeue(number, class, level);
            return false;
        }
        self.commit(number, &solution);
        true
    }

    fn room(&self, number: u32) -> f64 {
        let band = &self.bands.bands[number as usize];
        match self.bands.above(band.port, band.class) {
            Some(above) => match self.bands.levels[above as usize].care {
                Care::Every(left) => self.bands.left_to(above, band.class, left),
                _ => unreachable!("a band with transfers below keeps account"),
            },
            None => {
                let kept = self.bands.kept(band.port, band.class);
                self.bands.ports[band.port as usize].capacity - kept
            }
        }
    }

    /// Writes the bounds of a band's transfers by other ports into the scratch buffers. Returns `Σ
    /// w·b` and `Σ w`.
    fn look(&mut self, number: u32) -> (f64, f64) {
        let Scratch { bounds, weights, .. } = &mut *self.scratch;
        let band = &self.bands.bands[number as usize];
        bounds.resize(band.len(), 0.0);
        if let [entry] = band.parts()[0]
            && band.len() == 1
        {
            bounds[0] = self.bands.bound_elsewhere(entry, number, self.slab);
            return (bounds[0] * entry.weight, entry.weight);
        }
        weights.resize(band.len(), 0.0);
        let mut start = 0;
        for entries in band.parts() {
            let places = start..start + entries.len();
            start = places.end;
            let places = bounds[places.clone()].iter_mut().zip(&mut weights[places]);
            for (entry, (bound, weight)) in entries.iter().zip(places) {
                *weight = entry.weight;
                *bound = self.bands.bound_elsewhere(entry, number, self.slab);
            }
        }
        water::sums(bounds, weights)
    }

    /// Solves the equation of a band, given the levels of the others.
    fn solve(&mut self, number: u32, room: f64, before: f64) -> Solution {
        let (need, weight) = self.look(number);
        let Scratch { bounds, weights, .. } = &*self.scratch;
        let band = &self.bands.bands[number as usize];
        if room <= 0.0 || need > room * (1.0 + SAME) {
            let level = match bounds.len() {
                _ if room <= 0.0 => 0.0,
                1 => room / weight,
                _ => water::level(room, bounds, weights, weight, before),
            };
            return Solution { room, left: 0.0, weight, level: Level::of(level) };
        }
        let even = room / weight;
        let dust = self.bands.ports[band.port as usize].capacity * DUST;
        let left = (room - need).max(0.0);
        let left = if left < dust { 0.0 } else { left };
        let care = if self.bands.below(band.port, band.class).is_some() {
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

    /// Applies the solution to the band. Transfers that the band starts or stops to bound are
    /// moved, and other bands of transfers whose rate changes are queued.
    fn commit(&mut self, number: u32, solution: &Solution) {
        let level = &mut self.bands.levels[number as usize];
        let (before, mut now) = (level.level, solution.level.level);
        let changed = !same_level(before, now);
        if !changed {
            now = before;
        }
        *level = Level { level: now, ..solution.level };
        let band = &mut self.bands.bands[number as usize];
        if changed {
            band.settle(before, self.now_ns);
        }
        if band.state.has(BandState::VISITED) {
            band.state.set(BandState::SEALED);
        }
        band.room = solution.room;
        band.set_weight(solution.weight);
        band.state.clear(BandState::DIRTY);
        let fresh = band.state.clear(BandState::FRESH);
        let (port, class) = (band.port, band.class);
        if changed {
            self.bands.touch(number);
        }
        if changed && !self.is_contained(number, now, fresh) {
            self.tell(number, before, now, 0, fresh);
        } else if fresh {
            let from = self.bands.bands[number as usize].bound();
            self.tell(number, before, now, from, fresh);
        }
        if let Some(below) = self.bands.below(port, class) {
            let capacity = self.bands.ports[port as usize].capacity;
            let band = &self.bands.bands[below as usize];
            let left = self.bands.left_to(number, band.class, solution.left);
            if !same(band.room, left, capacity) {
                self.bands.mark(below);
            }
        }
    }

    /// Reports whether the band's new level affects no other band: no transfer changes its
    /// bottleneck, and no other band must be computed for the changed rates.
    fn is_contained(&self, number: u32, level: f64, fresh: bool) -> bool {
        let band = &self.bands.bands[number as usize];
        let mut start = 0;
        for entries in band.parts() {
            let ours = band.bound().saturating_sub(start).min(entries.len());
            let bounds = &self.scratch.bounds[start..start + entries.len()];
            start += entries.len();
            let quiet = |entry| self.bands.is_ignored(entry, level);
            let stays = |(entry, bound): (&BandEntry, &f64)| {
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

    /// Propagates a change of level from `before` to `now` to the band's transfers past `from`.
    fn tell(&mut self, number: u32, before: f64, now: f64, from: usize, fresh: bool) {
        let mut moves = std::mem::take(&mut self.scratch.moves);
        let band = &self.bands.bands[number as usize];
        let (count, ours) = (band.len(), band.bound());
        for place in from..count {
            let entry = *self.bands.bands[number as usize].get(place);
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
                // All bands of this transfer are queued already.
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

    fn least(&self, entry: &BandEntry) -> (u32, u8) {
        let mut least = (f64::INFINITY, entry.hop());
        for (hop, band) in self.slab[entry.transfer()].path() {
            let level = self.bands.levels[band as usize].level;
            if level < least.0 {
                least = (level, hop);
            }
        }
        (entry.transfer(), least.1 as u8)
    }

    fn tell_others(&mut self, entry: &BandEntry, number: u32, before: f64, now: f64) {
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
        if self.bands.levels[number as usize].hear(now, weight * (now - before)) {
            self.bands.mark(number);
        }
    }

    fn rebind(&mut self, transfer: u32, hop: u8) {
        let one = &self.slab[transfer];
        let bytes = one.bytes;
        let stage = one.stage;
        let (to, place) = (one.bands[usize::from(hop)], one.places[usize::from(hop)]);
        let norm = match stage {
            Stage::Bound(old) if old == hop => return,
            Stage::Bound(old) => {
                let from = one.bands[usize::from(old)];
                let place = one.places[usize::from(old)];
                self.bands.settle(from, self.now_ns);
                self.bands.touch(from);
                self.bands.bands[from as usize].demote(place, self.slab)
            }
            Stage::Fresh => {
                let band = &self.bands.bands[to as usize];
                bytes as f64 / band.get(place as usize).weight
            }
            Stage::Ended | Stage::Free => unreachable!("not in any band"),
        };
        self.bands.settle(to, self.now_ns);
        self.bands.touch(to);
        self.bands.bands[to as usize].promote(place, norm, self.slab);
        self.slab[transfer].stage = Stage::Bound(hop);
    }

    fn lift(&mut self, class: u8) {
        let mut component = std::mem::take(&mut self.scratch.component);
        self.bands.drain_class(class, &mut component);
        component.retain(|&number| {
            let band = &mut self.bands.bands[number as usize];
            band.state.clear(BandState::DIRTY);
            if band.is_empty() {
                self.bands.release(number);
                return false;
            }
            !band.state.set(BandState::VISITED)
        });
        let mut next = 0;
        while let Some(&number) = component.get(next) {
            next += 1;
            for place in 0..self.bands.bands[number as usize].len() {
                let entry = *self.bands.bands[number as usize].get(place);
                for (_, other) in self.slab[entry.transfer()].path() {
                    let band = &mut self.bands.bands[other as usize];
                    if !band.state.set(BandState::VISITED) {
                        component.push(other);
                    }
                }
            }
            self.bands.settle(number, self.now_ns);
            self.bands.touch(number);
            self.bands.levels[number as usize] = Level::OPEN;
            self.bands.bands[number as usize].room = self.room(number);
            self.bands.mark(number);
        }
        self.scratch.component = component;
    }

    fn unseal(&mut self) {
        for number in self.scratch.component.drain(..) {
            let band = &mut self.bands.bands[number as usize];
            band.state.clear(BandState::VISITED | BandState::SEALED);
        }
    }
}
