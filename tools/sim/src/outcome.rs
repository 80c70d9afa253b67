//! The outcome of one run of the simulator.

use serde::{Deserialize, Serialize};

/// The outcome of one run. Requests and distributions over them count only requests that arrived
/// after the warm-up. `requests_in_all`, bytes, busy shares, `batch_size`, `virtual_s` and `events`
/// cover the whole run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// Requests that arrived after the warm-up.
    pub requests: u64,
    /// Requests of the whole run, warm-up included.
    pub requests_in_all: u64,
    /// Share of `requests` whose first token came by its deadline, 0 to 1.
    pub attainment: f64,
    /// Share of `requests` whose TTFT was at most `slo.factor` times their own TTFT alone. Equals
    /// `attainment` where that is the objective.
    #[serde(default)]
    pub attainment_own: f64,
    /// Time to first token, in milliseconds.
    pub ttft_ms: Distribution,
    /// Time to first token divided by the request's objective.
    pub ttft_over_slo: Distribution,
    /// Durations of collectives from start to end, in milliseconds.
    pub collective_ms: Distribution,
    /// Duration of each collective divided by its duration on ports that carry nothing else.
    pub collective_stretch: Distribution,
    /// Objective minus TTFT of requests that met their deadline, in milliseconds.
    pub earliness_ms: Distribution,
    /// TTFT minus objective of requests that missed their deadline, in milliseconds.
    pub lateness_ms: Distribution,
    /// Mean time that a request spent in each phase, in milliseconds.
    pub waiting_ms: Waiting,
    /// Requests that were pruned at least once.
    pub pruned: u64,
    /// Requests that the request scheduler of their unit relegated.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub relegated: u64,
    /// Transfers of weights between prefill units.
    #[serde(default, skip_serializing_if = "Weights::is_none")]
    pub weights: Weights,
    /// Bytes that went through NICs, by stage.
    pub bytes: StageBytes,
    /// Reused tokens divided by prompt tokens.
    pub reused: f64,
    /// Share of the reused tokens that another unit had to send.
    pub fetched: f64,
    /// Share of the virtual time in which prefill units computed.
    pub compute_busy: f64,
    /// Share of the virtual time in which prefill units had a batch: they computed, exchanged
    /// tokens or waited for KV blocks.
    #[serde(default)]
    pub units_busy: f64,
    /// Mean share of the NICs' rate that was used, over both directions of all prefill NICs.
    pub port_busy_mean: f64,
    /// Highest share of a NIC's rate that was used in one direction, over all prefill NICs.
    pub port_busy_most: f64,
    /// Mean number of requests per batch.
    pub batch_size: f64,
    /// Virtual seconds until the last request was served.
    pub virtual_s: f64,
    /// Events that the simulator handled.
    pub events: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Transfers of model weights from one unit to another while both serve requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Weights {
    /// Number of scale-outs that began.
    pub begun: u64,
    /// Scale-outs that were complete when the last request was served.
    pub done: u64,
    /// Mean duration of the complete scale-outs, in seconds.
    pub mean_s: f64,
    /// Bytes that all scale-outs sent through NICs.
    pub bytes: u64,
}

impl Weights {
    const fn is_none(&self) -> bool {
        self.begun == 0
    }
}

/// Time of a request by phase, as a mean over requests in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Waiting {
    /// Time from the arrival of the request until its batch starts.
    pub queue: f64,
    /// Time in which the request's batch waited for KV blocks.
    pub kv_reuse: f64,
    /// Time in which the request's batch was in a collective.
    pub collective: f64,
    /// Time in which the request's batch computed.
    pub compute: f64,
    /// Time from the end of computing until the decode worker has all of the KV cache.
    pub p2d: f64,
}

/// Bytes that were sent through NICs, by stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageBytes {
    /// Bytes of KV reuse (stage 1).
    pub kv_reuse: u64,
    /// Bytes of collectives (stage 2).
    pub collective: u64,
    /// Bytes of P2D (stage 3).
    pub p2d: u64,
}

/// Summary of a sample. All fields are zero or empty if the sample is empty.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Distribution {
    pub count: u64,
    /// Mean of the values.
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
