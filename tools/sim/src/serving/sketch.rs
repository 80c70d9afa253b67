//! A histogram for samples that are too large to keep, with 128 buckets for each factor of two.
//!
//! The bucket is taken from the float's bits, so that the result is identical on every machine.

use crate::outcome::Distribution;

const SHIFT: u32 = 52 - 7;

/// A histogram of non-negative values with 128 buckets for each factor of two.
#[derive(Clone, Debug, Default)]
pub(super) struct Sketch {
    counts: Vec<u64>,
    first: u64,
    count: u64,
    sum: f64,
    least: f64,
    most: f64,
}

impl Sketch {
    pub(super) fn add(&mut self, value: f64) {
        let bucket = value.max(1e-12).to_bits() >> SHIFT;
        if self.count == 0 {
            (self.first, self.least, self.most) = (bucket, value, value);
        }
        self.count += 1;
        self.sum += value;
        self.least = self.least.min(value);
        self.most = self.most.max(value);
        if bucket < self.first {
            let more = (self.first - bucket) as usize;
            self.counts.splice(0..0, core::iter::repeat_n(0, more));
            self.first = bucket;
        }
        let at = (bucket - self.first) as usize;
        if at >= self.counts.len() {
            self.counts.resize(at + 1, 0);
        }
        self.counts[at] += 1;
    }

    pub(super) fn distribution(&self) -> Distribution {
        if self.count == 0 {
            return Distribution::default();
        }
        let mut percentiles = Vec::with_capacity(101);
        let (mut below, mut at) = (0, 0);
        for p in 0..=100_u64 {
            let rank = ((self.count - 1) * p + 50) / 100;
            while below + self.counts[at] <= rank {
                below += self.counts[at];
                at += 1;
            }
            let low = f64::from_bits((self.first + at as u64) << SHIFT);
            let high = f64::from_bits((self.first + at as u64 + 1) << SHIFT);
            percentiles.push(((low + high) / 2.0).clamp(self.least, self.most));
        }
        Distribution { count: self.count, mean: self.sum / self.count as f64, percentiles }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_agrees_with_the_sample_to_one_per_cent(
            sample in proptest::collection::vec(1e-6_f64..1e6, 1..400),
        ) {
            let mut sketch = Sketch::default();
            for &value in &sample {
                sketch.add(value);
            }
            let (short, full) = (sketch.distribution(), Distribution::of(sample));
            prop_assert_eq!(short.count, full.count);
            prop_assert!((short.mean / full.mean - 1.0).abs() < 1e-9);
            for (a, b) in short.percentiles.iter().zip(&full.percentiles) {
                prop_assert!((a / b - 1.0).abs() < 0.01, "{} {}", a, b);
            }
        }
    }
}
