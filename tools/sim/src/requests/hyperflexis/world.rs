//! Common parts of HyperFlexis' experiments: the machine, its fitted latency model, the compared
//! systems, and a run.
//!
//! The paper's machine (Ascend 910 of 64 GB, Qwen 7B, vLLM) is replaced by one A100 with Llama 3
//! 8B. Chunked prefill has 2048 tokens per iteration (vLLM's default). Instances serve in order of
//! arrival unless a system differs.

use laxity_requests::baseline::{CentralEdf, Fixed, LeastWork, LineOrder, RoundRobin};
use laxity_requests::discipline::{Discipline, Rank, View};
use laxity_requests::dispatch::{Dispatch, Role};
use laxity_requests::hyperflexis::DispatcherOptions;
use laxity_requests::hyperflexis::scaler::ScalerOptions;
use laxity_requests::hyperflexis::{HyperFlexis, Linear, Mapping, Scaler, latency};
use laxity_requests::job::Job;
use laxity_requests::kv::Pool;
use laxity_requests::replica::Replica;
use laxity_requests::request::{InstanceId, RequestId, Slo};
use laxity_requests::{Span, Time};

use crate::requests::PaperError;
use crate::requests::cluster::{self, Config, Startup};
use crate::requests::latency::Roofline;
use crate::requests::link::Link;
use crate::requests::outcome::{ClusterOutcome, Record};
use crate::requests::workload::Asked;

pub(super) const BLOCK_TOKENS: u32 = 16;
const CHUNK: u32 = 2048;
/// Rate of a port: 200 Gb/s in bytes per second, as in the simulator's other clusters.
const LINK: u64 = 25_000_000_000;
/// Rate of the paper's disk in bytes per second. It loads 15 GB in 4.14 − 0.89 s more than a peer
/// does (table 2).
const DISK: u64 = 4_000_000_000;
/// Time to start an instance without loading weights (table 2: 0.89 s, of which weights take 0.6 s
/// on a 200 Gb/s port).
const BOOT: Span = Span::from_millis(250);
const PROFILED: u32 = 32_768;

#[derive(Clone, Debug)]
pub(super) struct Machine {
    pub clock: Roofline,
    pub model: Linear,
    blocks: u32,
    alone: bool,
}

/// A fixed token budget under an order, without decodes while a prompt can be computed.
#[derive(Clone, Copy, Debug)]
struct Alone {
    inner: Fixed,
    prompts: bool,
}

impl Discipline for Alone {
    fn rank(&self, job: &Job) -> Rank {
        self.inner.rank(job)
    }

    fn budget(&mut self, _: Time, _: &dyn View) -> u32 {
        self.inner.tokens
    }

    fn begun_first(&self) -> bool {
        self.inner.begun_first()
    }

    fn relegate(&mut self, _: Time, view: &dyn View) -> Vec<RequestId> {
        // This is called before decodes are planned. A prompt without room must not stop them.
        let room = |job: &Job| view.pool().blocks(job.target) + 1 < view.pool().free();
        self.prompts = view.in_line().next().is_some_and(room);
        Vec::new()
    }

    fn decodes_max(&self) -> usize {
        if self.prompts { 0 } else { usize::MAX }
    }
}

impl Machine {
    pub(super) fn new(ratio: f64) -> Result<Self, PaperError> {
        let (gpu, clock) = Roofline::llama(ratio)?;
        let model = Linear::fit(&latency::profile(&clock, PROFILED))
            .map_err(|error| PaperError::BuiltIn(error.to_string()))?;
        Ok(Self { alone: false, blocks: clock.blocks(&gpu, 1, BLOCK_TOKENS), model, clock })
    }

    /// Returns the machine with an engine that computes prompts before all tokens, as vLLM does
    /// without chunked prefill.
    pub(super) fn without_chunks(&self) -> Self {
        Self { alone: true, ..self.clone() }
    }

    pub(super) const fn options(&self) -> DispatcherOptions {
        DispatcherOptions::new(self.model, BLOCK_TOKENS)
    }

    /// Returns the dispatcher's options for an engine whose decodes go on while it computes
    /// prompts.
    pub(super) const fn without_pauses(&self) -> DispatcherOptions {
        DispatcherOptions { pauses: false, ..self.options() }
    }

    /// Returns the dispatcher's options with eq. 5 unmodified: an instance is mature again only
    /// after all of the tightest TTFT.
    pub(super) const fn as_it_stands(&self) -> DispatcherOptions {
        DispatcherOptions { ttft_share: 1.0, ..self.options() }
    }
}

#[derive(Clone, Debug)]
pub(super) enum System {
    RoundRobin(LineOrder),
    LeastWork(LineOrder),
    SmallChunks,
    EdfAdmission,
    HyperFlexis(DispatcherOptions),
    Priorities(DispatcherOptions, Box<Mapping>),
}

impl System {
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::RoundRobin(LineOrder::Edf) => "round robin, EDF inside",
            Self::RoundRobin(_) => "round robin",
            Self::LeastWork(LineOrder::Edf) => "least work, EDF inside",
            Self::LeastWork(_) => "least work",
            Self::SmallChunks => "least work, EDF inside, chunks of 512",
            Self::EdfAdmission => "EDF + admission",
            Self::HyperFlexis(options) if !options.pauses => "HyperFlexis, no pauses",
            Self::HyperFlexis(options) if options.ttft_share < 1.0 => "HyperFlexis",
            Self::HyperFlexis(_) => "HyperFlexis, eq. 5 as it stands",
            Self::Priorities(options, _) if options.ttft_share < 1.0 => "HyperFlexis-PM",
            Self::Priorities(..) => "HyperFlexis-PM, eq. 5 as it stands",
        }
    }

    /// Returns the paper's baseline, fair baselines, and the paper's system.
    pub(super) fn all(machine: &Machine) -> Vec<Self> {
        vec![
            Self::RoundRobin(LineOrder::Fcfs),
            Self::RoundRobin(LineOrder::Edf),
            Self::LeastWork(LineOrder::Fcfs),
            Self::LeastWork(LineOrder::Edf),
            Self::SmallChunks,
            Self::EdfAdmission,
            Self::HyperFlexis(machine.options()),
            Self::HyperFlexis(machine.as_it_stands()),
            Self::HyperFlexis(machine.without_pauses()),
        ]
    }

    const fn order(&self) -> LineOrder {
        match self {
            Self::RoundRobin(order) | Self::LeastWork(order) => *order,
            Self::SmallChunks => LineOrder::Edf,
            _ => LineOrder::Fcfs,
        }
    }

    const fn chunk(&self) -> u32 {
        match self {
            Self::SmallChunks => 512,
            _ => CHUNK,
        }
    }
}

const SCALING: Span = Span::from_millis(1_000);

/// Runs requests through a cluster of this machine. A scaler may use up to `most` instances.
pub(super) fn run(
    machine: &Machine,
    system: &System,
    roles: &[Role],
    scales: Option<u32>,
    asked: &[Asked],
) -> ClusterOutcome {
    let order = system.order();
    let model = machine.model;
    let make = |_: InstanceId, _: Role| {
        let tokens = system.chunk();
        let pool = Pool::new(machine.blocks, BLOCK_TOKENS);
        let inner = Fixed { order, tokens };
        if machine.alone {
            let alone = Alone { inner, prompts: false };
            return Replica::new(pool, machine.blocks / 100, Box::new(alone));
        }
        Replica::new(pool, machine.blocks / 100, Box::new(inner))
    };
    let dispatch: Box<dyn Dispatch> = match system {
        System::RoundRobin(_) => Box::new(RoundRobin::default()),
        System::LeastWork(_) | System::SmallChunks => Box::new(LeastWork::new(model)),
        System::EdfAdmission => Box::new(CentralEdf::new(model, CHUNK, BLOCK_TOKENS)),
        System::HyperFlexis(options) => Box::new(HyperFlexis::new(*options)),
        System::Priorities(options, mapping) => {
            Box::new(HyperFlexis::with_priorities(*options, Mapping::clone(mapping)))
        }
    };
    let scaler = scales.map(|most| {
        let objectives = asked.iter().filter_map(|asked| match asked.spec.slo {
            Slo::Interactive { ttft, tbt } => Some((ttft, tbt)),
            Slo::Batch { .. } => None,
        });
        let (ttft, tpot) = objectives
            .fold((u64::MAX, u64::MAX), |least, one| (least.0.min(one.0), least.1.min(one.1)));
        let options =
            ScalerOptions { interval: SCALING.0, ..ScalerOptions::new(model, ttft, tpot, most) };
        cluster::Scaler {
            decides: Box::new(Scaler::new(options)),
            window: SCALING,
            startup: Startup { weights: machine.clock.weights_bytes, disk: DISK, boot: BOOT },
            most,
        }
    });
    let config = Config {
        roles: roles.to_vec(),
        dispatch,
        scaler,
        link: Link::new(LINK, Span::from_micros(20)),
        ..Config::single(&make, &machine.clock, machine.clock.kv_bytes_per_token)
    };
    cluster::run(config, asked)
}

/// Reports whether the first token and the mean time per token met their objectives (eq. 4).
/// (`Record::met` requires it of each token.)
pub(super) fn attained(record: &Record) -> bool {
    let Slo::Interactive { tbt, .. } = record.spec.slo else { return record.met() };
    let tpot = record.tpot().is_none_or(|tpot| tpot.0 <= tbt);
    record.complete() && record.met_first() && tpot
}

/// Returns the percentage of the selected requests that attained their objectives.
pub(super) fn attainment(outcome: &ClusterOutcome, of: impl Fn(&Record) -> bool) -> f64 {
    let some: Vec<&Record> = outcome.records.iter().filter(|r| of(r)).collect();
    let good = some.iter().filter(|record| attained(record)).count();
    good as f64 / some.len().max(1) as f64 * 100.0
}

/// Returns the mean time from arrival to the last token, in seconds.
pub(super) fn latency_s(outcome: &ClusterOutcome) -> f64 {
    let all: Vec<f64> = outcome
        .records
        .iter()
        .filter_map(|record| record.ttlt().map(|span| span.0 as f64 / 1e9))
        .collect();
    all.iter().sum::<f64>() / all.len().max(1) as f64
}

/// Returns the cost of eq. 3 in units of 50 ms of an instance (§7.5), in thousands.
pub(super) fn cost(outcome: &ClusterOutcome) -> f64 {
    outcome.instance_time.0 as f64 / 50e6 / 1e3
}
