//! How much of the scheduler's time each user's hints may take.
//!
//! A hint of 64 bytes can be about very many flows: a request with thousands that wait, or a batch
//! with thousands behind it. So records alone don't bound what a user costs others. While several
//! trust domains are attached, the processor time of each hint is measured. A domain whose hints
//! took more than [`FREE`] at a time and more than one part in [`SHARE`] in the long run is not
//! heard for a while: its hints are ignored, and the batches and deadlines of its flows, too. Hints
//! are advice, so nothing of its traffic is lost. Its flows, completions and ends are read as
//! before.

use laxity_policy::domains::DOMAINS_MAX;
use laxity_policy::{DomainId, Span, Time};

/// Processor time that a domain's hints may take at a time.
const FREE: Span = Span::from_millis(5);
/// In the long run, hints of a domain may take one part in this many of the time.
const SHARE: u64 = 4;

#[derive(Debug)]
pub struct HintTime {
    processor_time: fn() -> Time,
    /// Whether there are several domains. Otherwise nothing is measured.
    pub is_measured: bool,
    /// When each domain has waited for all that its hints took. It is heard [`FREE`] times
    /// [`SHARE`] earlier.
    paid: [Time; DOMAINS_MAX],
}

impl HintTime {
    pub const fn new(processor_time: fn() -> Time) -> Self {
        Self { processor_time, is_measured: false, paid: [Time::ZERO; DOMAINS_MAX] }
    }

    /// Reports whether hints of a domain are heard now.
    #[inline]
    pub fn hears(&self, now: Time, domain: DomainId) -> bool {
        !self.is_measured || self.paid[usize::from(domain.0)].since(now) <= FREE.times(SHARE)
    }

    /// Begins a measurement.
    #[inline]
    pub fn begin(&self) -> Time {
        if self.is_measured { (self.processor_time)() } else { Time::ZERO }
    }

    /// Charges a domain for the time since `began`. Returns whether it is not heard from now on.
    #[inline]
    pub fn end(&mut self, now: Time, domain: DomainId, began: Time) -> bool {
        if !self.is_measured {
            return false;
        }
        let took = (self.processor_time)().since(began);
        let paid = &mut self.paid[usize::from(domain.0)];
        *paid = (*paid).max(now) + took.times(SHARE);
        !self.hears(now, domain)
    }

    /// Forgets what a domain owes, for another one with its number.
    pub fn forget(&mut self, domain: DomainId) {
        self.paid[usize::from(domain.0)] = Time::ZERO;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_is_not_heard_until_it_has_paid_and_others_are() {
        let mut time = HintTime::new(|| Time(3_000_000));
        let (busy, other, now) = (DomainId(1), DomainId(0), Time(1_000_000_000));
        assert!(!time.end(now, busy, Time::ZERO) && time.hears(now, busy), "nothing is measured");
        time.is_measured = true;
        // Each hint takes 3 ms.
        assert!(!time.end(now, busy, Time::ZERO));
        assert!(time.end(now, busy, Time::ZERO));
        assert!(!time.hears(now, busy) && time.hears(now, other));
        // 6 ms of which 5 are free: the rest is 1 ms times four.
        let heard = now + Span::from_millis(4);
        assert!(!time.hears(Time(heard.0 - 1), busy) && time.hears(heard, busy));
        time.end(now, busy, Time::ZERO);
        time.forget(busy);
        assert!(time.hears(now, busy));
    }
}
