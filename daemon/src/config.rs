//! What an operator can set, where it came from, and what is wrong with it.
//!
//! One struct is the file, the defaults, `--show-config` and the effective configuration, so that
//! none of them can drift from the others. No file is needed. Names end in their unit unless the
//! value carries it (`"20ms"`, `"100Gbit"`).

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use laxity_policy::config::{Granularity, LastStage, Ties};
use laxity_policy::{Level, LinkConfig, PolicyKind, Span};
use laxity_shm::layout::{self, LANES_MAX, LEVELS, SLOTS_MAX, SLOTS_MIN};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::quantity::{Bytes, Nanos, Rate};

/// The file that is read if no other is named, and may be missing.
pub const FILE_DEFAULT: &str = "/etc/laxity/laxityd.toml";

/// Most NICs: a record names its NIC in a byte, and clients index tables with it.
pub const NICS_MAX: usize = 64;

/// A configuration that cannot be used. The text names the file, the line and what to do.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read. Create it, fix its permissions, or start without `--config`.
    #[error("cannot read {path}: {source}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// Something in the file is wrong: the place, the line itself, and what would be right.
    #[error(
        "{origin}:{line}: {problem}\n{excerpt}  fix it, then test with `laxityd --check-config`; `laxityd --show-config` lists every key"
    )]
    File {
        /// The file.
        origin: String,
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
        /// The line as written.
        excerpt: String,
    },
    /// A `--set` is wrong.
    #[error("--set {assignment}: {problem}")]
    Set {
        /// As given.
        assignment: String,
        /// What is wrong.
        problem: String,
    },
}

/// Whether traffic is delayed at all (DESIGN §3).
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
    #[serde(with = "policy_name")]
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
    #[serde(with = "octal")]
    pub socket_mode: u32,
    /// Mode of the control socket. Whoever can write to it can switch the scheduling off, so
    /// owner and group only.
    #[serde(with = "octal")]
    pub control_mode: u32,
}

/// Levels and their classes on the wire (DESIGN §4.2).
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
    #[serde(with = "last_stage_name")]
    pub last_stage: LastStage,
    /// Share of a port, in thousandths, that scavenged work is sure of.
    pub scavenger_permille: u16,
    /// What `fair`, `sjf`, `edf` and `edf_low` take for one job: `flow` or `coflow`.
    #[serde(with = "granularity_name")]
    pub granularity: Granularity,
    /// How `sjf`, `edf`, `edf_low` and `tent_edf` order equals: `arrival`, `fair` or `shortest`.
    #[serde(with = "ties_name")]
    pub ties: Ties,
    /// Slack below which `tent_edf` promotes a flow.
    pub slack_threshold: Nanos,
    /// Requests that Algorithm 1 may have pruned at a time.
    pub drop_budget: usize,
    /// How long hints are gathered before batches are ordered anew: an arrival comes in pieces.
    pub order_debounce: Nanos,
    /// Permitted bytes whose completion is not reported for this long no longer count as in
    /// flight: a client that loses track of a flow must not shrink the window for all others.
    pub completion_timeout: Nanos,
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
            nic: vec![NicConfig {
                name: "default".into(),
                rate: Rate(12_500_000_000),
                chunk: None,
                window: None,
            }],
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
            scavenger_permille: link.scavenger_permille,
            granularity: link.granularity,
            ties: link.ties,
            slack_threshold: Nanos(link.slack_threshold.0),
            drop_budget: laxity_policy::admission::AdmissionConfig::default().drop_budget,
            order_debounce: Nanos(500_000),
            completion_timeout: Nanos(2_000_000_000),
        }
    }
}

/// A value that parses and makes no sense: where, what, and what to put instead.
struct Nonsense {
    key: String,
    problem: String,
}

impl Config {
    /// Reads `path`, or the defaults if it is `None` and there is no default file, and applies
    /// the `key=value` assignments of `sets` on top.
    ///
    /// # Errors
    /// The first thing that is wrong; show it and exit, or keep the old configuration on reload.
    pub fn load(path: Option<&Path>, sets: &[String]) -> Result<Self, ConfigError> {
        let config = match path {
            Some(path) => Self::from_file(path)?,
            None if Path::new(FILE_DEFAULT).exists() => Self::from_file(Path::new(FILE_DEFAULT))?,
            None => Self::default(),
        };
        config.with_assignments(sets)
    }

    fn from_file(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text, &path.display().to_string())
    }

    /// Parses and checks `text`; `origin` names it in errors.
    ///
    /// # Errors
    /// [`ConfigError::File`].
    pub fn parse(text: &str, origin: &str) -> Result<Self, ConfigError> {
        let fail = |problem: String, offset: usize| {
            let line = text[..offset.min(text.len())].matches('\n').count() + 1;
            let mut excerpt = String::new();
            if let Some(written) = text.lines().nth(line - 1) {
                let _ = writeln!(excerpt, "{line:>5} | {written}");
            }
            ConfigError::File {
                origin: origin.to_owned(),
                line,
                problem,
                excerpt,
            }
        };
        let config: Self = toml::from_str(text).map_err(|error| {
            fail(
                error.message().to_owned(),
                error.span().map_or(0, |span| span.start),
            )
        })?;
        config.check().map_err(|nonsense| {
            fail(
                format!("{}: {}", nonsense.key, nonsense.problem),
                locate(text, &nonsense.key),
            )
        })?;
        Ok(config)
    }

    /// Applies `key=value` assignments; keys are dotted, elements of lists are numbers
    /// (`nic.0.rate=25Gbit`).
    fn with_assignments(self, sets: &[String]) -> Result<Self, ConfigError> {
        if sets.is_empty() {
            return Ok(self);
        }
        let mut config = self;
        for assignment in sets {
            let fail = |problem: String| ConfigError::Set {
                assignment: assignment.clone(),
                problem,
            };
            let (key, text) = assignment
                .split_once('=')
                .ok_or_else(|| fail("write key=value, such as scheduler.spin_us=0".into()))?;
            let value = toml::from_str::<toml::Table>(&format!("v = {text}"))
                .ok()
                .and_then(|mut table| table.remove("v"))
                .unwrap_or_else(|| toml::Value::String(text.trim().to_owned()));
            let mut root =
                toml::Value::try_from(&config).map_err(|error| fail(error.to_string()))?;
            *place(&mut root, key.trim()).ok_or_else(|| {
                fail("no such place; `laxityd --show-config` lists every key".into())
            })? = value;
            config = root.try_into().map_err(|error: toml::de::Error| {
                fail(
                    error
                        .message()
                        .lines()
                        .next()
                        .unwrap_or_default()
                        .to_owned(),
                )
            })?;
            config
                .check()
                .map_err(|e| fail(format!("{}: {}", e.key, e.problem)))?;
        }
        Ok(config)
    }

    /// The configuration as a file that, when read, gives it again.
    #[must_use]
    pub fn to_toml(&self) -> String {
        toml::to_string(self).unwrap_or_else(|error| format!("# cannot be shown: {error}\n"))
    }

    /// The arbitration of one direction of `nic`.
    #[must_use]
    pub fn link(&self, nic: &NicConfig) -> LinkConfig {
        LinkConfig {
            policy: self.policy,
            rate: nic.rate.0,
            chunk_bytes: nic.chunk_bytes(),
            window_bytes: nic.window_bytes(),
            levels: self.levels.count,
            threshold_scale: self.tuning.threshold_scale,
            threshold_base: self.tuning.threshold_base,
            load_time_constant: Span(self.tuning.load_time_constant.0),
            promotion_period: Span(self.tuning.promotion_period.0),
            last_stage: self.tuning.last_stage,
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

    /// The metrics address, `None` if there is no endpoint.
    #[must_use]
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.parse().ok()
    }

    fn check(&self) -> Result<(), Nonsense> {
        let fail = |key: &str, problem: String| {
            Err(Nonsense {
                key: key.to_owned(),
                problem,
            })
        };
        if !self.metrics.is_empty() && self.metrics_address().is_none() {
            return fail(
                "metrics",
                format!("`{}` is not ADDRESS:PORT; use \"\" for none", self.metrics),
            );
        }
        if self.socket == self.control {
            return fail("control", "must be another path than `socket`".into());
        }
        if let Err(error) = tracing_subscriber::EnvFilter::try_new(&self.log) {
            return fail("log", format!("{error}; write a level such as \"info\""));
        }
        let scheduler = &self.scheduler;
        if !(1..=LANES_MAX).contains(&scheduler.lanes) {
            return fail(
                "scheduler.lanes",
                format!("{} is not in 1..={LANES_MAX}", scheduler.lanes),
            );
        }
        if !(SLOTS_MIN..=SLOTS_MAX).contains(&scheduler.slots) {
            return fail(
                "scheduler.slots",
                format!("{} is not in {SLOTS_MIN}..={SLOTS_MAX}", scheduler.slots),
            );
        }
        if !(1..=16_384).contains(&scheduler.clients_max) {
            return fail(
                "scheduler.clients_max",
                format!("{} is not in 1..=16384", scheduler.clients_max),
            );
        }
        if scheduler.flows_per_client_max == 0 {
            return fail(
                "scheduler.flows_per_client_max",
                "must be at least 1".into(),
            );
        }
        if scheduler.spin_us > 1_000_000 {
            return fail(
                "scheduler.spin_us",
                "more than a second; did you mean less?".into(),
            );
        }
        for (key, mode) in [
            ("access.socket_mode", self.access.socket_mode),
            ("access.control_mode", self.access.control_mode),
        ] {
            if mode > 0o777 {
                return fail(key, format!("{mode:o} is not a file mode; write \"0660\""));
            }
        }
        let levels = &self.levels;
        if levels.dscp.len() != usize::from(levels.count) {
            return fail(
                "levels.dscp",
                format!(
                    "has {} entries for {} levels; give one per level, the highest first (levels may share a DSCP)",
                    levels.dscp.len(),
                    levels.count
                ),
            );
        }
        if let Some(dscp) = levels.dscp.iter().find(|dscp| **dscp > 63) {
            return fail("levels.dscp", format!("{dscp} is not in 0..=63"));
        }
        if levels.scavenger_dscp > 63 {
            return fail(
                "levels.scavenger_dscp",
                format!("{} is not in 0..=63", levels.scavenger_dscp),
            );
        }
        if self.slo_ttft == Some(Nanos(0)) {
            return fail(
                "slo_ttft",
                "must be more than zero; leave it out for none".into(),
            );
        }
        if self.nic.is_empty() || self.nic.len() > NICS_MAX {
            return fail(
                "nic",
                format!("{} NICs; give 1 to {NICS_MAX}", self.nic.len()),
            );
        }
        for (index, nic) in self.nic.iter().enumerate() {
            self.check_nic(index, nic)?;
        }
        Ok(())
    }

    fn check_nic(&self, index: usize, nic: &NicConfig) -> Result<(), Nonsense> {
        if let Some(other) = self.nic[..index]
            .iter()
            .position(|other| other.name == nic.name)
        {
            return Err(Nonsense {
                key: format!("nic.{index}.name"),
                problem: format!("`{}` is the name of NIC {other} already", nic.name),
            });
        }
        self.link(nic).validate().map_err(|invalid| Nonsense {
            key: match invalid.field {
                "rate" => format!("nic.{index}.rate"),
                "chunk_bytes" => format!("nic.{index}.chunk"),
                "window_bytes" => format!("nic.{index}.window"),
                "levels" => "levels.count".into(),
                field => format!("tuning.{field}"),
            },
            problem: invalid.problem,
        })
    }

    /// What differs from `running` and only takes effect after a restart, by key.
    #[must_use]
    pub fn needs_restart(&self, running: &Self) -> Vec<&'static str> {
        let mut keys = Vec::new();
        let mut differs = |key, differs| {
            if differs {
                keys.push(key);
            }
        };
        differs("socket", self.socket != running.socket);
        differs("control", self.control != running.control);
        differs("metrics", self.metrics != running.metrics);
        differs("log_format", self.log_format != running.log_format);
        differs("scheduler.cpu", self.scheduler.cpu != running.scheduler.cpu);
        differs(
            "access.socket_mode",
            self.access.socket_mode != running.access.socket_mode,
        );
        differs(
            "access.control_mode",
            self.access.control_mode != running.access.control_mode,
        );
        differs(
            "nic (names and their number)",
            !self
                .nic
                .iter()
                .map(|n| &n.name)
                .eq(running.nic.iter().map(|n| &n.name)),
        );
        keys
    }

    /// This configuration with what needs a restart taken from `running`: what holds after a
    /// reload.
    #[must_use]
    pub fn reloaded_over(&self, running: &Self) -> Self {
        let same_nics = self
            .nic
            .iter()
            .map(|n| &n.name)
            .eq(running.nic.iter().map(|n| &n.name));
        Self {
            socket: running.socket.clone(),
            control: running.control.clone(),
            metrics: running.metrics.clone(),
            log_format: running.log_format,
            scheduler: SchedulerConfig {
                cpu: running.scheduler.cpu,
                ..self.scheduler.clone()
            },
            access: AccessConfig {
                socket_mode: running.access.socket_mode,
                control_mode: running.access.control_mode,
                ..self.access.clone()
            },
            nic: if same_nics {
                self.nic.clone()
            } else {
                running.nic.clone()
            },
            ..self.clone()
        }
    }
}

/// The value at a dotted `key`; a leaf that is absent is made if its table is there, so that
/// optional keys can be set.
fn place<'v>(root: &'v mut toml::Value, key: &str) -> Option<&'v mut toml::Value> {
    let mut at = root;
    for part in key.split('.') {
        at = match at {
            toml::Value::Table(table) => table
                .entry(part.to_owned())
                .or_insert(toml::Value::Boolean(false)),
            toml::Value::Array(array) => array.get_mut(part.parse::<usize>().ok()?)?,
            _ => return None,
        };
    }
    Some(at)
}

/// Offset of the dotted `key` in `text`, or of the deepest part of it that is written there.
fn locate(text: &str, key: &str) -> usize {
    use toml::de::{DeTable, DeValue};
    let Ok(root) = DeTable::parse(text) else {
        return 0;
    };
    let mut found = 0;
    let mut at = &DeValue::Table(root.into_inner());
    for part in key.split('.') {
        let next = match at {
            DeValue::Table(table) => table
                .iter()
                .find(|(name, _)| name.get_ref() == part)
                .map(|(name, value)| (name.span().start, value)),
            DeValue::Array(array) => part
                .parse::<usize>()
                .ok()
                .and_then(|index| array.get(index))
                .map(|value| (value.span().start, value)),
            _ => None,
        };
        let Some((offset, value)) = next else { break };
        found = offset;
        at = value.get_ref();
    }
    found
}

mod policy_name {
    //! [`PolicyKind`](super::PolicyKind) by its name; the policy crate depends on nothing, serde
    //! included.
    use laxity_policy::PolicyKind;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(kind: &PolicyKind, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(kind.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<PolicyKind, D::Error> {
        String::deserialize(d)?.parse().map_err(D::Error::custom)
    }
}

/// Enums of the policy by name, in a module for `#[serde(with = …)]`.
macro_rules! names {
    ($module:ident, $type:ident, $($name:literal = $variant:ident),+) => {
        mod $module {
            //! The policy depends on nothing, serde included, so its names are given here.
            use laxity_policy::config::$type;
            use serde::{Deserialize, Deserializer, Serializer, de::Error};

            pub(super) fn serialize<S: Serializer>(value: &$type, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_str(match value { $($type::$variant => $name),+ })
            }

            pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<$type, D::Error> {
                match String::deserialize(d)?.as_str() {
                    $($name => Ok($type::$variant),)+
                    other => Err(D::Error::unknown_variant(other, &[$($name),+])),
                }
            }
        }
    };
}

names!(
    last_stage_name,
    LastStage,
    "below_early" = BelowEarly,
    "within_level" = WithinLevel
);
names!(
    granularity_name,
    Granularity,
    "flow" = Flow,
    "coflow" = Coflow
);
names!(
    ties_name,
    Ties,
    "arrival" = Arrival,
    "fair" = Fair,
    "shortest" = Shortest
);

mod octal {
    //! File modes, as text in octal: `0o660` would be read back as 432 by a person.
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(mode: &u32, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&format!("{mode:04o}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<u32, D::Error> {
        let text = String::deserialize(d)?;
        u32::from_str_radix(&text, 8)
            .map_err(|_| D::Error::custom(format!("`{text}` is not a file mode; write \"0660\"")))
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
