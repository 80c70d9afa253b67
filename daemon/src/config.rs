//! What an operator can set, where it came from, and what is wrong with it.
//!
//! One struct is the file, the defaults, `--show-config` and the effective configuration, so that
//! none of them can drift from the others. No file is needed. Names end in their unit unless the
//! value carries it (`"20ms"`, `"100Gbit"`).

mod check;
mod error;
mod file;
mod names;
mod reload;

use std::net::SocketAddr;
use std::path::PathBuf;

use laxity_policy::config::{Granularity, LastStage, MluScope, Ties};
use laxity_policy::{Level, LinkConfig, PolicyKind, Span, Stage};
use laxity_quantity::{Bytes, Nanos, Rate};
use laxity_shm::layout::{self, LEVELS};
use serde::{Deserialize, Serialize};

pub use self::error::{ConfigError, FILE_DEFAULT};

/// Most NICs: a record names its NIC in a byte, and clients index tables with it.
pub const NICS_MAX: usize = 64;

/// Whether traffic is delayed at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Clients send as if there were no daemon.
    Off,
    /// Account and report, delay nothing.
    Observe,
    /// Bytes wait for permits.
    #[default]
    Enforce,
}

impl Mode {
    /// The name used in files and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Observe => "observe",
            Self::Enforce => "enforce",
        }
    }

    /// The mode of a name, if it is one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Off, Self::Observe, Self::Enforce]
            .into_iter()
            .find(|mode| mode.name() == name)
    }
}

impl From<layout::Mode> for Mode {
    fn from(mode: layout::Mode) -> Self {
        match mode {
            layout::Mode::Off => Self::Off,
            layout::Mode::Observe => Self::Observe,
            layout::Mode::Enforce => Self::Enforce,
        }
    }
}

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// For a person or the journal.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Everything that can be set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Whether traffic is delayed.
    pub mode: Mode,
    /// Policy of all ports.
    #[serde(with = "names::policy_name")]
    pub policy: PolicyKind,
    /// Where clients register.
    pub socket: PathBuf,
    /// Where operators ask.
    pub control: PathBuf,
    /// Address of the Prometheus endpoint; empty for none.
    pub metrics: String,
    /// Objective on the time to first token, for requests that have no deadline of their own:
    /// counted from the first sight of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slo_ttft: Option<Nanos>,
    /// What is logged: a level, or a filter such as `info,laxity_daemon::driver=debug`.
    pub log: String,
    /// How it is logged.
    pub log_format: LogFormat,
    /// The scheduler thread.
    pub scheduler: SchedulerConfig,
    /// Who may attach and who may operate.
    pub access: AccessConfig,
    /// Levels and their classes on the wire.
    pub levels: LevelsConfig,
    /// Parameters of the policies.
    pub tuning: TuningConfig,
    /// Who orders the work of several hosts.
    pub coordinator: CoordinatorConfig,
    /// The NICs. Their index in this list is the number that clients use.
    pub nic: Vec<NicConfig>,
}

/// The scheduler thread and the memory it shares with each client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SchedulerConfig {
    /// Microseconds of spinning after the last record before the thread sleeps. About the time a
    /// wake-up takes pays best; 0 suits machines with fewer cores than daemons and clients.
    pub spin_us: u64,
    /// Core that the thread is pinned to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<usize>,
    /// Lanes per client: threads of it that submit.
    pub lanes: u16,
    /// Slots per lane: flows of a thread that wait at once.
    pub slots: u16,
    /// Processes that may be attached at once.
    pub clients_max: usize,
    /// Of those, processes of one user, root apart. Default: half. A sixteenth of all places is
    /// kept for root.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clients_per_uid_max: Option<usize>,
    /// Living flows (submitted, not completed) of one process. One that has more is permitted
    /// without scheduling until some complete.
    pub flows_per_client_max: usize,
}

/// Who may use the sockets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AccessConfig {
    /// Users that may attach, besides root and the daemon's own.
    pub uids: Vec<u32>,
    /// Groups whose members may attach.
    pub gids: Vec<u32>,
    /// Any user may attach. Hints and flows of one can then move those of another back in the
    /// queue, never lose or read them.
    pub anyone: bool,
    /// Mode of the registration socket. It is open by default and the daemon decides by
    /// SO_PEERCRED: a refusal is then counted, logged and explained to the client, where a
    /// closed socket would leave it to guess.
    #[serde(with = "names::octal")]
    pub socket_mode: u32,
    /// Mode of the control socket. Whoever can write to it can switch the scheduling off, so
    /// owner and group only.
    #[serde(with = "names::octal")]
    pub control_mode: u32,
}

/// Levels and their classes on the wire (architecture §4.2).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LevelsConfig {
    /// `K`.
    pub count: u8,
    /// DSCP per level, the highest first. Levels may share one, the order is kept.
    pub dscp: Vec<u8>,
    /// DSCP of the scavenger.
    pub scavenger_dscp: u8,
}

/// Parameters of the policies; see `laxity_policy::LinkConfig`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TuningConfig {
    /// `U` of the thresholds `Q_i = U · E^(−i)`.
    pub threshold_scale: f64,
    /// `E` of the thresholds.
    pub threshold_base: f64,
    /// Time constant of the average that measures the load `ρ`.
    pub load_time_constant: Nanos,
    /// Period of promotion after a request has finished computing.
    pub promotion_period: Nanos,
    /// `below_early` (the paper's §4.5) or `within_level` (its §4.2); `mfs` only.
    #[serde(with = "names::last_stage_name")]
    pub last_stage: LastStage,
    /// Whose bytes count for MLU: `per_flow` or `per_request`; `mfs` only.
    #[serde(with = "names::mlu_name")]
    pub mlu: MluScope,
    /// Windows that may be in flight where a busy receiver holds bytes up; beyond the first, bytes
    /// are permitted at the port's rate. 1: never more than one.
    pub overcommit: u32,
    /// Share of a port, in thousandths, that scavenged work is sure of.
    pub scavenger_permille: u16,
    /// What `fair`, `sjf`, `edf` and `edf_low` take for one job: `flow` or `coflow`.
    #[serde(with = "names::granularity_name")]
    pub granularity: Granularity,
    /// How `sjf`, `edf`, `edf_low` and `tent_edf` order equals: `arrival`, `fair` or `shortest`.
    #[serde(with = "names::ties_name")]
    pub ties: Ties,
    /// Slack below which `tent_edf` promotes a flow.
    pub slack_threshold: Nanos,
    /// Requests that Algorithm 1 may have pruned at a time.
    pub drop_budget: usize,
    /// How long hints are gathered before batches are ordered anew: an arrival comes in pieces.
    pub order_debounce: Nanos,
    /// Permitted bytes whose completion is not reported for this long no longer count as in
    /// flight, and what is left of their flow goes out unscheduled: a client that loses track of a
    /// flow must not shrink the window for all others. One that loses more than a quarter of a
    /// window is not scheduled for a while.
    pub completion_timeout: Nanos,
}

/// The coordinator (docs/coordinator.md). Without one, and whenever it can't be reached, a daemon
/// orders what it sees.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CoordinatorConfig {
    /// Where it is, such as `https://coordinator.example:7471`; empty for none. `http://` is for
    /// one on this host.
    pub endpoint: String,
    /// Reach a coordinator on another host without TLS. Whoever is in between may then read reports
    /// and change orders.
    pub insecure: bool,
    /// PEM file of who signed the coordinator's certificate; for `https://`, and empty without.
    /// This file, `cert` and `key` are read anew for each connection.
    pub ca: PathBuf,
    /// PEM file of this host's certificate, of URI `laxity://daemon/HOST`, and what leads from it
    /// to its CA.
    pub cert: PathBuf,
    /// PEM file of its key.
    pub key: PathBuf,
    /// The name in the coordinator's certificate; empty for that of the endpoint.
    pub server_name: String,
    /// What this host is called there, the same in no other; empty for the name that the kernel
    /// has.
    pub host: String,
    /// How long its order is followed without news of it. The coordinator may say less.
    pub order_age_limit: Nanos,
    /// How long what this host reads from another waits at most while the coordinator lets others
    /// go first.
    pub fetch_wait_max: Nanos,
    /// First wait after the stream has failed. It doubles with each failure.
    pub backoff_min: Nanos,
    /// Longest wait.
    pub backoff_max: Nanos,
}

impl Default for CoordinatorConfig {
    fn default() -> Self {
        Self {
            endpoint: String::new(),
            insecure: false,
            ca: PathBuf::new(),
            cert: PathBuf::new(),
            key: PathBuf::new(),
            server_name: String::new(),
            host: String::new(),
            order_age_limit: Nanos(5_000_000_000),
            fetch_wait_max: Nanos(250_000_000),
            backoff_min: Nanos(100_000_000),
            backoff_max: Nanos(10_000_000_000),
        }
    }
}

/// One NIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicConfig {
    /// For reports, such as `mlx5_0` or `eth0`.
    pub name: String,
    /// Rate of each direction.
    pub rate: Rate,
    /// Bytes permitted at once. Default: what 100 µs carry, as a power of two from 64 KiB to 1 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunk: Option<Bytes>,
    /// Bytes in flight at most. Default: four chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<Bytes>,
    /// Addresses at which other hosts reach it, for the coordinator. Default: those that the kernel
    /// knows of a network device or an RDMA device of that name; of all for one that is called
    /// `default`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<std::net::IpAddr>,
}

impl NicConfig {
    /// The chunk that holds.
    #[must_use]
    pub fn chunk_bytes(&self) -> u64 {
        self.chunk.map_or_else(
            || {
                let carried = (self.rate.0 / 10_000).max(1);
                (1 << carried.ilog2()).clamp(64 << 10, 1 << 20)
            },
            |chunk| chunk.0,
        )
    }

    /// The window that holds.
    #[must_use]
    pub fn window_bytes(&self) -> u64 {
        self.window
            .map_or_else(|| self.chunk_bytes().saturating_mul(4), |window| window.0)
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            policy: PolicyKind::default(),
            socket: "/run/laxity/laxityd.sock".into(),
            control: laxity_wire::control::SOCKET_DEFAULT.into(),
            metrics: "127.0.0.1:9464".into(),
            slo_ttft: None,
            log: "info".into(),
            log_format: LogFormat::default(),
            scheduler: SchedulerConfig::default(),
            access: AccessConfig::default(),
            levels: LevelsConfig::default(),
            tuning: TuningConfig::default(),
            coordinator: CoordinatorConfig::default(),
            nic: vec![NicConfig {
                name: "default".into(),
                rate: Rate(12_500_000_000),
                chunk: None,
                window: None,
                addresses: Vec::new(),
            }],
        }
    }
}

impl SchedulerConfig {
    /// The share of one user, root apart, that holds.
    #[must_use]
    pub fn clients_per_uid(&self) -> usize {
        self.clients_per_uid_max
            .unwrap_or_else(|| self.clients_max.div_ceil(2))
    }

    /// Of `places`, those that only root may take.
    #[must_use]
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
        }
    }
}

impl Default for AccessConfig {
    fn default() -> Self {
        Self {
            uids: Vec::new(),
            gids: Vec::new(),
            anyone: false,
            socket_mode: 0o666,
            control_mode: 0o660,
        }
    }
}

impl Default for LevelsConfig {
    fn default() -> Self {
        Self {
            count: 8,
            dscp: vec![46, 34, 26, 18, 18, 10, 10, 10],
            scavenger_dscp: 8,
        }
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
            last_stage: link.last_stage,
            mlu: link.mlu_scope,
            overcommit: link.overcommit,
            scavenger_permille: link.scavenger_permille,
            granularity: link.granularity,
            ties: link.ties,
            slack_threshold: Nanos(link.slack_threshold.0),
            drop_budget: laxity_policy::admission::AdmissionConfig::default().drop_budget,
            order_debounce: Nanos(500_000),
            completion_timeout: Nanos(10_000_000_000),
        }
    }
}

impl Config {
    /// The arbitration of one direction of `nic`.
    #[must_use]
    pub fn link(&self, nic: &NicConfig) -> LinkConfig {
        LinkConfig {
            policy: self.policy,
            rate: nic.rate.0,
            chunk_bytes: nic.chunk_bytes(),
            window_bytes: nic.window_bytes(),
            overcommit: self.tuning.overcommit,
            levels: self.levels.count,
            threshold_scale: self.tuning.threshold_scale,
            threshold_base: self.tuning.threshold_base,
            load_time_constant: Span(self.tuning.load_time_constant.0),
            promotion_period: Span(self.tuning.promotion_period.0),
            last_stage: self.tuning.last_stage,
            mlu_scope: self.tuning.mlu,
            scavenger_permille: self.tuning.scavenger_permille,
            granularity: self.tuning.granularity,
            ties: self.tuning.ties,
            slack_threshold: Span(self.tuning.slack_threshold.0),
        }
    }

    /// DSCP by [`Level::row`], the scavenger last; levels that are not configured have its.
    #[must_use]
    pub fn dscp_by_row(&self) -> [u8; Level::ROWS] {
        let mut table = [self.levels.scavenger_dscp; Level::ROWS];
        let count = self.levels.dscp.len().min(Level::ROWS - 1);
        table[..count].copy_from_slice(&self.levels.dscp[..count]);
        table
    }

    /// The same in the order of a region's table: the scavenger first.
    #[must_use]
    pub fn dscp_of_region(&self) -> [u8; LEVELS] {
        let mut table = self.dscp_by_row();
        table.rotate_right(1);
        table
    }

    /// DSCP by [`Stage::index`], for transfers whose class can't be chosen one by one. Collectives
    /// have the level that credit gives them, KV reuse the level below it, and P2D the lowest level
    /// that differs from the scavenger. All others have the scavenger's.
    #[must_use]
    pub fn dscp_of_stages(&self, collective: Level) -> [u8; Stage::ALL.len()] {
        let (table, scavenger) = (self.dscp_by_row(), self.levels.scavenger_dscp);
        Stage::ALL.map(|stage| match stage {
            Stage::Collective => table[collective.row()],
            Stage::KvReuse => table[Level(collective.0.saturating_add(1)).row()],
            Stage::P2d => {
                let lowest = table.into_iter().rfind(|dscp| *dscp != scavenger);
                lowest.unwrap_or(scavenger)
            }
            _ => scavenger,
        })
    }

    /// The metrics address, `None` if there is no endpoint.
    #[must_use]
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.parse().ok()
    }
}

#[cfg(test)]
mod tests;
