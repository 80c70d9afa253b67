//! The configuration: its keys, their defaults and their checks.
//!
//! One struct is the file, the defaults and `--show-config`, so they can't differ. Names end in
//! their unit, unless the value carries it (`"20ms"`).

mod check;
mod classes;
mod coordinator;
mod discover;
mod error;
mod file;
mod names;
mod rate;
mod reload;
mod residual;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use laxity_listen::LogFormat;
use laxity_listen::page::WebConfig;
use laxity_policy::config::Granularity;
use laxity_policy::{LinkConfig, PolicyKind, Span};
use laxity_quantity::{Bytes, Nanos};
use laxity_shm::marking::Marking;
use serde::{Deserialize, Serialize};

use crate::domains::TrustScope;

pub use laxity_shm::layout::Mode;

pub use self::coordinator::CoordinatorConfig;
pub use self::error::{ConfigError, FILE_DEFAULT};
pub use self::rate::{ALL_DEVICES, NicRate};
pub use self::residual::{ResidualConfig, ResidualMode};

/// Maximum number of NICs. A record has one byte for the NIC, and clients index tables by it.
pub const NICS_MAX: usize = 64;

/// The configuration in force, for those that follow it.
pub type ConfigInForce = Arc<ArcSwap<Config>>;

/// The daemon's configuration. `dist/laxityd.toml` says what each key means.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    #[serde(with = "names::ModeName")]
    pub mode: Mode,
    #[serde(with = "names::policy_name")]
    pub policy: PolicyKind,
    #[serde(with = "names::MarkingName")]
    pub marking: Marking,
    pub socket: PathBuf,
    pub control: PathBuf,
    /// An address and a port, or empty: no endpoint.
    pub metrics: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slo_ttft: Option<Nanos>,
    pub log: String,
    pub log_format: LogFormat,
    pub scheduler: SchedulerConfig,
    pub access: AccessConfig,
    pub levels: LevelsConfig,
    pub tuning: TuningConfig,
    pub residual: ResidualConfig,
    pub web: WebConfig,
    pub coordinator: CoordinatorConfig,
    /// The NICs. Clients use the index in this list as the number of a NIC.
    pub nic: Vec<NicConfig>,
    /// What was discovered, if the file names no NIC. `nic` then follows what the kernel has.
    #[serde(skip)]
    pub discovered: Option<DiscoveredNics>,
    /// Keys of the file that only older releases knew.
    #[serde(skip)]
    pub retired: Vec<String>,
}

/// The NICs of the host at the last look that found any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiscoveredNics {
    names: Vec<String>,
    /// The kernel's folders of NICs. While the folder of a NIC is there and empty, the NIC is not
    /// gone, but has moved to the network namespace of a pod.
    folders: BTreeMap<String, PathBuf>,
    /// Whether they are RDMA devices. Then their network interfaces are no NICs, even while the
    /// driver of the RDMA devices is reloaded.
    are_rdma: bool,
}

/// Settings of the scheduler thread, of client memory and of client limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SchedulerConfig {
    pub spin_us: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<usize>,
    pub lanes: u16,
    pub slots: u16,
    pub clients_max: usize,
    /// Clients of one user other than root. Half of `clients_max` if it is not set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clients_per_uid_max: Option<usize>,
    pub flows_per_client_max: usize,
    pub flows_per_domain_max: usize,
    pub batches_per_domain_max: usize,
    pub requests_per_domain_max: usize,
}

/// The users and groups that may use the sockets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AccessConfig {
    pub uids: Vec<u32>,
    pub gids: Vec<u32>,
    pub anyone: bool,
    pub trust: TrustScope,
    /// File mode of the registration socket. The default is open, and the daemon checks
    /// `SO_PEERCRED`. So a refusal is counted, logged and explained to the client, which a closed
    /// socket would not do.
    #[serde(with = "names::octal")]
    pub socket_mode: u32,
    #[serde(with = "names::octal")]
    pub control_mode: u32,
}

/// The levels and their DSCPs (architecture §4.2).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LevelsConfig {
    /// `K` of the paper.
    pub count: u8,
    /// By level, the highest first.
    pub dscp: Vec<u8>,
    pub scavenger_dscp: u8,
    /// InfiniBand's service level of each level, the highest first. The scavenger has the last.
    pub sl: Vec<u8>,
}

/// The parameters of the policies, as in [`LinkConfig`], and of admission.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TuningConfig {
    pub threshold_scale: f64,
    pub threshold_base: f64,
    pub load_time_constant: Nanos,
    pub promotion_period: Nanos,
    pub overcommit: u32,
    pub scavenger_permille: u16,
    #[serde(with = "names::GranularityName")]
    pub granularity: Granularity,
    pub slack_threshold: Nanos,
    /// Maximum number of requests that Algorithm 1 may have pruned at a time.
    pub drop_budget: usize,
    /// How long admission collects hints before it orders batches again. The hints of one arrival
    /// come one after another.
    pub order_debounce: Nanos,
    /// Without this limit, a client that loses a flow would shrink the window of others for good.
    pub completion_timeout: Nanos,
}

/// A section `[[nic]]`: one NIC with two ports, egress and ingress.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicConfig {
    pub name: String,
    pub rate: NicRate,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunk: Option<Bytes>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<Bytes>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_window: Option<Bytes>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<std::net::IpAddr>,
    /// Whether the NIC was discovered, and the kernel does not have it now.
    #[serde(skip)]
    pub absent: bool,
}

impl NicConfig {
    /// Makes a NIC whose settings are the defaults.
    fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            rate: NicRate::AUTO,
            chunk: None,
            window: None,
            peer_window: None,
            addresses: Vec::new(),
            absent: false,
        }
    }

    /// Returns the configured or default chunk, in bytes.
    pub fn chunk_bytes(&self) -> u64 {
        self.chunk.map_or_else(
            || {
                let carried = (self.rate.bytes_per_s / 10_000).max(1);
                (1 << carried.ilog2()).clamp(64 << 10, 1 << 20)
            },
            |chunk| chunk.0,
        )
    }

    /// Returns the configured or default window, in bytes.
    pub fn window_bytes(&self) -> u64 {
        self.window.map_or_else(|| self.chunk_bytes().saturating_mul(4), |window| window.0)
    }

    /// Returns the configured or default bound on bytes to one peer, or 0 if there is none. With
    /// the default a lone peer gets what it would get without a bound.
    fn peer_window_bytes(&self, overcommit: u32) -> u64 {
        let all = || self.window_bytes().saturating_mul(u64::from(overcommit));
        self.peer_window.map_or_else(all, |window| window.0)
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            policy: PolicyKind::default(),
            marking: Marking::default(),
            socket: "/run/laxity/laxityd.sock".into(),
            control: laxity_wire::control::SOCKET_DEFAULT.into(),
            metrics: "127.0.0.1:7475".into(),
            slo_ttft: None,
            log: "info".into(),
            log_format: LogFormat::default(),
            scheduler: SchedulerConfig::default(),
            access: AccessConfig::default(),
            levels: LevelsConfig::default(),
            tuning: TuningConfig::default(),
            residual: ResidualConfig::default(),
            web: WebConfig::default(),
            coordinator: CoordinatorConfig::default(),
            nic: vec![NicConfig::new(ALL_DEVICES)],
            discovered: None,
            retired: Vec::new(),
        }
    }
}

impl SchedulerConfig {
    /// Returns the configured or default number of clients of one user other than root.
    pub fn clients_per_uid(&self) -> usize {
        self.clients_per_uid_max.unwrap_or_else(|| self.clients_max.div_ceil(2))
    }

    /// Returns how many of `places` only root may take.
    pub fn root_reserve(places: usize) -> usize {
        match places {
            0 | 1 => 0,
            _ => (places / 16).max(1),
        }
    }
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            spin_us: 50,
            cpu: None,
            lanes: 64,
            slots: 256,
            clients_max: 256,
            clients_per_uid_max: None,
            flows_per_client_max: 65_536,
            flows_per_domain_max: 262_144,
            batches_per_domain_max: 4096,
            requests_per_domain_max: 65_536,
        }
    }
}

impl Default for AccessConfig {
    fn default() -> Self {
        Self {
            uids: Vec::new(),
            gids: Vec::new(),
            anyone: false,
            trust: TrustScope::default(),
            socket_mode: 0o666,
            control_mode: 0o660,
        }
    }
}

impl Default for LevelsConfig {
    fn default() -> Self {
        let dscp = vec![46, 34, 26, 18, 18, 10, 10, 10];
        Self { count: 8, dscp, scavenger_dscp: 8, sl: Vec::new() }
    }
}

impl Default for TuningConfig {
    fn default() -> Self {
        let link = LinkConfig::default();
        Self {
            threshold_scale: link.threshold_scale,
            threshold_base: link.threshold_base,
            load_time_constant: Nanos(link.load_time_constant.0),
            promotion_period: Nanos(link.promotion_period.0),
            overcommit: link.overcommit,
            scavenger_permille: link.scavenger_permille,
            granularity: link.granularity,
            slack_threshold: Nanos(link.slack_threshold.0),
            drop_budget: laxity_policy::admission::AdmissionConfig::default().drop_budget,
            order_debounce: Nanos(500_000),
            completion_timeout: Nanos(10_000_000_000),
        }
    }
}

impl Config {
    /// Returns the configuration of the link for one direction of `nic`.
    pub fn link(&self, nic: &NicConfig) -> LinkConfig {
        LinkConfig {
            policy: self.policy,
            rate: nic.rate.bytes_per_s,
            chunk_bytes: nic.chunk_bytes(),
            window_bytes: nic.window_bytes(),
            overcommit: self.tuning.overcommit,
            peer_window_bytes: nic.peer_window_bytes(self.tuning.overcommit),
            levels: self.levels.count,
            threshold_scale: self.tuning.threshold_scale,
            threshold_base: self.tuning.threshold_base,
            load_time_constant: Span(self.tuning.load_time_constant.0),
            promotion_period: Span(self.tuning.promotion_period.0),
            scavenger_permille: self.tuning.scavenger_permille,
            granularity: self.tuning.granularity,
            slack_threshold: Span(self.tuning.slack_threshold.0),
            batches_max: self.scheduler.batches_per_domain_max,
            requests_max: self.scheduler.requests_per_domain_max,
        }
    }

    /// Returns the metrics address, or `None` if there is no endpoint.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.parse().ok()
    }
}

#[cfg(test)]
mod tests;
