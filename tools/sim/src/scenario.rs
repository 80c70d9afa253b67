//! The scenario of one run: cluster, model, workload, policy and seed.
//!
//! Every field has its unit in its name or its documentation. Defaults are those of the paper (MFS
//! §6.1) where the paper gives one. A plan file is a scenario with axes, see `plan`.

mod policy;
mod requests;
mod validate;

use std::fmt;
use std::path::PathBuf;

pub use policy::{Grants, Part, Policy};
pub use requests::RequestOrder;
pub use validate::Invalid;

use requests::is_default;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Scenario {
    pub cluster: Cluster,
    pub model: ModelChoice,
    pub serving: Serving,
    pub slo: Slo,
    pub workload: Workload,
    /// How the network shares its capacity between transfers.
    pub network: NetworkModel,
    pub policy: Policy,
    pub seed: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cluster {
    pub servers: u32,
    pub gpus_per_server: u32,
    /// Share of the servers that prefill. The others decode.
    pub prefill_share: f64,
    /// Name of a built-in GPU (`a100`, `h100`, `rtx3090`) or path of a TOML file.
    pub gpu: String,
    /// Rate of a NIC, Gb/s in each direction.
    pub nic_gbps: f64,
    /// Rate of a GPU into the NVSwitch, in GB/s in each direction (half of the sum in data sheets).
    /// 0 selects the rate of the GPU's file.
    pub nvlink_gbytes: f64,
    pub servers_per_rack: u32,
    /// Capacity below a leaf switch divided by the capacity above it. 1 is a full fat tree.
    pub oversubscription: f64,
    pub spreading: Spreading,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Spreading {
    /// Spreads packets evenly, so that all uplinks of a leaf act as one.
    #[default]
    Even,
    /// Puts each flow on one uplink by a hash of its endpoints (ECMP).
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

/// The model and how a prefill unit of `tp · max(ep, sp, dp)` GPUs splits it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelChoice {
    /// Name of a built-in model (`laxity sim models` lists them) or path of a TOML file.
    pub name: String,
    /// GPUs of a tensor-parallel group. A group is one rank and keeps one KV cache.
    pub tp: u32,
    /// Ranks of expert parallelism, which split the experts between them. Each rank has requests of
    /// its own, because attention is data-parallel, unless `sp` is equal. 1 means no expert
    /// parallelism.
    pub ep: u32,
    /// Ranks of sequence parallelism, which split the tokens and the KV cache of each request. 1
    /// means none. If it equals `ep`, the ranks that split the experts also split each request.
    pub sp: u32,
    /// Ranks of data parallelism without experts. They run the same step on requests of their own
    /// and exchange nothing. 1 means none.
    pub dp: u32,
    /// Skew of expert use, as the exponent of a Zipf distribution over experts. Each layer and unit
    /// has its own draw. 0 means even use.
    pub expert_skew: f64,
    /// Bytes of one value in the KV cache. 0 means what the model says.
    #[serde(skip_serializing_if = "is_default")]
    pub kv_bytes_per_value: f64,
}

impl Default for ModelChoice {
    fn default() -> Self {
        Self {
            name: "dbrx".into(),
            tp: 2,
            ep: 16,
            sp: 1,
            dp: 1,
            expert_skew: 0.2,
            kv_bytes_per_value: 0.0,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Serving {
    /// Maximum number of tokens that one rank computes in a batch, or with `sp` the whole unit.
    pub token_budget: u32,
    pub requests_per_batch: u32,
    /// Whether prompts longer than the rest of the budget are cut. Otherwise a prompt runs whole,
    /// if necessary alone.
    pub chunked: bool,
    /// Number of layers, beyond the one that computes, for which KV blocks are fetched.
    pub lookahead_layers: u16,
    pub routing: Routing,
    /// Weight in routing of a token that must be fetched or computed. A queued token has weight 1.
    pub overlap_weight: f64,
    /// Prefix-cache capacity of a unit, in tokens. The least recently used block is evicted first.
    pub cache_tokens: u64,
    /// Whether a unit that fetched blocks keeps a copy and serves other units from it.
    pub copy_on_fetch: bool,
    pub placement: Placement,
    /// GPUs of a decode rank. Their NICs share the rank's ingress.
    pub decode_tp: u32,
    #[serde(skip_serializing_if = "is_default")]
    pub requests: RequestOrder,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Routing {
    /// Minimises tokens to compute plus queued tokens, as Dynamo's KV-aware router does. Blocks
    /// that another unit holds are fetched.
    #[default]
    KvAware,
    /// Chooses the unit with the fewest queued tokens. Blocks that it lacks are fetched.
    LeastLoaded,
    RoundRobin,
    /// Chooses by load. Each block is stored on one unit, chosen by a hash of its prefix, and all
    /// others fetch it there. This models a storage tier with hot prefixes.
    StaticHomes,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Chooses the rank with the fewest bytes on their way to it.
    #[default]
    LeastLoaded,
    RoundRobin,
    Random,
    /// Chooses the rank that the KV cache is expected to reach first, by the queues and the links
    /// on the way, as NetKV does.
    NetworkCost,
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
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Slo {
    pub kind: SloKind,
    /// Factor that this duration is multiplied by (MFS §6.1: 3).
    pub factor: f64,
    /// Objective under `fixed`, in milliseconds.
    pub fixed_ms: f64,
    /// Lower limit of objectives, in milliseconds.
    pub least_ms: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SloKind {
    #[default]
    Alone,
    Mean,
    /// `fixed_ms`, the same for all requests.
    Fixed,
}

impl Default for Slo {
    fn default() -> Self {
        Self { kind: SloKind::Alone, factor: 3.0, fixed_ms: 500.0, least_ms: 0.0 }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Workload {
    pub source: Source,
    pub file: Option<PathBuf>,
    /// Arrivals per second and prefill GPU.
    pub rate_per_gpu: f64,
    pub arrivals: Arrivals,
    /// Coefficient of variation of the gaps under `bursty`.
    pub burstiness: f64,
    /// Virtual seconds of arrivals. All requests that arrived by then are served to their end.
    pub seconds: f64,
    /// Share of the requests, counted from the start, that belong to the warm-up.
    pub warm_up: f64,
    /// Factor that prompt lengths are multiplied by.
    pub length_scale: f64,
    pub longest: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Generated conversation turns: mean 2 k tokens, half of them reused (Qwen A, MFS §6.2).
    Conversation,
    /// Generated agent requests: mean 1 k tokens, 65 % reused, shared prefixes (Qwen B, MFS §6.2).
    #[default]
    Agent,
    /// Generated long conversation turns: mean 15 k tokens, 40 % reused (Mooncake, MFS §6.3).
    LongConversation,
    /// Generated long agent requests: mean 9 k tokens, 65 % reused (Mooncake, MFS §6.3).
    LongAgent,
    Mooncake,
    /// A trace in the CSV format of Azure's LLM inference traces.
    Azure,
    Qwen,
    /// A trace in BurstGPT's CSV format.
    Burstgpt,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrivals {
    /// A Poisson process with rate `rate_per_gpu`.
    #[default]
    Poisson,
    /// Gamma-distributed gaps with the coefficient of variation `burstiness`.
    Bursty,
    /// The recorded times, scaled so that the mean rate is `rate_per_gpu`.
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

/// How the network shares its capacity between transfers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NetworkModel {
    pub mode: Mode,
    /// Number of classes in the fabric, including the scavenger's. Adjacent levels share a class.
    pub levels_on_wire: u8,
    /// Maximum number of bytes of one permit.
    pub chunk_bytes: u64,
    /// Maximum number of bytes in flight on a port.
    pub window_bytes: u64,
    /// Windows that may be in flight while a receiver holds bytes up.
    pub overcommit: u32,
    /// Maximum number of bytes in flight from a port to one receiver, or from one holder, under
    /// `laxity`. 0 means no bound by receiver.
    #[serde(skip_serializing_if = "is_default")]
    pub peer_window_bytes: u64,
    /// Weight of a collective's flow inside a class, where a flow of KV reuse has weight 1. Models
    /// static QoS by weights, as in a switch that serves its queues round-robin.
    pub collective_weight: f64,
    /// Weight of a P2D flow inside a class, where a flow of KV reuse has weight 1.
    pub p2d_weight: f64,
    /// Time from a transfer's last byte on the wire to its completion, in microseconds.
    pub latency_us: f64,
    /// Share of each NIC's rate, in each direction, that traffic takes which no daemon sees, such
    /// as transfers that GPUs start. It comes in bursts at line rate before all else. 0 means none.
    #[serde(skip_serializing_if = "is_default")]
    pub ungoverned_share: f64,
    /// Mean time between two bursts of that traffic, in milliseconds.
    #[serde(skip_serializing_if = "is_usual_period")]
    pub ungoverned_period_ms: f64,
    /// What daemons do about traffic that they did not permit, as `[residual] mode` of `laxityd`.
    #[serde(skip_serializing_if = "is_default")]
    pub residual_mode: ResidualChoice,
    /// The share of a port's rate that scheduled traffic keeps, in thousandths.
    #[serde(skip_serializing_if = "is_usual_assurance")]
    pub residual_assured_permille: u16,
}

/// What daemons do about traffic that they did not permit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResidualChoice {
    /// They do nothing. For the outcome this is the same as the mode `measure` of `laxityd`.
    #[default]
    Off,
    /// They lower the rate and the window of a port by it.
    Follow,
}

/// The assured share of a port's rate, unless a plan says otherwise. `laxityd` has the same.
const ASSURED_PERMILLE: u16 = 250;

fn is_usual_assurance(permille: &u16) -> bool {
    *permille == ASSURED_PERMILLE
}

/// Mean time between two bursts of ungoverned traffic, unless a plan says otherwise.
const UNGOVERNED_PERIOD_MS: f64 = 5.0;

fn is_usual_period(period_ms: &f64) -> bool {
    *period_ms == UNGOVERNED_PERIOD_MS
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// One aggregate for each rank and direction. The collective ends when all have drained.
    #[default]
    Fast,
    Exact,
}

impl Default for NetworkModel {
    fn default() -> Self {
        Self {
            mode: Mode::Fast,
            levels_on_wire: 8,
            chunk_bytes: 4 << 20,
            window_bytes: 8 << 20,
            overcommit: 1024,
            peer_window_bytes: 0,
            collective_weight: 1.0,
            p2d_weight: 1.0,
            latency_us: 10.0,
            ungoverned_share: 0.0,
            ungoverned_period_ms: UNGOVERNED_PERIOD_MS,
            residual_mode: ResidualChoice::Off,
            residual_assured_permille: ASSURED_PERMILLE,
        }
    }
}
