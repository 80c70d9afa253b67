//! The outcome of one run of the simulator.

use serde::{Deserialize, Serialize};

/// The outcome of one run. Requests and distributions over them count only requests that arrived
/// after the warm-up. `requests_in_all`, bytes, busy shares, `batch_size`, `virtual_s` and `events`
/// cover the whole run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    pub requests: u64,
    pub requests_in_all: u64,
    /// Share of `requests` whose first token came by its deadline, 0 to 1.
    pub attainment: f64,
    /// Share of `requests` whose TTFT was at most `slo.factor` times their own TTFT alone. Equals
    /// `attainment` where that is the objective.
    #[serde(default)]
    pub attainment_own: f64,
    /// Time to first token, in milliseconds.
    pub ttft_ms: Distribution,
    pub ttft_over_slo: Distribution,
    /// Durations of collectives from start to end, in milliseconds.
    pub collective_ms: Distribution,
    pub collective_stretch: Distribution,
    /// Objective minus TTFT of requests that met their deadline, in milliseconds.
    pub earliness_ms: Distribution,
    /// TTFT minus objective of requests that missed their deadline, in milliseconds.
    pub lateness_ms: Distribution,
    /// Mean time that a request spent in each phase, in milliseconds.
    pub waiting_ms: Waiting,
    pub pruned: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub relegated: u64,
    pub bytes: StageBytes,
    pub reused: f64,
    /// Share of the reused tokens that another unit had to send.
    pub fetched: f64,
    pub compute_busy: f64,
    /// Share of the virtual time in which prefill units had a batch: they computed, exchanged
    /// tokens or waited for KV blocks.
    #[serde(default)]
    pub units_busy: f64,
    pub port_busy_mean: f64,
    pub port_busy_most: f64,
    pub batch_size: f64,
    /// Virtual seconds until the last request was served.
    pub virtual_s: f64,
    pub events: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Time of a request by phase, as a mean over requests in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Waiting {
    pub queue: f64,
    pub kv_reuse: f64,
    pub collective: f64,
    pub compute: f64,
    pub p2d: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageBytes {
    pub kv_reuse: u64,
    pub collective: u64,
    pub p2d: u64,
}

/// Summary of a sample. All fields are zero or empty if the sample is empty.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Distribution {
    pub count: u64,
    pub mean: f64,
    /// Percentiles 0 to 100, so 101 values. Empty if the sample is empty.
    pub percentiles: Vec<f64>,
}

impl Distribution {
    /// Summarises a sample, which may be in any order. Values must not be NaN.
    pub fn of(mut sample: Vec<f64>) -> Self {
        if sample.is_empty() {
            return Self::default();
        }
        sample.sort_unstable_by(f64::total_cmp);
        let last = sample.len() - 1;
        Self {
            count: sample.len() as u64,
            mean: sample.iter().sum::<f64>() / sample.len() as f64,
            percentiles: (0..=100).map(|p| sample[(last * p + 50) / 100]).collect(),
        }
    }

    /// Returns the percentile `p` (0 to 100), or zero if the sample is empty.
    pub fn percentile(&self, p: usize) -> f64 {
        self.percentiles.get(p.min(100)).copied().unwrap_or(0.0)
    }
}
