//! Statistics of samples: percentiles within a repetition, medians between repetitions, and the
//! spread as a measure of confidence.

use serde::Serialize;

use crate::clock::Clock;

/// Collects the samples of one repetition without allocations during the measurement.
pub(crate) struct Recorder {
    ticks: Vec<(u64, u64)>,
}

impl Recorder {
    /// Creates a recorder for `samples`. Its memory is touched, so that no page fault is measured.
    pub(crate) fn with_room_for(samples: usize) -> Self {
        let mut ticks = vec![(1, 1); samples];
        ticks.clear();
        Self { ticks }
    }

    #[inline(always)]
    pub(crate) fn note(&mut self, begin: u64, end: u64) {
        self.ticks.push((begin, end));
    }

    pub(crate) fn clear(&mut self) {
        self.ticks.clear();
    }

    pub(crate) fn finish(&mut self, clock: Clock) -> Percentiles {
        let mut ns: Vec<f64> =
            self.ticks.drain(..).map(|(begin, end)| clock.between_ns(begin, end)).collect();
        Percentiles::of(&mut ns, clock.resolution_ns())
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Percentiles {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) mean: f64,
}

impl Percentiles {
    /// Sorts `values` and returns their percentiles. They are all zero if there are no values.
    ///
    /// If the clock has steps, many samples are equal. A percentile is then interpolated within its
    /// step, as the median of grouped data. A step of 10 ns is a tenth of the fastest round trips.
    pub(crate) fn of(values: &mut [f64], step: f64) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        values.sort_by(f64::total_cmp);
        let rank = |quantile: f64| {
            let index = (quantile * values.len() as f64).ceil() as usize;
            let value = values[index.clamp(1, values.len()) - 1];
            let begin = values.partition_point(|v| *v < value);
            let equal = values.partition_point(|v| *v <= value) - begin;
            let share = (quantile * values.len() as f64 - begin as f64) / equal as f64;
            if equal == 1 { value } else { (value + step * (share - 0.5)).max(0.0) }
        };
        Self {
            p50: rank(0.5),
            p99: rank(0.99),
            p999: rank(0.999),
            mean: values.iter().sum::<f64>() / values.len() as f64,
        }
    }

    pub(crate) fn divided_by(self, count: f64) -> Self {
        Self {
            p50: self.p50 / count,
            p99: self.p99 / count,
            p999: self.p999 / count,
            mean: self.mean / count,
        }
    }
}

/// The statistics of one repetition of a round trip, with P measured next to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Paired {
    pub(crate) percentiles: Percentiles,
    /// Median of P, or `None` on a machine with one core.
    pub(crate) p: Option<f64>,
}

/// Medians of the ratios to P, which is measured next to each repetition. The cores of a
/// virtual machine may be hyper-threads of one core now and far apart later. P varied between 100
/// and 480 ns, so a ratio of two medians would compare different machines.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Ratios {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
}

impl Ratios {
    fn of(repetitions: &[Paired]) -> Option<Self> {
        let ratios = |of: fn(&Percentiles) -> f64| {
            repetitions
                .iter()
                .map(|r| Some(of(&r.percentiles) / r.p.filter(|ns| *ns > 0.0)?))
                .collect::<Option<Vec<f64>>>()
                .map(|ratios| median(ratios).0)
        };
        Some(Self { p50: ratios(|p| p.p50)?, p99: ratios(|p| p.p99)?, p999: ratios(|p| p.p999)? })
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub(crate) p50: f64,
    /// 99th percentile, or `None` for figures with one number per repetition (rates, counts).
    pub(crate) p99: Option<f64>,
    pub(crate) p999: Option<f64>,
    pub(crate) mean: Option<f64>,
    pub(crate) of_p: Option<Ratios>,
    pub(crate) spread: (f64, f64),
    pub(crate) repetitions: usize,
}

impl Summary {
    pub(crate) fn of_latencies(repetitions: &[Percentiles]) -> Self {
        let take = |of: fn(&Percentiles) -> f64| repetitions.iter().map(of).collect::<Vec<_>>();
        let (p50, spread) = median(take(|p| p.p50));
        Self {
            p50,
            p99: Some(median(take(|p| p.p99)).0),
            p999: Some(median(take(|p| p.p999)).0),
            mean: Some(median(take(|p| p.mean)).0),
            spread,
            repetitions: repetitions.len(),
            ..Self::default()
        }
    }

    pub(crate) fn of_paired(repetitions: &[Paired]) -> Self {
        let percentiles: Vec<Percentiles> = repetitions.iter().map(|r| r.percentiles).collect();
        Self { of_p: Ratios::of(repetitions), ..Self::of_latencies(&percentiles) }
    }

    pub(crate) fn of_numbers(values: Vec<f64>) -> Self {
        let repetitions = values.len();
        let (p50, spread) = median(values);
        Self { p50, spread, repetitions, ..Self::default() }
    }
}

/// Returns the median, and the least and greatest value.
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
        let p = Percentiles::of(&mut values, 1.0);
        assert_eq!((p.p50, p.p99, p.p999), (500.0, 990.0, 999.0));
        assert_eq!(Percentiles::of(&mut [], 1.0), Percentiles::default());
    }

    #[test]
    fn a_percentile_is_interpolated_within_a_step_of_the_clock() {
        // A quarter of the samples is in one step, the rest in the next.
        let mut values = [vec![100.0; 25], vec![110.0; 75]].concat();
        let p50 = Percentiles::of(&mut values, 10.0).p50;
        assert!((p50 - (105.0 + 10.0 / 3.0)).abs() < 1e-9, "{p50}");
    }

    #[test]
    fn ratios_are_taken_beside_each_repetition_and_not_between_medians() {
        let pair = |p50, p| Paired {
            percentiles: Percentiles { p50, p99: 2.0 * p50, ..Percentiles::default() },
            p: Some(p),
        };
        let summary =
            Summary::of_paired(&[pair(100.0, 100.0), pair(400.0, 400.0), pair(90.0, 100.0)]);
        let ratios = summary.of_p.expect("P was measured");
        assert_eq!((ratios.p50, ratios.p99), (1.0, 2.0));
    }

    #[test]
    fn a_summary_is_the_median_repetition_and_shows_the_extremes() {
        let summary = Summary::of_numbers(vec![3.0, 1.0, 100.0]);
        assert_eq!((summary.p50, summary.spread), (3.0, (1.0, 100.0)));
        assert_eq!(Summary::of_numbers(vec![1.0, 2.0]).p50, 1.5);
    }
}
