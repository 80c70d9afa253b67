//! From single measurements to a figure: percentiles within a repetition, medians between
//! repetitions, and the spread that says how far to trust them.

use serde::Serialize;

use crate::clock::Clock;

/// Collects the samples of one repetition without allocating while it measures.
pub(crate) struct Recorder {
    ticks: Vec<(u64, u64)>,
}

impl Recorder {
    /// Room for `samples`, touched so that no page fault falls into a measurement.
    pub(crate) fn with_room_for(samples: usize) -> Self {
        let mut ticks = vec![(1, 1); samples];
        ticks.clear();
        Self { ticks }
    }

    /// Notes one bracket.
    #[inline(always)]
    pub(crate) fn note(&mut self, begin: u64, end: u64) {
        self.ticks.push((begin, end));
    }

    /// Sorts and reduces, and is ready for the next repetition.
    pub(crate) fn finish(&mut self, clock: Clock) -> Percentiles {
        let mut ns: Vec<f64> = self
            .ticks
            .drain(..)
            .map(|(begin, end)| clock.between_ns(begin, end))
            .collect();
        Percentiles::of(&mut ns)
    }
}

/// What one repetition says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Percentiles {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) mean: f64,
    pub(crate) max: f64,
}

impl Percentiles {
    /// Sorts `values` and takes nearest ranks. All zero if there are none.
    pub(crate) fn of(values: &mut [f64]) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        values.sort_by(f64::total_cmp);
        let rank = |quantile: f64| {
            let index = (quantile * values.len() as f64).ceil() as usize;
            values[index.clamp(1, values.len()) - 1]
        };
        Self {
            p50: rank(0.5),
            p99: rank(0.99),
            p999: rank(0.999),
            mean: values.iter().sum::<f64>() / values.len() as f64,
            max: values[values.len() - 1],
        }
    }
}

/// Medians over the repetitions.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub(crate) p50: f64,
    /// `None` for figures that are one number per repetition (rates, counts).
    pub(crate) p99: Option<f64>,
    pub(crate) p999: Option<f64>,
    /// Least and greatest of the repetitions' `p50`.
    pub(crate) spread: (f64, f64),
    pub(crate) repetitions: usize,
}

impl Summary {
    /// Medians of each percentile.
    pub(crate) fn of_latencies(repetitions: &[Percentiles]) -> Self {
        let take = |of: fn(&Percentiles) -> f64| repetitions.iter().map(of).collect::<Vec<_>>();
        let (p50, spread) = median(take(|p| p.p50));
        Self {
            p50,
            p99: Some(median(take(|p| p.p99)).0),
            p999: Some(median(take(|p| p.p999)).0),
            spread,
            repetitions: repetitions.len(),
        }
    }

    /// Median of one number per repetition.
    pub(crate) fn of_numbers(values: Vec<f64>) -> Self {
        let repetitions = values.len();
        let (p50, spread) = median(values);
        Self {
            p50,
            p99: None,
            p999: None,
            spread,
            repetitions,
        }
    }
}

/// The median, and the least and greatest.
fn median(mut values: Vec<f64>) -> (f64, (f64, f64)) {
    values.sort_by(f64::total_cmp);
    let count = values.len();
    match count {
        0 => (0.0, (0.0, 0.0)),
        _ => {
            let middle = f64::midpoint(values[(count - 1) / 2], values[count / 2]);
            (middle, (values[0], values[count - 1]))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let mut values: Vec<f64> = (1..=1000).rev().map(f64::from).collect();
        let p = Percentiles::of(&mut values);
        assert_eq!((p.p50, p.p99, p.p999, p.max), (500.0, 990.0, 999.0, 1000.0));
        assert_eq!(Percentiles::of(&mut []), Percentiles::default());
    }

    #[test]
    fn a_summary_is_the_median_repetition_and_shows_the_extremes() {
        let summary = Summary::of_numbers(vec![3.0, 1.0, 100.0]);
        assert_eq!((summary.p50, summary.spread), (3.0, (1.0, 100.0)));
        assert_eq!(Summary::of_numbers(vec![1.0, 2.0]).p50, 1.5);
    }
}
