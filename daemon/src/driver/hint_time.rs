//! How much of the scheduler's time each user's hints may take.
//!
//! A hint of 64 bytes can be about very many flows: a request with thousands that wait, or a batch
//! with thousands behind it. So records alone don't bound what a user costs others. While several
//! trust domains are attached, the processor time of each hint is measured, and of each flow that
//! names a batch and a deadline. A domain that took more than [`FREE`] at a time and, in the long
//! run, more than its part of one [`SHARE`]th of the time is not heard for a while: its hints are
//! ignored, and the batches, requests and deadlines of its new flows, too. Hints are advice, so
//! nothing of its traffic is lost. Hints that end something are taken in any case.

use laxity_policy::domains::DOMAINS_MAX;
use laxity_policy::{DomainId, Span, Time};
use tracing::warn;

use crate::owner::Owner;

/// Processor time that a domain's hints may take at a time.
const FREE: Span = Span::from_millis(5);
/// In the long run, hints of two domains may each take one part in this many of the time. More
/// domains share as much.
const SHARE: u64 = 4;
/// Processor time of a flow's arrival that is not charged. Usual ones take less.
pub const ARRIVAL_FREE: Span = Span::from_micros(5);

const WARN_EVERY: Span = Span::from_millis(1000);

#[derive(Debug)]
pub struct HintTime {
    processor_time: fn() -> Time,
    /// The number of domains. If there is only one, nothing is measured.
    domains: u64,
    /// When each domain has waited for all that its hints took. It is heard [`FREE`] times
    /// [`SHARE`] earlier.
    paid: [Time; DOMAINS_MAX],
    /// When the last warning was logged.
    warned: Time,
}

impl HintTime {
    pub const fn new(processor_time: fn() -> Time) -> Self {
        Self { processor_time, domains: 1, paid: [Time::ZERO; DOMAINS_MAX], warned: Time::ZERO }
    }

    /// Sets the number of domains that have clients.
    pub fn set_domains(&mut self, domains: usize) {
        self.domains = domains as u64;
    }

    fn share(&self) -> u64 {
        SHARE * self.domains / 2
    }

    /// Reports whether hints of a domain are heard now.
    #[inline]
    pub fn hears(&self, now: Time, domain: DomainId) -> bool {
        self.domains < 2 || self.paid[usize::from(domain.0)].since(now) <= FREE.times(self.share())
    }

    /// Returns the processor time before a hint is taken, for [`HintTime::end`]. With one domain
    /// the clock is not read.
    #[inline]
    pub fn begin(&self) -> Time {
        if self.domains < 2 { Time::ZERO } else { (self.processor_time)() }
    }

    /// Charges a domain for the time since `began` beyond `free`. Returns whether it was heard
    /// before and is not any more.
    #[inline]
    pub fn end(&mut self, now: Time, domain: DomainId, began: Time, free: Span) -> bool {
        if self.domains < 2 {
            return false;
        }
        let took = (self.processor_time)().since(began + free);
        let (heard, share) = (self.hears(now, domain), self.share());
        let paid = &mut self.paid[usize::from(domain.0)];
        *paid = (*paid).max(now) + took.times(share);
        heard && !self.hears(now, domain)
    }

    /// Warns that hints of a user are ignored, once in [`WARN_EVERY`] at most.
    #[cold]
    pub fn warn(&mut self, now: Time, owner: &Owner) {
        if now.since(self.warned) >= WARN_EVERY {
            self.warned = now;
            warn!(uid = owner.uid, "hints of a user are ignored for a while: they take too long");
        }
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
        // Each hint takes 3 ms.
        let end = |time: &mut HintTime| time.end(now, busy, Time::ZERO, Span::ZERO);
        assert!(!end(&mut time) && !end(&mut time) && time.hears(now, busy), "nothing is measured");
        time.set_domains(2);
        assert!(
            !time.end(now, busy, Time::ZERO, Span::from_millis(3)),
            "nothing is left to charge"
        );
        assert!(!end(&mut time));
        assert!(end(&mut time), "the second takes it beyond");
        assert!(!time.hears(now, busy) && time.hears(now, other));
        // 6 ms of which 5 are free: the rest is 1 ms times four.
        let heard = now + Span::from_millis(4);
        assert!(!time.hears(Time(heard.0 - 1), busy) && time.hears(heard, busy));
        assert!(!end(&mut time), "said before");
        time.forget(busy);
        assert!(time.hears(now, busy));
    }
}
