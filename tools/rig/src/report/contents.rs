//! What a report contains. The JSON of a report consists of the structs in this file. How they are
//! measured is in [`measure`](super::measure).

use std::collections::BTreeMap;

use serde::Serialize;

use crate::carriage::Carriage;
use crate::collectives::ExchangeLedger;
use crate::config::LabConfig;
use crate::coordinator::CoordinatorRecord;
use crate::foreign::ForeignRecord;
use crate::ledger::Ledger;
use crate::report::distribution::Summary;
use crate::trace::Fitting;
use crate::vllm::restart::RestartReport;
use crate::workload::Statistics;

#[derive(Clone, Debug, Serialize)]
pub struct LabReport {
    pub engine: &'static str,
    pub runs: Vec<PolicyRun>,
    pub workload: WorkloadReport,
    pub alone: Alone,
    pub machine: Machine,
    pub config: LabConfig,
}

impl LabReport {
    /// Reports whether all answers have to be identical, which holds for computation on the CPU.
    pub fn must_agree(&self) -> bool {
        self.config.serving().device == crate::serving::Device::Cpu
    }

    pub fn disagreements(&self) -> Vec<(&str, &[u64])> {
        let differ = |run: &&PolicyRun| !run.answers_different.is_empty();
        self.runs
            .iter()
            .filter(differ)
            .map(|run| (run.policy.as_str(), &run.answers_different[..]))
            .collect()
    }
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct PolicyRun {
    pub policy: String,
    pub requests: usize,
    pub completed: usize,
    /// Number of failed requests by error, without requests that were given up.
    pub errors: BTreeMap<String, usize>,
    pub answers_compared: usize,
    pub answers_different: Vec<u64>,
    pub wrong_answers: usize,
    /// Bytes that one count of a ledger has and another lacks: of KV, and of collectives beside
    /// vLLM. Always 0 without a ledger: the lab's own engine fails a batch with a damaged or
    /// missing byte.
    pub bytes_lost: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv: Option<Ledger>,
    pub ttft_slo_attainment: f64,
    pub ttft_ms: Summary,
    pub slowdown: Summary,
    pub earliness: f64,
    /// Tokens of served prompts and answers per second, from time zero to the last answer.
    pub tokens_per_s: f64,
    /// Complete requests per second, from time zero to the last answer.
    pub requests_per_s: f64,
    pub exchange_ms: f64,
    pub exchanges: u64,
    pub stages_ms: Stages,
    pub kv_wait_ms: f64,
    pub iteration_ms: f64,
    pub tokens_found: u64,
    pub tokens_fetched: u64,
    pub prefilled_elsewhere: u64,
    /// Prompts that a decode host computed itself because no prefill host did.
    pub prefilled_after_all: u64,
    pub batches_failed: u64,
    pub link_utilisation: f64,
    pub hosts: Vec<HostReport>,
    /// Bytes that the switch's ports sent, by DSCP. `0` is unmarked.
    pub fabric_bytes: BTreeMap<u8, u64>,
    pub nic_bytes: BTreeMap<u8, u64>,
    pub fabric_drops: u64,
    pub stage_bytes: BTreeMap<String, BTreeMap<u8, u64>>,
    pub scheduled_bytes: u64,
    /// Payload bytes that went out without a permit. Without a daemon these are all bytes.
    pub bypassed_bytes: u64,
    /// Longest time of a host without a scheduler, in ms. [`Self::hosts`] has the time of each
    /// host.
    pub unscheduled_ms: f64,
    pub plugin: Option<Carriage>,
    /// The bytes of exchanges beside vLLM since the start of the processes, if there were some.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub collectives: Option<ExchangeLedger>,
    pub daemon_restarts: u32,
    /// What the death of a prefill host's vLLM did to the requests, if it was killed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart: Option<RestartReport>,
    pub coordinator: Option<CoordinatorRecord>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub foreign: Option<ForeignRecord>,
    /// Whether sockets of some host had the kernel's own buffers. Such a run cannot be compared
    /// with others.
    pub buffers_unbounded: bool,
    pub busy_cores: f64,
    pub lab_cores: f64,
    pub wall_s: f64,
    pub percentiles: Percentiles,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HostReport {
    pub host: String,
    pub egress: f64,
    pub ingress: f64,
    pub sent_bytes: BTreeMap<String, u64>,
    pub scheduled_bytes: u64,
    pub bypassed_bytes: u64,
    /// Time that the host was without a scheduler, in ms.
    pub unscheduled_ms: f64,
    pub prompt_tokens: u64,
}

/// Percentiles 0 … 100 of several quantities, for plots.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    pub ttft_ms: Vec<f64>,
    pub slowdown: Vec<f64>,
    pub earliness: Vec<f64>,
}

#[derive(Clone, Debug, Serialize)]
pub struct WorkloadReport {
    /// Hash over all arrivals. Equal hashes mean equal arrivals.
    pub arrivals_digest: String,
    #[serde(flatten)]
    pub statistics: Statistics,
    /// Mean TTFT of a request alone, in ms. Objectives are multiples of a request's TTFT alone.
    pub ideal_ttft_ms: f64,
    pub prefixes: usize,
    pub prefix_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fitting: Option<Fitting>,
}

/// Results of the requests that were played one by one.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Alone {
    pub ttft_ms: Summary,
    pub exchange_ms: f64,
    pub iteration_ms: f64,
    pub wall_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ideal_check: Option<IdealCheck>,
}

/// Comparison of the measured TTFT of requests alone with the computed contention-free TTFT.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct IdealCheck {
    pub requests: usize,
    pub measured_over_computed: f64,
    pub worst: f64,
}

/// Mean parts of the TTFT, in ms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Stages {
    /// Time from arrival until the request's batch began.
    pub queued: f64,
    /// Time that the batch waited for reused KV (stage 1).
    pub kv_reuse_stall: f64,
    pub collective: f64,
    pub compute: f64,
    /// Time from the last layer until decode had all KV, which is the exposed part of stage 3.
    pub p2d_tail: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Machine {
    pub cores: usize,
    pub kernel: String,
    pub model: String,
}

impl Machine {
    pub fn of_this() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let cpu = read("/proc/cpuinfo");
        let model = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        Self {
            cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            model: model.map(|(_, model)| model.trim().to_owned()).unwrap_or_default(),
        }
    }
}
