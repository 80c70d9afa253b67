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

/// The daemon's configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// How far Laxity takes part.
    #[serde(with = "names::mode_name")]
    pub mode: Mode,
    /// The policy of all ports.
    #[serde(with = "names::policy_name")]
    pub policy: PolicyKind,
    /// What clients do to the traffic classes of their queue pairs and connections.
    #[serde(with = "names::marking_name")]
    pub marking: Marking,
    /// The socket that clients register at.
    pub socket: PathBuf,
    /// The socket that operators use.
    pub control: PathBuf,
    /// The address of the Prometheus endpoint. Empty: no endpoint.
    pub metrics: String,
    /// The objective on the time to first token of requests without a deadline of their own. It
    /// counts from the first record of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slo_ttft: Option<Nanos>,
    /// The log filter: a level, or directives such as `info,laxity_daemon::driver=debug`.
    pub log: String,
    /// The format of log lines.
    pub log_format: LogFormat,
    /// The scheduler thread and client limits.
    pub scheduler: SchedulerConfig,
    /// The users that may attach.
    pub access: AccessConfig,
    /// The levels and their DSCPs.
    pub levels: LevelsConfig,
    /// The parameters of the policies.
    pub tuning: TuningConfig,
    /// What the daemon does about foreign traffic.
    pub residual: ResidualConfig,
    /// The web page for people: its address, and from where it may be requested.
    pub web: WebConfig,
    /// The connection to the coordinator.
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
    /// How long the thread spins after the last record before it sleeps, in microseconds. A good
    /// value is the time that a wake-up takes. 0 suits machines with fewer cores than daemons and
    /// clients.
    pub spin_us: u64,
    /// The core that the thread is pinned to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<usize>,
    /// Lanes per client. Each thread that submits uses one.
    pub lanes: u16,
    /// Slots per lane: most flows of one thread that wait at once.
    pub slots: u16,
    /// Maximum number of processes that are attached at once.
    pub clients_max: usize,
    /// Maximum number of attached processes of one user other than root. Default: half of
    /// `clients_max`. A sixteenth of all places is reserved for root.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clients_per_uid_max: Option<usize>,
    /// Maximum number of flows of one process that are submitted and not completed. Flows beyond
    /// that are permitted at once, without scheduling.
    pub flows_per_client_max: usize,
    /// Maximum number of such flows of one trust domain. Its clients have equal parts.
    pub flows_per_domain_max: usize,
    /// Maximum number of known batches of one trust domain. Older ones are forgotten.
    pub batches_per_domain_max: usize,
    /// Maximum number of known requests of one trust domain. Older ones are forgotten.
    pub requests_per_domain_max: usize,
}

/// The users and groups that may use the sockets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AccessConfig {
    /// User ids that may attach, besides root and the daemon's own user.
    pub uids: Vec<u32>,
    /// Group ids whose members may attach.
    pub gids: Vec<u32>,
    /// Whether any user may attach.
    pub anyone: bool,
    /// Which clients trust each other: those of one `process`, `uid` or `group`, or of this `host`.
    /// They share ids of batches and requests, one order, and one part of each port. A change holds
    /// for clients that attach later.
    pub trust: TrustScope,
    /// File mode of the registration socket. The default is open, and the daemon checks
    /// `SO_PEERCRED`. So a refusal is counted, logged and explained to the client, which a closed
    /// socket would not do.
    #[serde(with = "names::octal")]
    pub socket_mode: u32,
    /// File mode of the control socket. A user who can write to it can switch scheduling off, so
    /// the default admits only owner and group.
    #[serde(with = "names::octal")]
    pub control_mode: u32,
}

/// The levels and their DSCPs (architecture §4.2).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LevelsConfig {
    /// `K`, the number of levels.
    pub count: u8,
    /// DSCP of each level, the highest level first. Levels may share a DSCP.
    pub dscp: Vec<u8>,
    /// The DSCP of the scavenger.
    pub scavenger_dscp: u8,
    /// InfiniBand's service level of each level, the highest first. The scavenger has the last.
    /// Empty: none is set, since a subnet may route by service level.
    pub sl: Vec<u8>,
}

/// The parameters of the policies. See `laxity_policy::LinkConfig`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TuningConfig {
    /// The scale `U` of the thresholds `Q_i = U · E^(−i)`.
    pub threshold_scale: f64,
    /// The base `E` of the thresholds.
    pub threshold_base: f64,
    /// The time constant of the average that measures the load `ρ`.
    pub load_time_constant: Nanos,
    /// The period of promotion after a request has finished computing.
    pub promotion_period: Nanos,
    /// Maximum number of windows in flight while a busy receiver holds bytes up. Bytes beyond the
    /// first window are permitted at the port's rate. 1 allows no second window by this rule.
    pub overcommit: u32,
    /// The share of a port that is reserved for the scavenger, in thousandths.
    pub scavenger_permille: u16,
    /// What `fair`, `sjf`, `edf` and `edf_low` treat as one unit: `flow` or `coflow`.
    #[serde(with = "names::granularity_name")]
    pub granularity: Granularity,
    /// The laxity below which `tent_edf` promotes a flow.
    pub slack_threshold: Nanos,
    /// Maximum number of requests that Algorithm 1 may have pruned at a time.
    pub drop_budget: usize,
    /// How long admission collects hints before it orders batches again. The hints of one arrival
    /// come one after another.
    pub order_debounce: Nanos,
    /// How long the daemon waits for the completion of permitted bytes before it writes them off.
    /// The rest of their flow then goes out unscheduled. So a client that loses a flow does not
    /// shrink the window of others. A client that loses over a quarter of a window is unscheduled
    /// for a while.
    pub completion_timeout: Nanos,
}

/// The configuration of one NIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicConfig {
    /// The name in reports, such as `mlx5_0` or `eth0`.
    pub name: String,
    /// The rate of each direction, or `"auto"`: as the kernel has it.
    pub rate: NicRate,
    /// The chunk. Default: what the port carries in 100 µs, as a power of two, 64 KiB to 1 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunk: Option<Bytes>,
    /// The window. Default: four chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<Bytes>,
    /// Bytes in flight to one known peer under `laxity`, 0 for no bound. Default: the window,
    /// times `overcommit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_window: Option<Bytes>,
    /// Addresses of the NIC for other hosts. Default: the kernel's, or all for the name `default`.
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
