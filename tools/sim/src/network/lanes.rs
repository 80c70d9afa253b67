//! All lanes: which port and class each belongs to, their levels, and which are to be computed.
//!
//! A lane is there only while it has transfers. The lanes of a network with thousands of ports and
//! eight classes would fill megabytes, of which a few are in use; so they come from a slab and
//! those given back last are taken first, which keeps what is in use in the cache.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::lane::{Entry, PortClass, State};
use super::transfer::{NONE, Slab};

/// Classes whose lanes a port knows itself.
const NEAR: usize = 8;

/// One direction of a link. A cache line, since every start and end looks at some.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(super) struct Port {
    /// Bytes per second.
    pub(super) capacity: f64,
    /// The classes that have transfers, a bit each.
    active: u64,
    /// How many transfers.
    pub(super) count: u32,
    /// The lanes of the first classes, or [`NONE`].
    near: [u32; NEAR],
}

const _: () = assert!(size_of::<Port>() == 64);

/// What others look up of a lane: apart from it, so that many fit the cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Level {
    /// Bytes per second and unit of weight; infinite where the transfers need less than there is.
    pub(super) level: f64,
    pub(super) care: Care,
}

/// Which changes of its transfers' rates a lane must know of.
#[derive(Clone, Copy, Debug)]
pub(super) enum Care {
    /// Every one. It leaves so much to the classes below, bytes per second.
    Every(f64),
    /// A level above this one. All are below it and no class below has transfers.
    Above(f64),
    /// Those that add up to more than this, bytes per second. No class below has transfers.
    Beyond(f64),
}

impl Level {
    /// Of a lane that nothing is known of.
    pub(super) const OPEN: Self = Self::of(f64::INFINITY);

    /// Of a lane that leaves nothing to others.
    pub(super) const fn of(level: f64) -> Self {
        Self {
            level,
            care: Care::Every(0.0),
        }
    }

    /// Whether what the lane leaves is not kept account of.
    pub(super) fn is_quiet(&self) -> bool {
        !matches!(self.care, Care::Every(_))
    }

    /// Whether nobody cares about a change of a transfer to the level `to`.
    pub(super) fn ignores(&self, to: f64) -> bool {
        matches!(self.care, Care::Above(limit) if to <= limit)
    }

    /// Takes note of a change of a transfer's rate, by `more`, to the level `to`; whether the lane
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

/// Ports and lanes. A lane is known by its number.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    pub(super) ports: Vec<Port>,
    pub(super) lanes: Vec<PortClass>,
    pub(super) levels: Vec<Level>,
    free: Vec<u32>,
    /// The lanes of the other classes, by class and port, or [`NONE`].
    far: Vec<Vec<u32>>,
    /// By class and port: bytes of transfers that are through or were taken off.
    done: Vec<Vec<u64>>,
    /// By class: entries of all lanes.
    pub(super) members: Vec<usize>,
    /// Lanes to be computed: class, lower bound of the level, lane.
    queue: BinaryHeap<Reverse<u128>>,
    /// Lanes whose events must be set anew.
    pub(super) touched: Vec<u32>,
}

impl Lanes {
    /// A port more; returns its number.
    pub(super) fn add_port(&mut self, capacity: f64) -> u32 {
        self.ports.push(Port {
            capacity,
            active: 0,
            count: 0,
            near: [NONE; NEAR],
        });
        for far in &mut self.far {
            far.push(NONE);
        }
        for done in &mut self.done {
            done.push(0);
        }
        self.ports.len() as u32 - 1
    }

    /// Makes room for `class`.
    pub(super) fn cover(&mut self, class: u8) {
        while self.done.len() <= usize::from(class) {
            if self.done.len() >= NEAR {
                self.far.push(vec![NONE; self.ports.len()]);
            }
            self.done.push(vec![0; self.ports.len()]);
            self.members.push(0);
        }
    }

    /// How many classes there is room for.
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

    /// The lane of a port and class.
    pub(super) fn find(&self, port: u32, class: u8) -> Option<u32> {
        if class >= self.classes() {
            return None;
        }
        let lane = self.slot(port, class);
        (lane != NONE).then_some(lane)
    }

    /// The lane of a port and class, which [`Self::cover`] knows; a new one if there is none.
    pub(super) fn enter(&mut self, port: u32, class: u8) -> u32 {
        let found = self.slot(port, class);
        if found != NONE {
            return found;
        }
        let lane = self.free.pop().unwrap_or_else(|| {
            self.lanes.push(PortClass::default());
            self.levels.push(Level::OPEN);
            self.lanes.len() as u32 - 1
        });
        *self.slot_mut(port, class) = lane;
        let new = &mut self.lanes[lane as usize];
        new.port = port;
        new.class = class;
        new.room = 0.0;
        self.levels[lane as usize] = Level::OPEN;
        lane
    }

    /// Gives a lane back if nothing refers to it.
    pub(super) fn release(&mut self, lane: u32) {
        let gone = &self.lanes[lane as usize];
        if gone.is_empty() && !gone.state.has(State::DIRTY | State::TOUCHED) {
            let (port, class) = (gone.port, gone.class);
            *self.slot_mut(port, class) = NONE;
            self.free.push(lane);
        }
    }

    /// Counts a transfer of `class` at `port`; returns whether the port was idle.
    pub(super) fn count_in(&mut self, port: u32, class: u8) -> bool {
        let here = &mut self.ports[port as usize];
        let idle = here.active == 0;
        here.active |= 1 << class;
        here.count += 1;
        self.members[usize::from(class)] += 1;
        idle
    }

    /// Counts one out of a lane, of which `carried` bytes have passed.
    pub(super) fn count_out(&mut self, lane: u32, carried: u64) {
        let lane = &self.lanes[lane as usize];
        let here = &mut self.ports[lane.port as usize];
        here.count -= 1;
        if lane.is_empty() {
            here.active &= !(1 << lane.class);
        }
        self.members[usize::from(lane.class)] -= 1;
        self.done[usize::from(lane.class)][lane.port as usize] += carried;
    }

    /// Bytes of a class of transfers that are through or were taken off.
    pub(super) fn done(&self, port: u32, class: u8) -> u64 {
        let done = self.done.get(usize::from(class));
        done.map_or(0, |done| done[port as usize])
    }

    /// The lane of the next class above that has transfers.
    pub(super) fn above(&self, port: u32, class: u8) -> Option<u32> {
        let above = self.ports[port as usize].active & ((1 << class) - 1);
        let class = above.checked_ilog2()?;
        Some(self.slot(port, class as u8))
    }

    /// The lane of the next class below that has transfers.
    pub(super) fn below(&self, port: u32, class: u8) -> Option<u32> {
        let below = self.ports[port as usize].active & (!1 << class);
        (below != 0).then(|| self.slot(port, below.trailing_zeros() as u8))
    }

    /// The lane must be computed.
    pub(super) fn mark(&mut self, number: u32) {
        let lane = &mut self.lanes[number as usize];
        if lane.state.has(State::DIRTY | State::SEALED) {
            return;
        }
        lane.state.set(State::DIRTY);
        // What it has had, or what all get at least, as far as is known.
        let least = (lane.room / lane.weight()).min(self.levels[number as usize].level);
        let class = lane.class;
        self.requeue(number, class, least);
    }

    /// The lane stays in the queue, at `least`.
    pub(super) fn requeue(&mut self, lane: u32, class: u8, least: f64) {
        // The bits of numbers that are not negative order as the numbers do.
        let bits = u128::from(least.max(0.0).to_bits());
        let key = u128::from(class) << 96 | bits << 32 | u128::from(lane);
        self.queue.push(Reverse(key));
    }

    /// The next lane to be computed.
    pub(super) fn pop_dirty(&mut self) -> Option<u32> {
        self.queue.pop().map(|Reverse(key)| key as u32)
    }

    /// The lower bound of the one after it, if it is of this class.
    pub(super) fn next_least(&self, class: u8) -> Option<f64> {
        let &Reverse(key) = self.queue.peek()?;
        ((key >> 96) as u8 == class).then(|| f64::from_bits((key >> 32) as u64))
    }

    /// Whether any is to be computed.
    pub(super) fn is_clean(&self) -> bool {
        self.queue.is_empty()
    }

    /// Takes those of `class` from the front of the queue.
    pub(super) fn drain_class(&mut self, class: u8, into: &mut Vec<u32>) {
        while self.next_least(class).is_some()
            && let Some(lane) = self.pop_dirty()
        {
            into.push(lane);
        }
    }

    /// The event of the lane must be set anew.
    pub(super) fn touch(&mut self, number: u32) {
        if !self.lanes[number as usize].state.set(State::TOUCHED) {
            self.touched.push(number);
        }
    }

    /// Brings the clock of a lane to `now`.
    pub(super) fn settle(&mut self, lane: u32, now_ns: u64) {
        self.lanes[lane as usize].settle(self.levels[lane as usize].level, now_ns);
    }

    /// The least level of the path of `entry` without `lane`.
    #[inline]
    pub(super) fn bound_elsewhere(&self, entry: &Entry, lane: u32, slab: &Slab) -> f64 {
        match self.levels.get(entry.other as usize) {
            Some(level) => level.level,
            None if entry.other == NONE => f64::INFINITY,
            None => self.bound_of_many(entry, lane, slab),
        }
    }

    #[cold]
    #[inline(never)]
    fn bound_of_many(&self, entry: &Entry, lane: u32, slab: &Slab) -> f64 {
        let others = slab[entry.transfer()].path().filter(|path| path.1 != lane);
        let levels = others.map(|(_, other)| self.levels[other as usize].level);
        levels.fold(f64::INFINITY, f64::min)
    }

    /// Whether nobody in the path of `entry` cares about a change to the level `to`, as far as is
    /// easily known.
    #[inline]
    pub(super) fn is_ignored(&self, entry: &Entry, to: f64) -> bool {
        let other = self.levels.get(entry.other as usize);
        entry.other == NONE || other.is_some_and(|other| other.ignores(to))
    }
}
