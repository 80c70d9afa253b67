//! The order of scans: hot clients in every round, cold clients in turns.

use laxity_policy::domains::DOMAINS_MAX;
use laxity_policy::{DomainId, Span, Time};

/// Number of lanes over all clients above which doorbells cost less than scans. A scan of a lane
/// costs a few nanoseconds.
const DOORBELL_ABOVE: usize = 256;

/// Records of one trust domain that are read in one round while clients of others are attached.
/// Reading them takes about a tenth of a millisecond, for which the others wait. What a record made
/// a link visit counts like as many records, because it takes as long.
const DOMAIN_RECORDS: usize = 512;
/// The work after which a scan ends. One record may exceed it.
pub(super) const WORK_MAX: u64 = DOMAIN_RECORDS as u64;
/// How much time a domain has to let pass for each flow, group or batch that its records made a
/// link visit, while others are attached. A visit takes about a quarter of this.
const REST_PER_VISIT: Span = Span(1000);
/// The rest up to which a domain may go on. So a hint about 20,000 flows interrupts no program that
/// sends few of them.
const REST_FREE: Span = Span::from_millis(20);

/// The records that were read of each domain in a round, and the rest that domains owe for work.
/// One domain could otherwise fill rounds with the records of many clients, or with a few records
/// that each make a link visit very many flows.
#[derive(Debug)]
pub(super) struct DomainRecords {
    /// Whether the records count, because there are several domains.
    counts: bool,
    read: [usize; DOMAINS_MAX],
    /// When each domain has rested for all its work. It may go on [`REST_FREE`] earlier.
    rested: [Time; DOMAINS_MAX],
    now: Time,
}

impl DomainRecords {
    pub(super) const fn new() -> Self {
        Self {
            counts: false,
            read: [0; DOMAINS_MAX],
            rested: [Time::ZERO; DOMAINS_MAX],
            now: Time::ZERO,
        }
    }

    /// Begins a round of reading. Only with several domains are records counted.
    pub(super) const fn begin(&mut self, now: Time, counts: bool) {
        self.now = now;
        if counts {
            self.read = [0; DOMAINS_MAX];
        } else if self.counts {
            self.rested = [Time::ZERO; DOMAINS_MAX];
        }
        self.counts = counts;
    }

    /// Reports whether the domain has not had its part of the round yet.
    pub(super) fn may_read(&self, domain: DomainId) -> bool {
        !self.counts || self.read[usize::from(domain.0)] < DOMAIN_RECORDS
    }

    /// Reports whether the domain has to let others have the time that its records took.
    pub(super) fn rests(&self, domain: DomainId) -> bool {
        self.counts && self.rested[usize::from(domain.0)].since(self.now) > REST_FREE
    }

    /// Returns when the first of the domains that rest now may go on.
    pub(super) fn next_rested(&self) -> Time {
        let rested = self.rested.iter().filter(|rested| rested.since(self.now) > REST_FREE);
        rested.min().map_or(Time::NEVER, |rested| Time(rested.0 - REST_FREE.0))
    }

    /// Adds what was read of a domain, and the work that this caused. Returns their sum.
    pub(super) fn add(&mut self, domain: DomainId, records: usize, work: u64) -> usize {
        let at = usize::from(domain.0);
        if self.counts && work > 0 {
            self.rested[at] = self.rested[at].max(self.now) + REST_PER_VISIT.times(work);
        }
        let sum = records.saturating_add(work as usize);
        self.read[at] = self.read[at].saturating_add(sum);
        sum
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
            records.begin(Time::ZERO, counts);
            records.add(DomainId(1), DOMAIN_RECORDS, 0);
            assert_eq!(records.may_read(DomainId(1)), may_read);
            assert!(records.may_read(DomainId(0)));
        }
        records.begin(Time::ZERO, true);
        assert!(records.may_read(DomainId(1)));
    }

    #[test]
    fn a_domain_rests_for_what_its_records_made_links_visit_and_alone_it_never_does() {
        let (mut records, busy, other) = (DomainRecords::new(), DomainId(1), DomainId(0));
        records.begin(Time::ZERO, true);
        // What a program may send now and then.
        records.add(busy, 1, REST_FREE.0 / REST_PER_VISIT.0);
        assert!(!records.rests(busy) && !records.may_read(busy), "the rest of the round only");
        records.add(busy, 1, 1000);
        assert!(records.rests(busy) && !records.rests(other));
        let rested = REST_PER_VISIT.times(1000);
        assert_eq!(records.next_rested(), Time::ZERO + rested);
        records.begin(Time(rested.0 - 1), true);
        assert!(records.rests(busy));
        records.begin(Time(rested.0), true);
        assert!(!records.rests(busy) && records.may_read(busy));
        assert_eq!(records.next_rested(), Time::NEVER);
        records.add(busy, 1, 1000);
        records.begin(Time(rested.0), false);
        assert!(!records.rests(busy));
    }

    #[test]
    fn doorbells_are_switched_on_above_a_count_of_lanes_and_off_at_half_of_it() {
        let mut order = ScanOrder::default();
        let counts = [DOORBELL_ABOVE, DOORBELL_ABOVE + 1, DOORBELL_ABOVE / 2 + 1, 0];
        let seen = counts.map(|lanes| (order.count_lanes(lanes), order.doorbells()));
        assert_eq!(seen, [(false, false), (true, true), (false, true), (true, false)]);
    }
}
