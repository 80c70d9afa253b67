//! Arrival times: a random process with the wanted rate, or recorded times at another speed.
//!
//! Times are assigned to requests in their order. Sessions keep the order of their turns, and think
//! times keep their share of the whole.

use laxity_policy::Time;
use rand::{Rng, RngExt as _};
use rand_distr::{Distribution as _, Exp1, Gamma};

use super::draft::within;
use super::{MOST_BLOCKS, Request, Requests, WorkloadError};
use crate::scenario::{Arrivals, Workload};

/// Returns arrivals of a renewal process in `workload.seconds` at `rate` per second. Gaps are
/// exponential under `poisson`. Under `bursty` they have a gamma distribution with the same mean
/// and the coefficient of variation `burstiness` (0 is evenly spaced, 1 is Poisson). The process is
/// stationary, so the first gap is the rest of one that began before 0.
pub(super) fn drawn(workload: &Workload, rate: f64, rng: &mut impl Rng) -> Vec<Time> {
    let variation = match workload.arrivals {
        Arrivals::Bursty => workload.burstiness,
        _ => 1.0,
    };
    let gaps = Gaps::new(variation);
    let mut times = Vec::with_capacity((rate * workload.seconds * 1.1) as usize + 16);
    let mut at_s = gaps.left_of_one(rng) / rate;
    while at_s < workload.seconds {
        times.push(time(at_s));
        at_s += gaps.one(rng) / rate;
    }
    times
}

/// A distribution of gaps with mean 1.
enum Gaps {
    Even,
    Exponential,
    Gamma {
        gap: Gamma<f64>,
        /// Distribution of the gap that contains an instant, which is weighted by length.
        around: Gamma<f64>,
    },
}

impl Gaps {
    fn new(variation: f64) -> Self {
        // A gamma distribution of shape k has the coefficient of variation 1/√k. Weighted by its
        // value it has shape k + 1.
        let shape = 1.0 / (variation * variation);
        let gamma = |k| Gamma::new(k, 1.0 / shape).expect("shape and scale are positive numbers");
        if variation < 1e-3 {
            Self::Even
        } else if variation == 1.0 {
            Self::Exponential
        } else {
            Self::Gamma { gap: gamma(shape), around: gamma(shape + 1.0) }
        }
    }

    fn one(&self, rng: &mut impl Rng) -> f64 {
        match self {
            Self::Even => 1.0,
            Self::Exponential => Exp1.sample(rng),
            Self::Gamma { gap, .. } => gap.sample(rng),
        }
    }

    fn left_of_one(&self, rng: &mut impl Rng) -> f64 {
        match self {
            Self::Even => rng.random(),
            Self::Exponential => Exp1.sample(rng),
            Self::Gamma { around, .. } => around.sample(rng) * rng.random::<f64>(),
        }
    }
}

/// Returns recorded arrivals until `seconds`, scaled to a mean rate of `rate`. A recording that
/// ends earlier starts again after one mean gap.
pub(super) fn recorded(
    list: &[Request],
    rate: f64,
    seconds: f64,
) -> Result<Vec<Time>, WorkloadError> {
    let count = list.len() as f64;
    let span_ns = list.last().map_or(0, |last| last.arrival.0);
    if span_ns == 0 {
        return Err(WorkloadError::NoTimes { requests: list.len() });
    }
    let factor = (count - 1.0) / (rate * span_ns as f64);
    let mut times = Vec::new();
    for round in 0_u32.. {
        let start_s = f64::from(round) * count / rate;
        for request in list {
            let at_s = start_s + request.arrival.0 as f64 * factor;
            if at_s >= seconds {
                return Ok(times);
            }
            times.push(time(at_s));
        }
    }
    Ok(times)
}

fn time(at_s: f64) -> Time {
    Time((at_s * 1e9) as u64)
}

/// Assigns `times` to the first requests of a recording. When it is used up it starts again with
/// new block ids.
pub(super) fn retimed(mut from: Requests, times: &[Time]) -> Result<Requests, WorkloadError> {
    let recorded = from.list.len();
    let recorded_blocks = from.blocks.len();
    let rounds = times.len() / recorded;
    let rest = times.len() % recorded;
    // Blocks are in the order of the requests, so those of the first requests come first.
    let rest_blocks: usize = from.list[..rest].iter().map(|r| r.blocks as usize).sum();
    let total = rounds as u64 * recorded_blocks as u64 + rest_blocks as u64;
    within(total, MOST_BLOCKS, "blocks")?;
    from.list.reserve(times.len().saturating_sub(recorded));
    from.blocks.reserve((total as usize).saturating_sub(recorded_blocks));
    for round in 1..=rounds {
        let length = if round < rounds { recorded } else { rest };
        let first_block = (round * recorded_blocks) as u32;
        let first_id = round as u32 * from.distinct_blocks;
        for index in 0..length {
            let mut request = from.list[index];
            request.first_block += first_block;
            from.list.push(request);
        }
        let length = if round < rounds { recorded_blocks } else { rest_blocks };
        for index in 0..length {
            from.blocks.push(from.blocks[index] + first_id);
        }
    }
    from.list.truncate(times.len());
    from.blocks.truncate(total as usize);
    for (request, &arrival) in from.list.iter_mut().zip(times) {
        request.arrival = arrival;
    }
    // Ids are numbered by first use, so the first requests have the lowest.
    from.distinct_blocks = from.blocks.iter().max().map_or(0, |id| id + 1);
    Ok(from)
}

#[cfg(test)]
mod tests {
    use super::super::tests::requests;
    use super::super::{Purpose, random};
    use super::*;

    fn workload(arrivals: Arrivals, burstiness: f64, seconds: f64) -> Workload {
        Workload { arrivals, burstiness, seconds, ..Workload::default() }
    }

    fn measured(arrivals: Arrivals, burstiness: f64) -> (f64, f64) {
        let workload = workload(arrivals, burstiness, 400.0);
        let times = drawn(&workload, 100.0, &mut random(3, Purpose::Arrivals));
        assert!(times.is_sorted());
        assert!(times.last().unwrap().0 < 400_000_000_000);
        let gaps: Vec<f64> = times.windows(2).map(|w| (w[1].0 - w[0].0) as f64).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let square = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>();
        let deviation = (square / gaps.len() as f64).sqrt();
        (times.len() as f64 / 400.0, deviation / mean)
    }

    #[test]
    fn processes_have_the_wanted_rate_and_variation() {
        for (arrivals, burstiness, variation) in [
            (Arrivals::Poisson, 9.0, 1.0),
            (Arrivals::Bursty, 1.0, 1.0),
            (Arrivals::Bursty, 2.0, 2.0),
            (Arrivals::Bursty, 0.3, 0.3),
            (Arrivals::Bursty, 0.0, 0.0),
        ] {
            let (rate, found) = measured(arrivals, burstiness);
            assert!((rate - 100.0).abs() < 3.0, "{burstiness}: rate {rate}");
            assert!((found - variation).abs() < 0.05, "{burstiness}: {found}");
        }
    }

    #[test]
    fn processes_are_stationary_from_the_start() {
        // Over 4000 starts, the first hundredth of a second has its share of the arrivals.
        let workload = workload(Arrivals::Bursty, 3.0, 0.01);
        let arrivals: usize = (0..4000)
            .map(|seed| drawn(&workload, 100.0, &mut random(seed, Purpose::Arrivals)).len())
            .sum();
        assert!((3600..4400).contains(&arrivals), "{arrivals}");
    }

    /// Returns requests at the given seconds. Request `i` has the blocks 0 and `i + 1`.
    fn recording(at_s: &[u64]) -> Requests {
        let blocks: Vec<[u32; 2]> = (1..=at_s.len() as u32).map(|own| [0, own]).collect();
        requests(at_s.iter().zip(&blocks).map(|(&at_s, blocks)| (at_s, 32, &blocks[..])))
    }

    #[test]
    fn recorded_times_keep_their_proportions_and_get_the_rate() {
        let from = recording(&[0, 1, 4]);
        let times = recorded(&from.list, 2.0, 100.0).unwrap();
        assert_eq!(times.len(), 200);
        // Three requests in 1.5 s: gaps in the ratio 1 to 3, then a mean gap.
        let start: Vec<u64> = times[..5].iter().map(|t| t.0 / 1_000_000).collect();
        assert_eq!(start, [0, 250, 1000, 1500, 1750]);
    }

    #[test]
    fn a_recording_without_times_cannot_be_replayed_as_recorded() {
        for at_s in [&[5, 5, 5][..], &[5]] {
            let mut from = recording(at_s);
            from.list.iter_mut().for_each(|r| r.arrival = Time::ZERO);
            let message = recorded(&from.list, 2.0, 1.0).unwrap_err().to_string();
            assert!(message.contains("have the same time"), "{message}");
        }
    }

    #[test]
    fn each_round_has_blocks_of_its_own() {
        let times: Vec<Time> = (0..7).map(Time).collect();
        let to = retimed(recording(&[0, 1, 4]), &times).unwrap();
        assert_eq!(to.list.len(), 7);
        assert_eq!(to.blocks, [0, 1, 0, 2, 0, 3, 4, 5, 4, 6, 4, 7, 8, 9]);
        assert_eq!(to.distinct_blocks, 10);
        assert_eq!(to.blocks_of(&to.list[6]), [8, 9]);
        assert_eq!(to.list[6].arrival, Time(6));
    }

    #[test]
    fn a_part_of_a_recording_has_the_blocks_of_that_part() {
        let times: Vec<Time> = (0..2).map(Time).collect();
        let to = retimed(recording(&[0, 1, 4]), &times).unwrap();
        assert_eq!(to.blocks, [0, 1, 0, 2]);
        assert_eq!(to.distinct_blocks, 3);
        let times: Vec<Time> = (0..3).map(Time).collect();
        assert_eq!(retimed(recording(&[0, 1, 4]), &times).unwrap().blocks.len(), 6);
    }
}
