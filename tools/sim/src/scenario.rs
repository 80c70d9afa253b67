//! One point of an experiment, fully said: cluster, model, workload, policy, seed.
//!
//! Every field has a unit in its name or its documentation and a default that is the paper's
//! (MFS §6.1) where the paper has one. A plan file is a scenario with axes, see `plan`.

mod policy;
mod requests;
mod validate;

use std::path::PathBuf;

pub use policy::{Part, Policy};
pub use requests::RequestOrder;
pub use validate::Invalid;

use requests::is_default;
use serde::{Deserialize, Serialize};

/// One point.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Scenario {
    /// Servers, GPUs, NICs and what connects them.
    pub cluster: Cluster,
    /// Which model and how it is split.
    pub model: ModelChoice,
    /// How prefill units take requests.
    pub serving: Serving,
    /// When a first token is due.
    pub slo: Slo,
    /// Requests.
    pub workload: Workload,
    /// How transfers share.
    pub network: Network,
    /// Who decides.
    pub policy: Policy,
    /// Seed of everything random.
    pub seed: u64,
}

/// Servers, GPUs, NICs and what connects them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cluster {
    /// Servers in all, prefill and decode.
    pub servers: u32,
    /// GPUs of a server; as many NICs.
    pub gpus_per_server: u32,
    /// Part of the servers that prefills; the others decode.
    pub prefill_share: f64,
    /// GPU: `a100`, `h100`, or a file.
    pub gpu: String,
    /// Rate of a NIC, Gb/s in each direction.
    pub nic_gbps: f64,
    /// Rate of a GPU into the NVSwitch, GB/s in each direction (half of what data sheets add up);
    /// 0: what the GPU has.
    pub nvlink_gbytes: f64,
    /// Servers of a rack, below one leaf switch.
    pub servers_per_rack: u32,
    /// Capacity below a leaf switch over the capacity above it; 1 is a full fat tree.
    pub oversubscription: f64,
    /// How flows spread over a leaf's uplinks.
    pub spreading: Spreading,
}

/// How flows spread over the uplinks of a leaf switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Spreading {
    /// By packet, evenly: the uplinks of a leaf are one.
    #[default]
    Even,
    /// ECMP: each flow on one uplink, by a hash of its endpoints.
    Ecmp,
}

impl Default for Cluster {
    fn default() -> Self {
        Self {
            servers: 256,
            gpus_per_server: 8,
            prefill_share: 0.5,
            gpu: "a100".into(),
            nic_gbps: 200.0,
            nvlink_gbytes: 0.0,
            servers_per_rack: 16,
            oversubscription: 1.0,
            spreading: Spreading::Even,
        }
    }
}

/// Which model and how it is split over a prefill unit of `tp · max(ep, sp, dp)` GPUs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelChoice {
    /// A built-in name (`laxity sim models` lists them) or the path of a TOML file.
    pub name: String,
    /// GPUs of a tensor-parallel group: one rank, one place for KV cache.
    pub tp: u32,
    /// Expert parallelism: ranks that share out the experts, each with requests of its own
    /// (attention is data-parallel over them). 1: none.
    pub ep: u32,
    /// Sequence parallelism: ranks that share out each request's tokens. 1: none.
    pub sp: u32,
    /// Data parallelism without experts: ranks that run the same step, each with requests of its
    /// own, without traffic between them. 1: none.
    pub dp: u32,
    /// How ranks of a sequence-parallel unit exchange KV cache.
    pub sp_exchange: SpExchange,
    /// How uneven experts are used: exponent of a Zipf distribution over experts, drawn anew for
    /// each layer and unit. 0: even.
    pub expert_skew: f64,
}

impl Default for ModelChoice {
    fn default() -> Self {
        Self {
            name: "dbrx".into(),
            tp: 2,
            ep: 16,
            sp: 1,
            dp: 1,
            sp_exchange: SpExchange::Ring,
            expert_skew: 0.2,
        }
    }
}

/// How ranks of a sequence-parallel unit exchange KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpExchange {
    /// Neighbour to neighbour, while attention computes (ring attention).
    #[default]
    Ring,
    /// All to all, before attention computes.
    AllGather,
}

/// How prefill units take requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Serving {
    /// Tokens that one rank computes at most in a batch (with `sp`, the unit).
    pub token_budget: u32,
    /// Requests of one rank in a batch at most.
    pub requests_per_batch: u32,
    /// Prompts longer than what is left of the budget are cut; otherwise they run whole, alone if
    /// need be.
    pub chunked: bool,
    /// Layers ahead of the one that computes for which KV blocks are fetched.
    pub lookahead_layers: u16,
    /// Which unit gets a request.
    pub routing: Routing,
    /// What a token that has to be fetched or computed weighs against a queued one in routing.
    pub overlap_weight: f64,
    /// Prefix-cache capacity of a unit, tokens. Least recently used blocks go first.
    pub cache_tokens: u64,
    /// A unit that fetched blocks keeps a copy and serves others from it.
    pub copy_on_fetch: bool,
    /// Which decode rank gets a request.
    pub placement: Placement,
    /// GPUs of a decode rank, whose NICs take its ingress together.
    pub decode_tp: u32,
    /// In which order a unit takes requests into batches, and whom it gives up.
    #[serde(skip_serializing_if = "is_default")]
    pub requests: RequestOrder,
    /// Seconds between scale-outs: the weights of a prefill unit go to the next one, which serves
    /// meanwhile, as a unit that changes its model does. 0: none.
    #[serde(skip_serializing_if = "is_default")]
    pub scale_out_every_s: f64,
}

/// Which unit gets a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Routing {
    /// Cost = tokens to compute + queued tokens, as Dynamo's KV-aware router; what another unit
    /// holds is fetched.
    #[default]
    KvAware,
    /// Least queued tokens; whatever it lacks is fetched.
    LeastLoaded,
    /// In turn.
    RoundRobin,
    /// By load, but blocks have one home (a hash of their prefix) from which all fetch: a storage
    /// tier of the prefill units, with hot prefixes.
    StaticHomes,
}

/// Which decode rank gets a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// The one with the fewest bytes on their way to it.
    #[default]
    LeastLoaded,
    /// In turn.
    RoundRobin,
    /// At random.
    Random,
}

impl Default for Serving {
    fn default() -> Self {
        Self {
            token_budget: 8192,
            requests_per_batch: 64,
            chunked: true,
            lookahead_layers: 4,
            routing: Routing::KvAware,
            overlap_weight: 1.0,
            cache_tokens: 4_000_000,
            copy_on_fetch: false,
            placement: Placement::LeastLoaded,
            decode_tp: 2,
            requests: RequestOrder::Fcfs,
            scale_out_every_s: 0.0,
        }
    }
}

/// When a first token is due.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Slo {
    /// What it is measured by.
    pub kind: SloKind,
    /// Factor on it (MFS §6.1: 3).
    pub factor: f64,
    /// The objective of `fixed`, ms.
    pub fixed_ms: f64,
    /// Never less than this, ms.
    pub least_ms: f64,
}

/// What an objective is measured by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SloKind {
    /// The request's own TTFT with the cluster to itself.
    #[default]
    Alone,
    /// The mean of those over the workload.
    Mean,
    /// The same for all.
    Fixed,
}

impl Default for Slo {
    fn default() -> Self {
        Self {
            kind: SloKind::Alone,
            factor: 3.0,
            fixed_ms: 500.0,
            least_ms: 0.0,
        }
    }
}

/// Requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Workload {
    /// Where they come from.
    pub source: Source,
    /// The file of a trace.
    pub file: Option<PathBuf>,
    /// Arrivals per second and prefill GPU.
    pub rate_per_gpu: f64,
    /// How arrivals are spaced.
    pub arrivals: Arrivals,
    /// Coefficient of variation of gaps under `bursty`.
    pub burstiness: f64,
    /// Virtual seconds of arrivals; what has come by then is served to its end.
    pub seconds: f64,
    /// Part of the requests, from the start, that only warm up.
    pub warm_up: f64,
    /// Prompt lengths are multiplied by this.
    pub length_scale: f64,
    /// Longest prompt in tokens; longer ones are clipped.
    pub longest: u32,
}

/// Where requests come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Made up: conversation turns, mean 2 k tokens, half of it reused (Qwen A, MFS §6.2).
    Conversation,
    /// Made up: agents, mean 1 k tokens, 65 % reused, prefixes shared by many (Qwen B, MFS §6.2).
    #[default]
    Agent,
    /// Made up: long conversation turns, mean 15 k tokens, 40 % reused (Mooncake, MFS §6.3).
    LongConversation,
    /// Made up: agents with long prompts, mean 9 k tokens, 65 % reused (Mooncake, MFS §6.3).
    LongAgent,
    /// Mooncake's jsonl.
    Mooncake,
    /// Azure's LLM inference csv.
    Azure,
    /// Qwen-Bailian's jsonl.
    Qwen,
    /// BurstGPT's csv.
    Burstgpt,
}

impl Source {
    /// As it is written in a plan.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Conversation => "conversation",
            Self::Agent => "agent",
            Self::LongConversation => "long_conversation",
            Self::LongAgent => "long_agent",
            Self::Mooncake => "mooncake",
            Self::Azure => "azure",
            Self::Qwen => "qwen",
            Self::Burstgpt => "burstgpt",
        }
    }
}

/// How arrivals are spaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrivals {
    /// Poisson at `rate_per_gpu`.
    #[default]
    Poisson,
    /// Gamma gaps with the coefficient of variation `burstiness`.
    Bursty,
    /// As recorded, time multiplied so that the mean rate is `rate_per_gpu`.
    Recorded,
}

impl Default for Workload {
    fn default() -> Self {
        Self {
            source: Source::Agent,
            file: None,
            rate_per_gpu: 0.7,
            arrivals: Arrivals::Poisson,
            burstiness: 2.0,
            seconds: 60.0,
            warm_up: 0.2,
            length_scale: 1.0,
            longest: 131_072,
        }
    }
}

/// How transfers share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Network {
    /// One aggregate per rank and direction of a collective, or every pair.
    pub mode: Mode,
    /// Classes that the fabric carries, scavenger included: adjacent levels share one.
    pub levels_on_wire: u8,
    /// Bytes permitted at once.
    pub chunk_bytes: u64,
    /// Bytes in flight on a port.
    pub window_bytes: u64,
    /// Windows in flight where a receiver holds bytes up.
    pub overcommit: u32,
    /// Share of a collective's flows inside a class, where a flow of KV reuse has one: static QoS
    /// by weights, as of a switch that serves its queues round-robin.
    pub collective_weight: f64,
    /// That of a flow of the last stage.
    pub p2d_weight: f64,
    /// Time from a transfer's last byte on the wire to its completion, µs.
    pub latency_us: f64,
}

/// How a collective is carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// One aggregate per rank and direction; ends when all have drained.
    #[default]
    Fast,
    /// A flow for each pair of ranks.
    Exact,
}

impl Default for Network {
    fn default() -> Self {
        Self {
            mode: Mode::Fast,
            levels_on_wire: 8,
            chunk_bytes: 4 << 20,
            window_bytes: 8 << 20,
            overcommit: 1024,
            collective_weight: 1.0,
            p2d_weight: 1.0,
            latency_us: 10.0,
        }
    }
}
