//! Samples and their summaries.

use serde::Serialize;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample(Vec<f64>);

impl Sample {
    /// Makes a sample of the values. Values that are not finite are left out.
    pub fn new(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    pub fn mean(&self) -> f64 {
        if self.0.is_empty() { 0.0 } else { self.0.iter().sum::<f64>() / self.0.len() as f64 }
    }

    /// Returns the quantile of the nearest rank, or 0 of an empty sample.
    pub fn quantile(&self, share: f64) -> f64 {
        let rank = (share * self.0.len() as f64).ceil() as usize;
        self.0.get(rank.clamp(1, self.0.len().max(1)) - 1).copied().unwrap_or(0.0)
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn percentiles(&self) -> Vec<f64> {
        if self.0.is_empty() {
            return Vec::new();
        }
        (0..=100).map(|percent| self.quantile(f64::from(percent) / 100.0)).collect()
    }

    pub fn summary(&self) -> Summary {
        Summary {
            mean: self.mean(),
            p50: self.quantile(0.5),
            p90: self.quantile(0.9),
            p95: self.quantile(0.95),
            p99: self.quantile(0.99),
        }
    }
}

/// The printed numbers of a sample, in the unit of the field that holds this.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_of_the_sample() {
        let sample = Sample::new([4.0, 1.0, f64::NAN, 3.0, 2.0]);
        assert_eq!((sample.len(), sample.mean()), (4, 2.5));
        assert_eq!(
            [0.0, 0.25, 0.5, 0.99, 1.0].map(|q| sample.quantile(q)),
            [1.0, 1.0, 2.0, 4.0, 4.0]
        );
        assert_eq!(sample.percentiles().len(), 101);
    }

    #[test]
    fn nothing_has_zeroes_and_no_percentiles() {
        let sample = Sample::new([]);
        assert_eq!(sample.summary(), Summary::default());
        assert!(sample.percentiles().is_empty());
    }
}
