//! A lane: the transfers of one class on one port, and the clock by which those end that it bounds.
//!
//! The transfers that a lane bounds all get its level `λ` (bytes per second and unit of weight), so
//! they progress alike: while `λ(t)` changes, `v(t) = ∫ λ dt` says how many bytes per unit of
//! weight each of them has got, and one that joins at `v₀` with `b` bytes and weight `w` ends when
//! `v` reaches `v₀ + b / w`. That target stays the same whatever happens to `λ`. So a change of
//! level costs the same for one transfer as for a thousand, and a lane has one event, its least
//! target. (Virtual time as in weighted fair queueing.)

use super::transfer::{NONE, Slab};

const NS_PER_SECOND: f64 = 1e9;

/// Children of a node of the heaps: of one level fewer than binary ones per two, and the four
/// targets that are compared lie side by side.
const ARITY: usize = 4;

/// What a lane knows of a transfer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Entry {
    /// `v` at which it ends, if this lane bounds it.
    pub(super) target: f64,
    pub(super) weight: f64,
    /// Index of the transfer, times [`super::PATH_MAX`], plus this lane's place in its path.
    pub(super) whose: u32,
    /// The only other lane of its path; [`NONE`] if there is none, [`MANY`] if there are several.
    pub(super) other: u32,
}

/// Several other lanes: see the transfer.
pub(super) const MANY: u32 = NONE - 1;

impl Entry {
    pub(super) fn transfer(&self) -> u32 {
        self.whose >> 2
    }

    pub(super) fn hop(&self) -> usize {
        (self.whose & 3) as usize
    }
}

/// The transfers of one class on one port. Those of a lane that has but one fill a cache line, and
/// nothing else is looked at then.
#[derive(Clone, Debug, Default)]
#[repr(C, align(64))]
pub(super) struct PortClass {
    /// Entry 0. See [`Self::get`].
    first: Entry,
    /// `v`, at `since`.
    clock: f64,
    since_ns: u64,
    /// What classes above leave to this one, bytes per second, as far as is known.
    pub(super) room: f64,
    pub(super) port: u32,
    /// How many there are.
    count: u32,
    /// How many this lane bounds.
    bound: u32,
    /// In which [`ERA`] the clock was zero.
    era: u16,
    pub(super) class: u8,
    pub(super) state: State,
    /// Sum of weights, if there are several.
    weight: f64,
    /// All entries but the first.
    rest: Vec<Entry>,
}

const _: () = assert!(std::mem::offset_of!(PortClass, weight) == 64);

/// What is to be done about a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct State(u8);

impl State {
    /// Rates must be computed anew.
    pub(super) const DIRTY: u8 = 1;
    /// Has transfers that no lane bounds yet.
    pub(super) const FRESH: u8 = 2;
    /// Its event must be set anew.
    pub(super) const TOUCHED: u8 = 4;
    /// Part of the component that is being filled from scratch.
    pub(super) const VISITED: u8 = 8;
    /// Its level is final in that filling.
    pub(super) const SEALED: u8 = 16;

    /// Whether any of `bits` is set.
    pub(super) fn has(self, bits: u8) -> bool {
        self.0 & bits != 0
    }

    /// Sets `bits`; whether any of them was set.
    pub(super) fn set(&mut self, bits: u8) -> bool {
        let had = self.has(bits);
        self.0 |= bits;
        had
    }

    /// Clears `bits`; whether any of them was set.
    pub(super) fn clear(&mut self, bits: u8) -> bool {
        let had = self.has(bits);
        self.0 &= !bits;
        had
    }
}

/// Clocks are set to zero about once a second, 2³⁰ ns: what is lost to rounding grows with `v`, and
/// this keeps it below a millionth of a byte.
const ERA: u32 = 30;

impl PortClass {
    /// How many transfers there are.
    pub(super) fn len(&self) -> usize {
        self.count as usize
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// How many of them this lane bounds: the first ones, which are a heap by target.
    pub(super) fn bound(&self) -> usize {
        self.bound as usize
    }

    #[inline]
    pub(super) fn get(&self, place: usize) -> &Entry {
        match place {
            0 => &self.first,
            _ => &self.rest[place - 1],
        }
    }

    #[inline]
    fn get_mut(&mut self, place: usize) -> &mut Entry {
        match place {
            0 => &mut self.first,
            _ => &mut self.rest[place - 1],
        }
    }

    /// All entries, in two parts.
    #[inline]
    pub(super) fn parts(&self) -> [&[Entry]; 2] {
        match self.count {
            0 => [&[], &[]],
            1 => [std::slice::from_ref(&self.first), &[]],
            _ => [std::slice::from_ref(&self.first), &self.rest],
        }
    }

    /// All entries.
    #[inline]
    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.parts().into_iter().flatten()
    }

    /// Sum of weights.
    pub(super) fn weight(&self) -> f64 {
        match self.count {
            0 => 0.0,
            1 => self.first.weight,
            _ => self.weight,
        }
    }

    /// The sum of weights, added up anew.
    pub(super) fn set_weight(&mut self, weight: f64) {
        if self.count > 1 {
            self.weight = weight;
        }
    }

    /// Adds a transfer that this lane does not bound; returns its place.
    pub(super) fn push(&mut self, entry: Entry) -> u32 {
        let place = self.count;
        if place == 0 {
            self.first = entry;
        } else {
            self.weight = self.weight() + entry.weight;
            self.rest.push(entry);
        }
        self.count += 1;
        place
    }

    /// Brings `v` to `now`, given the level since it was last brought.
    pub(super) fn settle(&mut self, level: f64, now_ns: u64) {
        let passed_ns = now_ns - self.since_ns;
        if passed_ns == 0 {
            return;
        }
        self.since_ns = now_ns;
        if self.bound == 0 {
            return;
        }
        debug_assert!(level.is_finite(), "a lane without limit bounds nothing");
        self.clock += level * passed_ns as f64 / NS_PER_SECOND;
        if self.era != (now_ns >> ERA) as u16 {
            self.era = (now_ns >> ERA) as u16;
            for place in 0..self.bound() {
                self.get_mut(place).target -= self.clock;
            }
            self.clock = 0.0;
        }
    }

    /// `v` at `now`.
    pub(super) fn clock(&self, level: f64, now_ns: u64) -> f64 {
        if now_ns == self.since_ns {
            self.clock
        } else {
            self.clock + level * (now_ns - self.since_ns) as f64 / NS_PER_SECOND
        }
    }

    /// When the first of the transfers that this lane bounds ends, in whole nanoseconds, rounded
    /// up. The lane must have been settled when its level last changed.
    pub(super) fn next_end_ns(&self, level: f64) -> Option<u64> {
        if self.bound == 0 || level <= 0.0 {
            return None;
        }
        let ns = (self.first.target - self.clock) / level * NS_PER_SECOND;
        // A ten-thousandth of a nanosecond, and the last digits of a long time, are rounding: a
        // transfer that takes a whole number of nanoseconds takes no more.
        let ns = ns - 1e-4 - ns * 1e-14;
        if ns > 9e18 {
            return None;
        }
        let whole = ns as u64;
        Some(self.since_ns + whole + u64::from((whole as f64) < ns))
    }

    /// This lane bounds the transfer at `place` from here on; `norm` is what it has left, bytes per
    /// unit of weight. The lane must be settled.
    pub(super) fn promote(&mut self, place: u32, norm: f64, slab: &mut Slab) {
        debug_assert!(place >= self.bound, "not bound by this lane yet");
        if self.bound == 0 {
            self.clock = 0.0;
            self.era = (self.since_ns >> ERA) as u16;
        }
        let (place, last) = (place as usize, self.bound());
        let mut entry = *self.get(place);
        entry.target = self.clock + norm;
        if place != last {
            *self.get_mut(place) = *self.get(last);
            self.note(place, slab);
        }
        self.bound += 1;
        self.rise(last, entry, slab);
    }

    /// This lane no longer bounds the transfer at `place`; returns what it has left, bytes per unit
    /// of weight. The lane must be settled.
    pub(super) fn demote(&mut self, place: u32, slab: &mut Slab) -> f64 {
        let entry = *self.get(place as usize);
        let last = self.unheap(place as usize, slab);
        *self.get_mut(last) = entry;
        self.note(last, slab);
        (entry.target - self.clock).max(0.0)
    }

    /// Takes the transfer at `place` off.
    pub(super) fn remove(&mut self, place: u32, slab: &mut Slab) {
        if self.count == 1 {
            (self.count, self.bound) = (0, 0);
            return;
        }
        let mut place = place as usize;
        self.weight -= self.get(place).weight;
        if place < self.bound() {
            place = self.unheap(place, slab);
        }
        self.count -= 1;
        if let Some(last) = self.rest.pop()
            && place < self.len()
        {
            *self.get_mut(place) = last;
            self.note(place, slab);
        }
    }

    /// Closes the gap at `place` of the heap; returns where the gap is then.
    fn unheap(&mut self, place: usize, slab: &mut Slab) -> usize {
        debug_assert!(place < self.bound(), "bound by this lane");
        self.bound -= 1;
        let last = self.bound();
        if place != last {
            let entry = *self.get(last);
            if place > 0 && entry.target < self.get((place - 1) / ARITY).target {
                self.rise(place, entry, slab);
            } else {
                self.sink(place, entry, slab);
            }
        }
        last
    }

    fn note(&self, place: usize, slab: &mut Slab) {
        let entry = self.get(place);
        slab[entry.transfer()].places[entry.hop()] = place as u32;
    }

    /// Puts `entry` at `place` or above it.
    fn rise(&mut self, mut place: usize, entry: Entry, slab: &mut Slab) {
        while place > 0 {
            let parent = (place - 1) / ARITY;
            if self.get(parent).target <= entry.target {
                break;
            }
            *self.get_mut(place) = *self.get(parent);
            self.note(place, slab);
            place = parent;
        }
        *self.get_mut(place) = entry;
        self.note(place, slab);
    }

    /// Puts `entry` at `place` or below it.
    fn sink(&mut self, mut place: usize, entry: Entry, slab: &mut Slab) {
        loop {
            // Entry `i` is at `rest[i - 1]`: the children of `place` start there.
            let start = place * ARITY;
            let end = (start + ARITY).min(self.bound().max(1) - 1);
            if start >= end {
                break;
            }
            let children = &self.rest[start..end];
            let mut least = 0;
            for child in 1..children.len() {
                if children[child].target < children[least].target {
                    least = child;
                }
            }
            if children[least].target >= entry.target {
                break;
            }
            *self.get_mut(place) = children[least];
            self.note(place, slab);
            place = start + least + 1;
        }
        *self.get_mut(place) = entry;
        self.note(place, slab);
    }
}
