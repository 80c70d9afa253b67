//! The rate at which a stream is read, and at which a host begins streams: a token bucket without a
//! clock. Flow control makes a faster sender wait, and the streams of others are not affected.

use laxity_policy::{Span, Time};

/// The size of a burst, as the time that its events take at the sustained rate.
const BURST: Span = Span::from_millis(500);

/// A token bucket, stored as the instant at which it is full again.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    full_at: Time,
}

impl Pace {
    /// Counts `events`. Returns the pause that keeps the sustained rate of reads at `per_second`.
    pub(crate) fn took(&mut self, now: Time, events: usize, per_second: u32) -> Span {
        let cost = Span::transfer(events as u64, u64::from(per_second.max(1)));
        self.full_at = self.full_at.max(now) + cost;
        Span(self.full_at.since(now).0.saturating_sub(BURST.0))
    }

    /// Reports whether one more event keeps the rate. An event that does not is not counted.
    pub(crate) fn admits(&mut self, now: Time, per_second: u32) -> bool {
        let mut after = *self;
        let fits = after.took(now, 1, per_second) == Span::ZERO;
        if fits {
            *self = after;
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_free_and_what_follows_has_the_rate() {
        let mut pace = Pace::default();
        let now = Time(1_000_000_000);
        assert_eq!(pace.took(now, 500, 1000), Span::ZERO);
        assert_eq!(pace.took(now, 100, 1000), Span::from_millis(100));
        let later = now + Span::from_millis(600);
        assert_eq!(pace.took(later, 500, 1000), Span::ZERO);
        let mut pace = Pace::default();
        let admitted = (0..100).filter(|_| pace.admits(now, 20)).count();
        assert_eq!(admitted, 10);
        assert!(pace.admits(now + Span::from_millis(50), 20));
    }
}
