//! The network at flow level: transfers are fluids and ports have capacities. Classes share a port
//! by strict priority, and transfers of a class by weighted max-min. Packets, windows and the
//! convergence of transports are not modelled.
//!
//! The network has no notion of policies: a class is a number, and class 0 goes first. A transfer
//! crosses 1 to [`PATH_MAX`] ports, and a collective's aggregate crosses one. Rates are constant
//! between timestamps. A caller repeats these steps:
//!
//! ```text
//! now = the earlier of next_end(..) and what the caller has planned
//! pop_ended(now) until there is none
//! start(now, ..) as need be; of zero bytes: pop_ended(now) again
//! next_end(now)        computes the rates of all that is affected, once
//! ```
//!
//! Time must not go back, and `now` must not be after the result of the last `next_end`. If a
//! caller advances the time without a call of `next_end`, the network calls it itself.
//!
//! | file | concept |
//! |---|---|
//! | `transfer` | the slab of transfers |
//! | `band` | the transfers of a class on a port, and the clock of those that it bounds |
//! | `bands` | which bands there are, and which are to be computed |
//! | `water` | the level at which one band is full |
//! | `share` | the levels of all bands |
//! | `events` | which band has the next end |
//! | `check` | the same from scratch, for tests |
//!
//! Cost: a transfer on otherwise idle ports takes O(1) and an operation on the heap of events.
//! Otherwise a start or end takes two sweeps over the transfers of each port whose level changes.
//! Ends of transfers follow from their band's clock without further cost. Nothing is allocated once
//! the tables have reached their final size.
//!
//! Precision: an end is rounded up to whole nanoseconds and delivers exactly its bytes. The
//! transfer's share is idle for the last fraction of a nanosecond. Capacity that higher classes
//! leave is zero if it is less than 10⁻⁹ of the total. Other rates are exact to about 10⁻¹².

mod band;
mod bands;
mod check;
mod events;
mod share;
#[cfg(test)]
mod tests;
mod transfer;
mod water;

use laxity_policy::Time;

pub use transfer::{PATH_MAX, TransferId};

use band::{BandEntry, BandState, MANY};
use bands::{Bands, Care, Level};
use events::Events;
use share::{Scratch, Sharing};
use transfer::{NONE, Slab, Stage, Transfer};

pub const CLASSES_MAX: u8 = 64;

/// Number of visits per entry of a class before a component is filled from scratch.
const PATIENCE: usize = 4;

/// One direction of a link, as numbered by [`Network::add_port`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub u32);

/// A transfer that has ended and was not returned to the caller yet.
#[derive(Clone, Copy, Debug)]
struct Ended {
    order: u64,
    id: TransferId,
}

#[derive(Debug)]
pub struct Network {
    now_ns: u64,
    bands: Bands,
    slab: Slab,
    events: Events,
    started: u64,
    /// Transfers that ended. From `told` on they are in the order of starts if `sorted` is set.
    ended: Vec<Ended>,
    told: usize,
    sorted: bool,
    scratch: Scratch,
    patience: usize,
    #[cfg(debug_assertions)]
    audit: Vec<u32>,
}

impl Default for Network {
    fn default() -> Self {
        Self {
            now_ns: 0,
            bands: Bands::default(),
            slab: Slab::new(),
            events: Events::default(),
            started: 0,
            ended: Vec::new(),
            told: 0,
            sorted: true,
            scratch: Scratch::default(),
            patience: PATIENCE,
            #[cfg(debug_assertions)]
            audit: Vec::new(),
        }
    }
}

/// What a transfer carries, and how it shares ports.
#[derive(Clone, Copy, Debug)]
pub struct NewTransfer {
    pub bytes: u64,
    /// The class with the smallest number is served first.
    pub class: u8,
    /// Transfers of a class share in proportion to it.
    pub weight: f64,
    /// Returned at the end of the transfer.
    pub tag: u32,
}

impl Network {
    /// Adds a port with a capacity of `bytes_per_second`.
    ///
    /// # Panics
    /// Panics if the capacity is negative or not finite.
    pub fn add_port(&mut self, bytes_per_second: f64) -> PortId {
        assert!(
            bytes_per_second.is_finite() && bytes_per_second >= 0.0,
            "a port cannot carry {bytes_per_second} B/s"
        );
        PortId(self.bands.add_port(bytes_per_second))
    }

    /// Guarantees a share of each port to `class` and to all classes with larger numbers, as an
    /// arbiter by weights does. While these classes have transfers on a port, the others get at
    /// most the rest of the port. These classes may use more than the share if the others leave it.
    /// A part of the share that they do not use stays idle.
    ///
    /// # Panics
    /// Panics if a transfer was started already, or the share is not between 0 and 1.
    pub fn guarantee(&mut self, class: u8, share: f64) {
        assert!((0.0..1.0).contains(&share), "a share cannot be {share}");
        assert_eq!(self.started, 0, "shares are guaranteed before transfers start");
        self.bands.set_floor(class, share);
    }

    /// Starts a transfer over the ports of `path`, 1 to [`PATH_MAX`] different ones in any order. A
    /// transfer of zero bytes ends at once.
    ///
    /// # Panics
    /// Panics if the path is empty or too long, the class is not below [`CLASSES_MAX`], or the
    /// weight is not a positive finite number.
    pub fn start(
        &mut self,
        now: Time,
        path: &[PortId],
        NewTransfer { bytes, class, weight, tag }: NewTransfer,
    ) -> TransferId {
        assert!(
            (1..=PATH_MAX).contains(&path.len()),
            "a path has 1 to {PATH_MAX} ports, not {}",
            path.len()
        );
        assert!(class < CLASSES_MAX, "class {class} is too high");
        assert!(weight > 0.0 && weight.is_finite(), "a weight cannot be {weight}");
        self.advance(now);
        let order = self.started;
        self.started += 1;
        let transfer = Transfer {
            bands: [NONE; PATH_MAX],
            places: [NONE; PATH_MAX],
            bytes,
            order,
            generation: 0,
            tag,
            hops: path.len() as u8,
            class,
            stage: Stage::Fresh,
        };
        let index = self.slab.insert(transfer);
        let id = self.slab.id(index);
        if bytes == 0 {
            self.slab[index].stage = Stage::Ended;
            self.note_ended(order, id);
            return id;
        }
        self.bands.cover(class);
        self.attach(index, path, weight);
        id
    }

    /// Returns the time of the next end if nothing else happens, or `now` if an ended transfer was
    /// not popped yet. It computes the rates that have changed. Call it once per timestamp, after
    /// all starts.
    pub fn next_end(&mut self, now: Time) -> Option<Time> {
        self.advance(now);
        self.refresh();
        if self.told < self.ended.len() {
            return Some(Time(self.now_ns));
        }
        self.events.first().map(|(at_ns, _)| Time(at_ns))
    }

    /// Removes and returns one transfer that ended by `now`, with its tag. Transfers that end at
    /// the same time are returned in the order of their starts.
    pub fn pop_ended(&mut self, now: Time) -> Option<(TransferId, u32)> {
        self.advance(now);
        self.collect();
        if !self.sorted {
            self.ended[self.told..].sort_unstable_by_key(|ended| ended.order);
            self.sorted = true;
        }
        if let Some(&Ended { id, .. }) = self.ended.get(self.told) {
            self.told += 1;
            let index = self.slab.find(id).expect("it ends once");
            let tag = self.slab[index].tag;
            self.slab.remove(index);
            return Some((id, tag));
        }
        self.ended.clear();
        self.told = 0;
        None
    }
}

/// Queries. Rates are those of the last [`Network::next_end`].
impl Network {
    pub fn capacity(&self, port: PortId) -> f64 {
        self.bands.ports[port.0 as usize].capacity
    }

    pub fn active(&self, port: PortId) -> usize {
        self.bands.ports[port.0 as usize].count as usize
    }

    /// Returns the bytes that have passed a port by `now`. `now` must lie between the time of the
    /// last call and the result of [`Network::next_end`]. Visits all transfers of the port.
    pub fn carried(&self, port: PortId, now: Time) -> f64 {
        (0..self.bands.classes()).map(|class| self.carried_in_class(port, class, now)).sum()
    }

    fn carried_in_class(&self, port: PortId, class: u8, now: Time) -> f64 {
        let now_ns = self.not_before(now);
        let carried = |entry: &BandEntry| {
            let index = entry.transfer();
            self.slab[index].bytes as f64 - self.bytes_left(index, now_ns)
        };
        let under_way: f64 = self.entries(port.0, class).map(carried).sum();
        self.bands.done(port.0, class) as f64 + under_way
    }

    fn entries(&self, port: u32, class: u8) -> impl Iterator<Item = &BandEntry> {
        let band = self.bands.find(port, class);
        band.into_iter().flat_map(|band| self.bands.bands[band as usize].iter())
    }

    fn not_before(&self, now: Time) -> u64 {
        debug_assert!(now.0 >= self.now_ns, "time goes forward");
        debug_assert!(
            self.bands.is_clean() || now.0 == self.now_ns,
            "rates are not known: next_end() has not been called"
        );
        now.0.max(self.now_ns)
    }
}

impl Network {
    fn advance(&mut self, now: Time) {
        debug_assert!(now.0 >= self.now_ns, "time goes forward");
        if now.0 > self.now_ns {
            self.refresh();
            debug_assert!(
                self.events.first().is_none_or(|(at_ns, _)| at_ns >= now.0),
                "what ends earlier is popped earlier"
            );
            self.now_ns = now.0;
        }
    }

    fn refresh(&mut self) {
        self.collect();
        if !self.bands.is_clean() {
            Sharing {
                now_ns: self.now_ns,
                bands: &mut self.bands,
                slab: &mut self.slab,
                scratch: &mut self.scratch,
                patience: self.patience,
                #[cfg(debug_assertions)]
                audit: &mut self.audit,
            }
            .run();
        }
        while let Some(number) = self.bands.touched.pop() {
            let band = &mut self.bands.bands[number as usize];
            band.state.clear(BandState::TOUCHED);
            let level = self.bands.levels[number as usize].level;
            self.events.set(number, band.next_end_ns(level));
            if band.is_empty() {
                self.bands.release(number);
            }
        }
        #[cfg(debug_assertions)]
        self.audit_computed();
    }

    fn collect(&mut self) {
        while let Some((at_ns, number)) = self.events.first()
            && at_ns <= self.now_ns
        {
            self.events.set(number, None);
            loop {
                let band = &self.bands.bands[number as usize];
                let level = self.bands.levels[number as usize].level;
                let next_ns = band.next_end_ns(level);
                if next_ns.is_none_or(|at_ns| at_ns > self.now_ns) {
                    break;
                }
                let index = band.get(0).transfer();
                self.detach(index, self.slab[index].bytes);
                self.slab[index].stage = Stage::Ended;
                self.note_ended(self.slab[index].order, self.slab.id(index));
            }
            if self.bands.bands[number as usize].bound() > 0 {
                self.bands.touch(number);
            }
        }
    }

    fn note_ended(&mut self, order: u64, id: TransferId) {
        self.sorted &= self.ended[self.told..].last().is_none_or(|last| last.order < order);
        self.ended.push(Ended { order, id });
    }

    fn attach(&mut self, index: u32, path: &[PortId], weight: f64) {
        let class = self.slab[index].class;
        let mut bands = [NONE; PATH_MAX];
        let mut alone = true;
        for (hop, port) in path.iter().enumerate() {
            alone &= self.bands.count_in(port.0, class);
            let band = self.bands.enter(port.0, class);
            debug_assert!(!bands.contains(&band), "a path crosses a port once");
            bands[hop] = band;
        }
        let mut places = [NONE; PATH_MAX];
        for hop in 0..path.len() {
            places[hop] = self.bands.bands[bands[hop] as usize].push(BandEntry {
                target: 0.0,
                weight,
                whose: index * PATH_MAX as u32 + hop as u32,
                other: match path.len() {
                    1 => NONE,
                    2 => bands[1 - hop],
                    _ => MANY,
                },
            });
        }
        self.slab[index].bands = bands;
        self.slab[index].places = places;
        if alone {
            self.bind_alone(index, weight);
            return;
        }
        for (&band, port) in bands.iter().zip(path) {
            let here = &mut self.bands.bands[band as usize];
            here.state.set(BandState::FRESH);
            let first = here.len() == 1;
            self.bands.mark(band);
            // The band above did not track what it leaves while no lower class existed.
            if first
                && let Some(above) = self.bands.above(port.0, class)
                && self.bands.levels[above as usize].is_quiet()
            {
                self.bands.mark(above);
            }
            if first {
                self.bands.mark_guaranteed(port.0);
            }
        }
    }

    /// Sets the rate of a transfer that is alone on all of its ports to that of the slowest port.
    /// No computation is necessary.
    fn bind_alone(&mut self, index: u32, weight: f64) {
        let (mut slowest, mut rate) = (0, f64::INFINITY);
        let transfer = &self.slab[index];
        let bytes = transfer.bytes;
        for (hop, number) in transfer.path() {
            let band = &mut self.bands.bands[number as usize];
            band.room = self.bands.ports[band.port as usize].capacity;
            self.bands.levels[number as usize] =
                Level { level: f64::INFINITY, care: Care::Above(band.room / weight) };
            if band.room < rate {
                (slowest, rate) = (hop, band.room);
            }
        }
        let number = transfer.bands[slowest];
        let band = &mut self.bands.bands[number as usize];
        let level = rate / weight;
        self.bands.levels[number as usize] = Level::of(level);
        band.settle(0.0, self.now_ns);
        band.promote(0, bytes as f64 / weight, &mut self.slab);
        self.events.set(number, band.next_end_ns(level));
        self.slab[index].stage = Stage::Bound(slowest as u8);
    }

    fn detach(&mut self, index: u32, carried: u64) {
        let transfer = &self.slab[index];
        let (path, places) = (transfer.path(), transfer.places);
        let (bottleneck, level) = match transfer.stage {
            Stage::Bound(hop) => {
                let bottleneck = transfer.bands[usize::from(hop)];
                let level = self.bands.levels[bottleneck as usize].level;
                (bottleneck, Some(level))
            }
            _ => (NONE, None),
        };
        for (hop, number) in path {
            let band = &mut self.bands.bands[number as usize];
            let weight = band.get(places[hop] as usize).weight;
            band.remove(places[hop], &mut self.slab);
            let (port, class) = (band.port, band.class);
            self.bands.count_out(number, carried);
            let band = &mut self.bands.bands[number as usize];
            if band.is_empty() {
                band.state.clear(BandState::FRESH);
                self.events.set(number, None);
                self.bands.levels[number as usize] = Level::OPEN;
                self.bands.release(number);
                if let Some(below) = self.bands.below(port, class) {
                    self.bands.mark(below);
                }
                self.bands.mark_guaranteed(port);
                continue;
            }
            // For the other bands this equals a drop of the transfer's rate to zero.
            let there = &mut self.bands.levels[number as usize];
            if level.is_none_or(|level| there.hear(0.0, -weight * level)) {
                self.bands.mark(number);
            }
            if number == bottleneck {
                self.bands.touch(number);
            }
        }
    }

    fn rate_of(&self, index: u32) -> f64 {
        let transfer = &self.slab[index];
        let Stage::Bound(hop) = transfer.stage else { return 0.0 };
        let number = transfer.bands[usize::from(hop)] as usize;
        let band = &self.bands.bands[number];
        let entry = band.get(transfer.places[usize::from(hop)] as usize);
        self.bands.levels[number].level * entry.weight
    }

    fn bytes_left(&self, index: u32, now_ns: u64) -> f64 {
        let transfer = &self.slab[index];
        let hop = match transfer.stage {
            Stage::Bound(hop) => usize::from(hop),
            Stage::Fresh => return transfer.bytes as f64,
            Stage::Ended | Stage::Free => return 0.0,
        };
        let number = transfer.bands[hop] as usize;
        let band = &self.bands.bands[number];
        let entry = band.get(transfer.places[hop] as usize);
        let norm = entry.target - band.clock(self.bands.levels[number].level, now_ns);
        (norm * entry.weight).clamp(0.0, transfer.bytes as f64)
    }
}
