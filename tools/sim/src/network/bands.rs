//! All bands: their ports and classes, their levels, and the queue of bands to compute.
//!
//! A band exists only while it has transfers. The bands of thousands of ports and eight classes
//! would take megabytes, of which little is in use. They are therefore allocated from a slab, and
//! the band that was released last is reused first, which keeps the used memory in the cache.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::band::{BandEntry, BandState, PortClass};
use super::transfer::{NONE, Slab};

const NEAR: usize = 8;

/// One direction of a link. It fills a cache line, because every start and end reads some ports.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(super) struct Port {
    /// Capacity, in bytes per second.
    pub(super) capacity: f64,
    active: u64,
    pub(super) count: u32,
    /// Bands of the first classes, or [`NONE`].
    near: [u32; NEAR],
}

const _: () = assert!(size_of::<Port>() == 64);

/// The level of a band. Levels are stored apart from bands, so that many fit the cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Level {
    /// Level in bytes per second and unit of weight. Infinite if the port is not used up.
    pub(super) level: f64,
    pub(super) care: Care,
}

/// The changes of its transfers' rates that a band must be computed for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Care {
    /// Every change. The band leaves this rate to lower classes, in bytes per second.
    Every(f64),
    /// A rise above this level. All transfers are below it, and no lower class has transfers.
    Above(f64),
    /// Changes that add up to more than this, in bytes per second. No lower class has transfers.
    Beyond(f64),
}

impl Level {
    pub(super) const OPEN: Self = Self::of(f64::INFINITY);

    pub(super) const fn of(level: f64) -> Self {
        Self { level, care: Care::Every(0.0) }
    }

    /// Reports whether the band does not track what it leaves to others.
    pub(super) fn is_quiet(&self) -> bool {
        !matches!(self.care, Care::Every(_))
    }

    /// Reports whether a transfer's change to the level `to` does not matter to the band.
    pub(super) fn ignores(&self, to: f64) -> bool {
        matches!(self.care, Care::Above(limit) if to <= limit)
    }

    /// Records that a transfer's rate changed by `more` to the level `to`. Reports whether the band
    /// must be computed.
    pub(super) fn hear(&mut self, to: f64, more: f64) -> bool {
        match &mut self.care {
            Care::Every(_) => true,
            Care::Above(limit) => to > *limit,
            Care::Beyond(spare) => {
                *spare -= more;
                *spare < 0.0
            }
        }
    }
}

/// Ports and bands. A band is identified by its number.
#[derive(Debug, Default)]
pub(super) struct Bands {
    pub(super) ports: Vec<Port>,
    pub(super) bands: Vec<PortClass>,
    pub(super) levels: Vec<Level>,
    free: Vec<u32>,
    /// Bands of the other classes by class and port, or [`NONE`].
    far: Vec<Vec<u32>>,
    done: Vec<Vec<u64>>,
    /// Entries of all bands, by class.
    pub(super) members: Vec<usize>,
    /// Bands to compute, as packed class, lower bound of the level, and band number.
    queue: BinaryHeap<Reverse<u128>>,
    /// The first class with a guaranteed share of each port, and that share.
    floor: Option<(u8, f64)>,
    /// Bands whose events must be set.
    pub(super) touched: Vec<u32>,
}

impl Bands {
    pub(super) fn add_port(&mut self, capacity: f64) -> u32 {
        self.ports.push(Port { capacity, active: 0, count: 0, near: [NONE; NEAR] });
        for far in &mut self.far {
            far.push(NONE);
        }
        for done in &mut self.done {
            done.push(0);
        }
        self.ports.len() as u32 - 1
    }

    /// Allocates tables for `class`.
    pub(super) fn cover(&mut self, class: u8) {
        while self.done.len() <= usize::from(class) {
            if self.done.len() >= NEAR {
                self.far.push(vec![NONE; self.ports.len()]);
            }
            self.done.push(vec![0; self.ports.len()]);
            self.members.push(0);
        }
    }

    pub(super) fn classes(&self) -> u8 {
        self.done.len() as u8
    }

    #[inline]
    fn slot(&self, port: u32, class: u8) -> u32 {
        let class = usize::from(class);
        if class < NEAR {
            self.ports[port as usize].near[class]
        } else {
            self.far[class - NEAR][port as usize]
        }
    }

    #[inline]
    fn slot_mut(&mut self, port: u32, class: u8) -> &mut u32 {
        let class = usize::from(class);
        if class < NEAR {
            &mut self.ports[port as usize].near[class]
        } else {
            &mut self.far[class - NEAR][port as usize]
        }
    }

    /// Returns the band of a port and class, if any.
    pub(super) fn find(&self, port: u32, class: u8) -> Option<u32> {
        if class >= self.classes() {
            return None;
        }
        let band = self.slot(port, class);
        (band != NONE).then_some(band)
    }

    /// Returns or creates the band of a port and class. Call [`Self::cover`] before.
    pub(super) fn enter(&mut self, port: u32, class: u8) -> u32 {
        let found = self.slot(port, class);
        if found != NONE {
            return found;
        }
        let band = self.free.pop().unwrap_or_else(|| {
            self.bands.push(PortClass::default());
            self.levels.push(Level::OPEN);
            self.bands.len() as u32 - 1
        });
        *self.slot_mut(port, class) = band;
        let new = &mut self.bands[band as usize];
        new.port = port;
        new.class = class;
        new.room = 0.0;
        self.levels[band as usize] = Level::OPEN;
        band
    }

    /// Releases a band if nothing refers to it.
    pub(super) fn release(&mut self, band: u32) {
        let gone = &self.bands[band as usize];
        if gone.is_empty() && !gone.state.has(BandState::DIRTY | BandState::TOUCHED) {
            let (port, class) = (gone.port, gone.class);
            *self.slot_mut(port, class) = NONE;
            self.free.push(band);
        }
    }

    /// Adds a transfer of `class` to the count of `port`. Reports whether the port was idle.
    pub(super) fn count_in(&mut self, port: u32, class: u8) -> bool {
        let here = &mut self.ports[port as usize];
        let idle = here.active == 0;
        here.active |= 1 << class;
        here.count += 1;
        self.members[usize::from(class)] += 1;
        idle
    }

    /// Removes a transfer, of which `carried` bytes have passed, from the count of its band.
    pub(super) fn count_out(&mut self, band: u32, carried: u64) {
        let band = &self.bands[band as usize];
        let here = &mut self.ports[band.port as usize];
        here.count -= 1;
        if band.is_empty() {
            here.active &= !(1 << band.class);
        }
        self.members[usize::from(band.class)] -= 1;
        self.done[usize::from(band.class)][band.port as usize] += carried;
    }

    pub(super) fn done(&self, port: u32, class: u8) -> u64 {
        let done = self.done.get(usize::from(class));
        done.map_or(0, |done| done[port as usize])
    }

    pub(super) fn above(&self, port: u32, class: u8) -> Option<u32> {
        let above = self.ports[port as usize].active & ((1 << class) - 1);
        let class = above.checked_ilog2()?;
        Some(self.slot(port, class as u8))
    }

    pub(super) fn below(&self, port: u32, class: u8) -> Option<u32> {
        let below = self.ports[port as usize].active & (!1 << class);
        (below != 0).then(|| self.slot(port, below.trailing_zeros() as u8))
    }

    /// Guarantees classes from `class` on `share` of each port. Call it before any transfer starts.
    pub(super) fn set_floor(&mut self, class: u8, share: f64) {
        self.floor = Some((class, share));
    }

    /// Returns the rate that lower classes keep from those up to `class` on a port, in bytes per
    /// second. It is zero while they have no transfers there.
    pub(super) fn kept(&self, port: u32, class: u8) -> f64 {
        let port = &self.ports[port as usize];
        match self.floor {
            Some((floor, share)) if class < floor && port.active & (!0 << floor) != 0 => {
                port.capacity * share
            }
            _ => 0.0,
        }
    }

    /// Returns the rate that the band `above` leaves to the next lower class `below` of its port.
    /// `left` is the part of its own rate that the band does not use.
    pub(super) fn left_to(&self, above: u32, below: u8, left: f64) -> f64 {
        let above = &self.bands[above as usize];
        let kept = self.kept(above.port, above.class);
        left + if kept > self.kept(above.port, below) { kept } else { 0.0 }
    }

    /// Queues the highest class of a port, whose room depends on whether lower ones have transfers.
    pub(super) fn mark_guaranteed(&mut self, port: u32) {
        let active = self.ports[port as usize].active;
        if self.floor.is_some() && active != 0 {
            let top = self.slot(port, active.trailing_zeros() as u8);
            self.mark(top);
        }
    }

    pub(super) fn mark(&mut self, number: u32) {
        let band = &mut self.bands[number as usize];
        if band.state.has(BandState::DIRTY | BandState::SEALED) {
            return;
        }
        band.state.set(BandState::DIRTY);
        // The lower bound is the band's level or an even share of its room, whichever is less.
        let least = (band.room / band.weight()).min(self.levels[number as usize].level);
        let class = band.class;
        self.requeue(number, class, least);
    }

    pub(super) fn requeue(&mut self, band: u32, class: u8, least: f64) {
        // The bits of non-negative floats sort in the order of the floats.
        let bits = u128::from(least.max(0.0).to_bits());
        let key = u128::from(class) << 96 | bits << 32 | u128::from(band);
        self.queue.push(Reverse(key));
    }

    pub(super) fn pop_dirty(&mut self) -> Option<u32> {
        self.queue.pop().map(|Reverse(key)| key as u32)
    }

    /// Returns the lower bound of the next queued band, if it is of this class.
    pub(super) fn next_least(&self, class: u8) -> Option<f64> {
        let &Reverse(key) = self.queue.peek()?;
        ((key >> 96) as u8 == class).then(|| f64::from_bits((key >> 32) as u64))
    }

    pub(super) fn is_clean(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn drain_class(&mut self, class: u8, into: &mut Vec<u32>) {
        while self.next_least(class).is_some()
            && let Some(band) = self.pop_dirty()
        {
            into.push(band);
        }
    }

    pub(super) fn touch(&mut self, number: u32) {
        if !self.bands[number as usize].state.set(BandState::TOUCHED) {
            self.touched.push(number);
        }
    }

    pub(super) fn settle(&mut self, band: u32, now_ns: u64) {
        self.bands[band as usize].settle(self.levels[band as usize].level, now_ns);
    }

    #[inline]
    pub(super) fn bound_elsewhere(&self, entry: &BandEntry, band: u32, slab: &Slab) -> f64 {
        match self.levels.get(entry.other as usize) {
            Some(level) => level.level,
            None if entry.other == NONE => f64::INFINITY,
            None => self.bound_of_many(entry, band, slab),
        }
    }

    #[cold]
    #[inline(never)]
    fn bound_of_many(&self, entry: &BandEntry, band: u32, slab: &Slab) -> f64 {
        let others = slab[entry.transfer()].path().filter(|path| path.1 != band);
        let levels = others.map(|(_, other)| self.levels[other as usize].level);
        levels.fold(f64::INFINITY, f64::min)
    }

    /// Reports whether no band on the path of `entry` must be computed for a change to the level
    /// `to`. It may miss such cases.
    #[inline]
    pub(super) fn is_ignored(&self, entry: &BandEntry, to: f64) -> bool {
        let other = self.levels.get(entry.other as usize);
        entry.other == NONE || other.is_some_and(|other| other.ignores(to))
    }
}
