//! A band: the transfers of one class on one port, and the clock that determines their ends.
//!
//! All transfers that a band bounds have its fair rate `λ` (bytes/s and unit of weight). While
//! `λ(t)` changes, `v(t) = ∫ λ dt` is the number of bytes per unit of weight that each has sent. A
//! transfer of `b` bytes and weight `w` that joins at `v₀` ends when `v` reaches its target `v₀ + b
//! / w`. Targets do not depend on `λ`, so the cost of a change of rate does not depend on the
//! number of transfers. A band has one event, for its least target. (This is virtual time as in
//! weighted fair queueing.)

use super::transfer::{NONE, Slab};

const NS_PER_SECOND: f64 = 1e9;

/// Number of children of a heap node. Compared with a binary heap the depth is halved, and the four
/// targets that are compared are adjacent in memory.
const ARITY: usize = 4;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BandEntry {
    /// Value of `v` at which the transfer ends, if this band bounds it.
    pub(super) target: f64,
    pub(super) weight: f64,
    pub(super) whose: u32,
    /// The other band of the path, [`NONE`] if there is none, or [`MANY`] for several.
    pub(super) other: u32,
}

/// Marker for several other bands, which are found in the transfer.
pub(super) const MANY: u32 = NONE - 1;

impl BandEntry {
    pub(super) fn transfer(&self) -> u32 {
        self.whose >> 2
    }

    pub(super) fn hop(&self) -> usize {
        (self.whose & 3) as usize
    }
}

/// The transfers of one class on one port. A band with one transfer fits one cache line.
#[derive(Clone, Debug, Default)]
#[repr(C, align(64))]
pub(super) struct PortClass {
    /// Entry 0. [`Self::get`] reads any entry.
    first: BandEntry,
    /// Value of `v` at `since`.
    clock: f64,
    since_ns: u64,
    /// Rate that higher classes leave to this one, in bytes per second, as of the last computation.
    pub(super) room: f64,
    pub(super) port: u32,
    count: u32,
    bound: u32,
    /// Number of the [`ERA`] in which the clock was last set to zero.
    era: u16,
    pub(super) class: u8,
    pub(super) state: BandState,
    /// Sum of the weights, if there are several transfers.
    weight: f64,
    /// All entries except the first.
    rest: Vec<BandEntry>,
}

const _: () = assert!(std::mem::offset_of!(PortClass, weight) == 64);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct BandState(u8);

impl BandState {
    /// The band's rates must be computed.
    pub(super) const DIRTY: u8 = 1;
    pub(super) const FRESH: u8 = 2;
    /// The band's event must be set.
    pub(super) const TOUCHED: u8 = 4;
    pub(super) const VISITED: u8 = 8;
    pub(super) const SEALED: u8 = 16;

    pub(super) fn has(self, bits: u8) -> bool {
        self.0 & bits != 0
    }

    pub(super) fn set(&mut self, bits: u8) -> bool {
        let had = self.has(bits);
        self.0 |= bits;
        had
    }

    /// Clears `bits` and reports whether any of them was set before.
    pub(super) fn clear(&mut self, bits: u8) -> bool {
        let had = self.has(bits);
        self.0 &= !bits;
        had
    }
}

/// Binary logarithm of the nanoseconds after which clocks are set to zero, about one second.
/// Rounding errors grow with `v`, and this keeps them below a millionth of a byte.
const ERA: u32 = 30;

impl PortClass {
    pub(super) fn len(&self) -> usize {
        self.count as usize
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the number of transfers that this band bounds. They are the first entries, which are
    /// a heap by target.
    pub(super) fn bound(&self) -> usize {
        self.bound as usize
    }

    #[inline]
    pub(super) fn get(&self, place: usize) -> &BandEntry {
        match place {
            0 => &self.first,
            _ => &self.rest[place - 1],
        }
    }

    #[inline]
    fn get_mut(&mut self, place: usize) -> &mut BandEntry {
        match place {
            0 => &mut self.first,
            _ => &mut self.rest[place - 1],
        }
    }

    #[inline]
    pub(super) fn parts(&self) -> [&[BandEntry]; 2] {
        match self.count {
            0 => [&[], &[]],
            1 => [std::slice::from_ref(&self.first), &[]],
            _ => [std::slice::from_ref(&self.first), &self.rest],
        }
    }

    #[inline]
    pub(super) fn iter(&self) -> impl Iterator<Item = &BandEntry> {
        self.parts().into_iter().flatten()
    }

    pub(super) fn weight(&self) -> f64 {
        match self.count {
            0 => 0.0,
            1 => self.first.weight,
            _ => self.weight,
        }
    }

    /// Replaces the sum of the weights by one that was added up again.
    pub(super) fn set_weight(&mut self, weight: f64) {
        if self.count > 1 {
            self.weight = weight;
        }
    }

    /// Adds a transfer that this band does not bound, and returns its place.
    pub(super) fn push(&mut self, entry: BandEntry) -> u32 {
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

    pub(super) fn settle(&mut self, level: f64, now_ns: u64) {
        let passed_ns = now_ns - self.since_ns;
        if passed_ns == 0 {
            return;
        }
        self.since_ns = now_ns;
        if self.bound == 0 {
            return;
        }
        debug_assert!(level.is_finite(), "a band without limit bounds nothing");
        self.clock += level * passed_ns as f64 / NS_PER_SECOND;
        if self.era != (now_ns >> ERA) as u16 {
            self.era = (now_ns >> ERA) as u16;
            for place in 0..self.bound() {
                self.get_mut(place).target -= self.clock;
            }
            self.clock = 0.0;
        }
    }

    pub(super) fn clock(&self, level: f64, now_ns: u64) -> f64 {
        if now_ns == self.since_ns {
            self.clock
        } else {
            self.clock + level * (now_ns - self.since_ns) as f64 / NS_PER_SECOND
        }
    }

    /// Returns the time of the first end among the transfers that this band bounds, rounded up to
    /// nanoseconds. The band must have been settled when its level last changed.
    pub(super) fn next_end_ns(&self, level: f64) -> Option<u64> {
        if self.bound == 0 || level <= 0.0 {
            return None;
        }
        let ns = (self.first.target - self.clock) / level * NS_PER_SECOND;
        // Subtracts rounding errors, so that a transfer of a whole number of nanoseconds takes no
        // more.
        let ns = ns - 1e-4 - ns * 1e-14;
        if ns > 9e18 {
            return None;
        }
        let whole = ns as u64;
        Some(self.since_ns + whole + u64::from((whole as f64) < ns))
    }

    /// Makes this band bound the transfer at `place`. `norm` is what the transfer has left, in
    /// bytes per unit of weight. The band must be settled.
    pub(super) fn promote(&mut self, place: u32, norm: f64, slab: &mut Slab) {
        debug_assert!(place >= self.bound, "not bound by this band yet");
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

    /// Makes this band no longer bound the transfer at `place`. Returns what the transfer has left,
    /// in bytes per unit of weight. The band must be settled.
    pub(super) fn demote(&mut self, place: u32, slab: &mut Slab) -> f64 {
        let entry = *self.get(place as usize);
        let last = self.unheap(place as usize, slab);
        *self.get_mut(last) = entry;
        self.note(last, slab);
        (entry.target - self.clock).max(0.0)
    }

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

    /// Closes the gap at `place` of the heap and returns the new position of the gap.
    fn unheap(&mut self, place: usize, slab: &mut Slab) -> usize {
        debug_assert!(place < self.bound(), "bound by this band");
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

    fn rise(&mut self, mut place: usize, entry: BandEntry, slab: &mut Slab) {
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

    fn sink(&mut self, mut place: usize, entry: BandEntry, slab: &mut Slab) {
        loop {
            // Entry `i` is at `rest[i - 1]`, so the children of `place` start there.
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
