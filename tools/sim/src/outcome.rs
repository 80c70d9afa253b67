//! What one point gave.

use serde::{Deserialize, Serialize};

/// What one point gave. Requests, and distributions over them, are of those that arrived after the
/// warm-up; `requests_in_all`, bytes, shares that were busy, `batch_size`, `virtual_s` and `events`
/// are of the whole run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// Requests that arrived after the warm-up.
    pub requests: u64,
    /// Requests in all.
    pub requests_in_all: u64,
    /// Part of `requests` whose first token was in time.
    pub attainment: f64,
    /// Time to first token, ms.
    pub ttft_ms: Distribution,
    /// Time to first token over its objective.
    pub ttft_over_slo: Distribution,
    /// From the start of a collective to its end, ms.
    pub collective_ms: Distribution,
    /// That over what it takes with the ports to itself.
    pub collective_stretch: Distribution,
    /// Objective less TTFT of requests that were in time, ms.
    pub earliness_ms: Distribution,
    /// TTFT less objective of those that were not, ms.
    pub lateness_ms: Distribution,
    /// Where a request's time went, ms, means.
    pub waiting_ms: Waiting,
    /// Requests that were pruned at any time.
    pub pruned: u64,
    /// Requests that their unit gave up.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub relegated: u64,
    /// Weights that went to another unit.
    #[serde(default, skip_serializing_if = "Weights::is_none")]
    pub weights: Weights,
    /// Bytes that went through NICs, by stage.
    pub bytes: StageBytes,
    /// Reused tokens over prompt tokens.
    pub reused: f64,
    /// Of the reused tokens, the part that another unit had to send.
    pub fetched: f64,
    /// Share of the virtual time in which prefill units computed.
    pub compute_busy: f64,
    /// Mean and highest share of the NICs' rate that was used, over all prefill NIC directions.
    pub port_busy_mean: f64,
    /// See `port_busy_mean`.
    pub port_busy_most: f64,
    /// Requests per batch, mean.
    pub batch_size: f64,
    /// Virtual seconds until the last request was served.
    pub virtual_s: f64,
    /// Events handled.
    pub events: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Weights of a model that went from one unit to another while both served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Weights {
    /// Scale-outs that began.
    pub begun: u64,
    /// Those of which all had come when the last request was served.
    pub done: u64,
    /// Seconds that these took, mean.
    pub mean_s: f64,
    /// Bytes of all that began, through NICs.
    pub bytes: u64,
}

impl Weights {
    const fn is_none(&self) -> bool {
        self.begun == 0
    }
}

/// Where a request's time went, ms, means over requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Waiting {
    /// From arrival until its batch starts.
    pub queue: f64,
    /// Its batch stood still for KV blocks.
    pub kv_reuse: f64,
    /// Its batch was in a collective.
    pub collective: f64,
    /// Its batch computed.
    pub compute: f64,
    /// From the end of computing until the decode worker had all of its KV cache.
    pub p2d: f64,
}

/// Bytes by stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageBytes {
    /// Stage 1.
    pub kv_reuse: u64,
    /// Stage 2.
    pub collective: u64,
    /// Stage 3.
    pub p2d: u64,
}

/// A sample in short. All zero if it is empty.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Distribution {
    /// How many.
    pub count: u64,
    /// Their mean.
    pub mean: f64,
    /// Smallest, then each hundredth, then the largest: 101 values; empty if the sample is.
    pub percentiles: Vec<f64>,
}

impl Distribution {
    /// Of a sample, in any order. Values must not be NaN.
    #[must_use]
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

    /// The value below which this part (0 to 100) of the sample lies, zero if it is empty.
    #[must_use]
    pub fn percentile(&self, p: usize) -> f64 {
        self.percentiles.get(p.min(100)).copied().unwrap_or(0.0)
    }
}
