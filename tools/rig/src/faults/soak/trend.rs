//! Decides whether a series of samples grows, which shows a leak.
//!
//! The first fifth of the samples is the time in which processes warm up, and does not count. The
//! rest is cut into thirds. A series grows if the median rises from each third to the next, and by
//! more than its bound from the first to the last. Medians ignore a process that just starts or
//! ends. A leak of any rate exceeds the bound if the soak is long enough.

use serde::{Deserialize, Serialize};

pub(super) const SAMPLES_MIN: usize = 15;

/// The medians of a series over the thirds of a soak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Growth {
    /// What was measured, with its unit.
    pub what: String,
    pub first: u64,
    pub middle: u64,
    pub last: u64,
    pub max: u64,
    /// Growth from the first to the last third that is no leak.
    pub bound: u64,
}

impl Growth {
    /// Returns the medians of `samples`, or `None` if there are too few.
    pub(super) fn of(what: &str, samples: &[u64], bound: u64) -> Option<Self> {
        if samples.len() < SAMPLES_MIN {
            return None;
        }
        let warm = &samples[samples.len() / 5..];
        let third = warm.len() / 3;
        let median = |part: &[u64]| {
            let mut sorted = part.to_vec();
            sorted.sort_unstable();
            sorted[sorted.len() / 2]
        };
        Some(Self {
            what: what.to_owned(),
            first: median(&warm[..third]),
            middle: median(&warm[third..2 * third]),
            last: median(&warm[2 * third..]),
            max: samples.iter().copied().max().unwrap_or_default(),
            bound,
        })
    }

    pub(super) fn wrong(&self) -> Option<String> {
        let rises = self.first < self.middle && self.middle < self.last;
        (rises && self.last - self.first > self.bound).then(|| {
            format!(
                "growth of {}: {}, then {}, then {} in the thirds of the soak, by more than {}",
                self.what, self.first, self.middle, self.last, self.bound
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grows(sample: impl Fn(u64) -> u64) -> bool {
        let samples: Vec<u64> = (0..100).map(sample).collect();
        Growth::of("memory", &samples, 10).unwrap().wrong().is_some()
    }

    #[test]
    fn only_a_series_that_keeps_rising_beyond_the_bound_grows() {
        assert!(grows(|at| 1000 + at));
        assert!(!grows(|at| 1000 + at / 8), "within the bound");
        assert!(!grows(|at| at.min(19) * 100), "it warms up");
        assert!(!grows(|at| if at < 50 { 1000 } else { 1100 }), "one step");
        assert!(!grows(|at| 2000 - at), "it shrinks");
        assert!(!grows(|at| 1000 + at % 7 * 50), "it goes up and down");
        assert!(grows(|at| 1000 + at + at % 7 * 5), "it does so and rises");
        assert_eq!(Growth::of("memory", &[1, 2, 3], 0), None);
    }
}
