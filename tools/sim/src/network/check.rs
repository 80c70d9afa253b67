//! Checks of the network from scratch: consistent lists and correct rates. They are slow, so that
//! only tests run all of them. Debug builds check the ports that were just computed. A check panics
//! at an inconsistency, which is a bug of this module rather than of the caller.

#[cfg(test)]
use laxity_policy::Time;

use super::Network;
use super::band::BandState;
use super::share::DUST;
use super::transfer::Stage;
#[cfg(test)]
use super::transfer::TransferId;

const ROUNDING: f64 = 1e-9;

impl Network {
    /// Checks lists, capacities, remaining bytes and rates from scratch. Rates must be weighted
    /// max-min under strict priority. They are, exactly if each transfer has a port that its class
    /// and higher ones use up and where no transfer of its class gets more per weight. Call this
    /// after [`Network::next_end`].
    ///
    /// # Panics
    /// Panics at the first inconsistency.
    pub fn check(&self) {
        for port in 0..self.bands.ports.len() as u32 {
            self.check_lists(port);
            self.check_capacity(port);
        }
        for (index, transfer) in self.slab.iter() {
            let Stage::Bound(bottleneck) = transfer.stage else { continue };
            self.check_remainder(index);
            let level = self.level_of(index, usize::from(bottleneck));
            let bounded = transfer.path().any(|(_, band)| {
                let port = self.bands.bands[band as usize].port;
                self.is_used_up(port, transfer.class)
                    && self.top_of(band) <= level * (1.0 + ROUNDING)
            });
            let (order, rate) = (transfer.order, self.rate_of(index));
            assert!(bounded, "transfer {order} gets {rate} B/s and has no bottleneck");
        }
    }

    #[cfg(debug_assertions)]
    pub(super) fn audit_computed(&mut self) {
        self.audit.sort_unstable();
        self.audit.dedup();
        while let Some(port) = self.audit.pop() {
            self.check_capacity(port);
            for class in 0..self.bands.classes() {
                for entry in self.entries(port, class) {
                    self.check_remainder(entry.transfer());
                }
            }
            self.check_use(port);
        }
    }

    /// Checks that a band with a finite level and the bands above it use the port up.
    #[cfg(debug_assertions)]
    fn check_use(&self, port: u32) {
        for class in 0..self.bands.classes() {
            let band = self.bands.find(port, class);
            let bounds =
                band.is_some_and(|band| self.bands.levels[band as usize].level.is_finite());
            assert!(
                !bounds || self.is_used_up(port, class),
                "port {port} has room, and a level at {} ns",
                self.now_ns
            );
        }
    }

    fn check_lists(&self, port: u32) {
        let mut count = 0;
        for class in 0..self.bands.classes() {
            let Some(number) = self.bands.find(port, class) else { continue };
            let band = &self.bands.bands[number as usize];
            count += band.len();
            assert!(!band.is_empty(), "port {port}: an empty band is kept");
            assert_eq!((band.port, band.class), (port, class), "a band is on the wrong port");
            assert_eq!(band.state, BandState::default(), "something is left to be computed");
            for (place, entry) in band.iter().enumerate() {
                let transfer = &self.slab[entry.transfer()];
                let hop = entry.hop();
                assert_eq!(
                    (transfer.places[hop], transfer.bands[hop], transfer.class),
                    (place as u32, number, class),
                    "port {port}: a transfer and its entry do not agree"
                );
                let here = transfer.stage == Stage::Bound(hop as u8);
                assert_eq!(
                    here,
                    place < band.bound(),
                    "port {port}: a transfer is on the wrong side"
                );
            }
        }
        let counted = self.bands.ports[port as usize].count as usize;
        assert_eq!(count, counted, "port {port}: the count of transfers is wrong");
    }

    fn check_capacity(&self, port: u32) {
        let capacity = self.bands.ports[port as usize].capacity;
        let rate = capacity - self.left_by(port, self.bands.classes());
        assert!(
            rate <= capacity * (1.0 + ROUNDING),
            "port {port} carries {rate} of {capacity} B/s at {} ns",
            self.now_ns
        );
    }

    fn check_remainder(&self, index: u32) {
        let transfer = &self.slab[index];
        let Stage::Bound(hop) = transfer.stage else { return };
        let number = transfer.bands[usize::from(hop)] as usize;
        let band = &self.bands.bands[number];
        let entry = band.get(transfer.places[usize::from(hop)] as usize);
        let level = self.bands.levels[number].level;
        let bytes = (entry.target - band.clock(level, self.now_ns)) * entry.weight;
        // A transfer may be late by less than a nanosecond before it ends.
        let slip = level.min(self.bands.ports[band.port as usize].capacity) * entry.weight * 1e-9;
        let most = transfer.bytes as f64 * (1.0 + ROUNDING) + 1e-3;
        assert!(
            (-slip - 1e-3..=most).contains(&bytes),
            "transfer {} has {bytes} bytes left at {} ns",
            transfer.order,
            self.now_ns
        );
    }

    /// Returns the rate that classes up to `class` leave unused at a port, in bytes per second.
    fn left_by(&self, port: u32, class: u8) -> f64 {
        let used: f64 = (0..=class)
            .flat_map(|class| self.entries(port, class))
            .map(|entry| self.rate_of(entry.transfer()))
            .sum();
        self.bands.ports[port as usize].capacity - used
    }

    fn is_used_up(&self, port: u32, class: u8) -> bool {
        let capacity = self.bands.ports[port as usize].capacity;
        self.left_by(port, class) <= capacity * 2.0 * DUST + self.bands.kept(port, class)
    }

    fn top_of(&self, band: u32) -> f64 {
        self.bands.bands[band as usize]
            .iter()
            .map(|entry| self.rate_of(entry.transfer()) / entry.weight)
            .fold(0.0, f64::max)
    }

    fn level_of(&self, index: u32, hop: usize) -> f64 {
        let transfer = &self.slab[index];
        let band = &self.bands.bands[transfer.bands[hop] as usize];
        self.rate_of(index) / band.get(transfer.places[hop] as usize).weight
    }
}

/// Queries that only tests need.
#[cfg(test)]
impl Network {
    /// Returns the rate of a transfer in bytes per second, or 0 if it has ended.
    pub(super) fn rate(&self, id: TransferId) -> f64 {
        self.slab.find(id).map_or(0.0, |index| self.rate_of(index))
    }

    pub(super) fn remaining(&self, id: TransferId, now: Time) -> f64 {
        let now_ns = self.not_before(now);
        self.slab.find(id).map_or(0.0, |index| self.bytes_left(index, now_ns))
    }
}
