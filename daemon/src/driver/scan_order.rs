//! The order of scans: hot clients in every round, cold clients in turns.

use laxity_policy::DomainId;
use laxity_policy::domains::DOMAINS_MAX;

/// Number of lanes over all clients above which doorbells cost less than scans. A scan of a lane
/// costs a few nanoseconds.
const DOORBELL_ABOVE: usize = 256;

/// Records of one trust domain that are read in one round while clients of others are attached.
/// Reading them takes about a tenth of a millisecond, for which the others wait.
const DOMAIN_RECORDS: usize = 512;

/// The records that were read of each domain in a round. One domain could otherwise fill rounds
/// with the records of many clients.
#[derive(Debug)]
pub(super) struct DomainRecords {
    /// Whether the records count, because there are several domains.
    counts: bool,
    read: [usize; DOMAINS_MAX],
}

impl DomainRecords {
    pub(super) const fn new() -> Self {
        Self { counts: false, read: [0; DOMAINS_MAX] }
    }

    /// Begins a round of reading. Only with several domains are records counted.
    pub(super) const fn begin(&mut self, counts: bool) {
        self.counts = counts;
        if counts {
            self.read = [0; DOMAINS_MAX];
        }
    }

    pub(super) fn may_read(&self, domain: DomainId) -> bool {
        !self.counts || self.read[usize::from(domain.0)] < DOMAIN_RECORDS
    }

    pub(super) fn add(&mut self, domain: DomainId, records: usize) {
        self.read[usize::from(domain.0)] += records;
    }
}

#[derive(Debug, Default)]
pub(super) struct ScanOrder {
    pub(super) hot: Vec<u32>,
    pub(super) cold: Vec<u32>,
    next_cold: usize,
    /// The index of the client whose claims are read next.
    pub(super) next_refresh: usize,
    /// Lanes of all clients, hot and cold, when last counted.
    lanes: usize,
    doorbells: bool,
}

impl ScanOrder {
    pub(super) fn add(&mut self, index: u32) {
        self.hot.push(index);
    }

    pub(super) fn remove(&mut self, index: u32) {
        self.hot.retain(|hot| *hot != index);
        self.cold.retain(|cold| *cold != index);
    }

    pub(super) const fn doorbells(&self) -> bool {
        self.doorbells
    }

    /// Returns an estimate of the lanes that a round scans. It includes lanes of cold clients.
    pub(super) fn looks(&self) -> usize {
        self.lanes.max(self.hot.len()).max(1)
    }

    pub(super) fn cool(&mut self, at: usize) {
        let index = self.hot.swap_remove(at);
        self.cold.push(index);
    }

    pub(super) fn warm(&mut self, index: u32) {
        if let Some(at) = self.cold.iter().position(|cold| *cold == index) {
            self.cold.swap_remove(at);
            self.hot.push(index);
            self.next_cold -= usize::from(at < self.next_cold);
        }
    }

    pub(super) fn take_cold(&mut self) -> Option<u32> {
        if self.next_cold >= self.cold.len() {
            self.next_cold = 0;
        }
        let index = self.cold.get(self.next_cold).copied();
        self.next_cold += 1;
        index
    }

    /// Stores the number of lanes. Returns whether doorbells have to be switched.
    pub(super) fn count_lanes(&mut self, lanes: usize) -> bool {
        self.lanes = lanes;
        // Doorbells end at half of the limit, so that they do not flap at the border.
        let above = DOORBELL_ABOVE / if self.doorbells { 2 } else { 1 };
        core::mem::replace(&mut self.doorbells, lanes > above) != (lanes > above)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cold_client_has_its_turn_until_it_is_warm_again() {
        let mut order = ScanOrder::default();
        assert_eq!(order.take_cold(), None);
        (0..4).for_each(|index| order.add(index));
        (0..3).for_each(|_| order.cool(0));
        let mut turns: Vec<_> = (0..3).filter_map(|_| order.take_cold()).collect();
        turns.sort_unstable();
        assert_eq!((turns.len(), order.hot.len()), (3, 1));
        order.warm(turns[0]);
        order.remove(turns[1]);
        assert_eq!((0..2).map(|_| order.take_cold()).collect::<Vec<_>>(), [Some(turns[2]); 2]);
        assert_eq!(order.looks(), 2);
    }

    #[test]
    fn a_domain_that_floods_is_passed_over_until_the_next_round_and_alone_it_never_is() {
        let mut records = DomainRecords::new();
        for (counts, may_read) in [(true, false), (false, true)] {
            records.begin(counts);
            records.add(DomainId(1), DOMAIN_RECORDS);
            assert_eq!(records.may_read(DomainId(1)), may_read);
            assert!(records.may_read(DomainId(0)));
        }
        records.begin(true);
        assert!(records.may_read(DomainId(1)));
    }

    #[test]
    fn doorbells_are_switched_on_above_a_count_of_lanes_and_off_at_half_of_it() {
        let mut order = ScanOrder::default();
        let counts = [DOORBELL_ABOVE, DOORBELL_ABOVE + 1, DOORBELL_ABOVE / 2 + 1, 0];
        let seen = counts.map(|lanes| (order.count_lanes(lanes), order.doorbells()));
        assert_eq!(seen, [(false, false), (true, true), (false, true), (true, false)]);
    }
}
