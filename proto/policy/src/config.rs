//! The configuration of a link, with the defaults of architecture §4.2.

use core::fmt;
use core::str::FromStr;

use laxity_types::Level;

use crate::time::Span;

/// Maximum number of batches that a link knows.
pub const BATCHES_MAX: usize = 65_536;
/// Maximum number of requests that a link knows.
pub const REQUESTS_MAX: usize = 262_144;

/// The policy that arbitrates a port. All policies run behind the same interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PolicyKind {
    /// Collectives first, then KV reuse and P2D together, by laxity and deadline.
    #[default]
    Laxity,
    /// The policy of the paper without changes.
    Mfs,
    /// Max-min fairness between flows: what a network does by itself.
    Fair,
    /// Shortest job first.
    Sjf,
    /// Earliest deadline first. Flows with an implicit deadline share what is left (MFS §6.3).
    Edf,
    /// Earliest deadline first, but with flows of an explicit deadline *below* implicit ones.
    EdfLow,
    /// Karuna: minimal rate for flows with a deadline, the others by size.
    Karuna,
    /// Karuna that gives idle time to deadline flows.
    KarunaWc,
    /// Static classes, with collectives above KV traffic: what operators configure today.
    TwoClass,
    /// Priority, then deadline, with promotion on slack: as Mooncake's TENT first ordered traffic.
    TentEdf,
    /// Two classes weighted 99 : 1, collectives over all other traffic, as in DualPath.
    TwoClass99,
    /// Priority, then predicted MLU, and doomed transfers scavenged: as Mooncake's TENT does now.
    Tent,
}

impl PolicyKind {
    /// All policies, in the order in which tables show them.
    pub const ALL: [Self; 12] = [
        Self::Fair,
        Self::Sjf,
        Self::Edf,
        Self::EdfLow,
        Self::Karuna,
        Self::KarunaWc,
        Self::TwoClass,
        Self::TwoClass99,
        Self::TentEdf,
        Self::Tent,
        Self::Mfs,
        Self::Laxity,
    ];

    /// Returns the name used in configuration and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Laxity => "laxity",
            Self::Mfs => "mfs",
            Self::Fair => "fair",
            Self::Sjf => "sjf",
            Self::Edf => "edf",
            Self::EdfLow => "edf_low",
            Self::Karuna => "karuna",
            Self::KarunaWc => "karuna_wc",
            Self::TwoClass => "two_class",
            Self::TwoClass99 => "two_class_99",
            Self::TentEdf => "tent_edf",
            Self::Tent => "tent",
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The error for a name of no policy. Its message lists the policies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownPolicy(pub String);

impl fmt::Display for UnknownPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown policy `{}`; known are", self.0)?;
        for (i, kind) in PolicyKind::ALL.iter().enumerate() {
            write!(f, "{} {kind}", if i == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl core::error::Error for UnknownPolicy {}

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;
    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}

/// What a baseline treats as one job. This choice changes the results of baselines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Granularity {
    /// Each flow is a job (the default).
    #[default]
    Flow,
    /// The flows of one batch, stage and layer are a job.
    Coflow,
}

/// Configuration of one port's arbitration.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkConfig {
    /// The policy that orders the port's flows.
    pub policy: PolicyKind,
    /// Rate of the port, `B`, in bytes per second.
    pub rate: u64,
    /// Largest permit in bytes. A flow of higher level waits for at most one such chunk.
    pub chunk_bytes: u64,
    /// Bytes that may be in flight on the port: a bandwidth-delay product plus one chunk.
    pub window_bytes: u64,
    /// Maximum number of windows in flight. Beyond the first window, bytes are permitted no faster
    /// than the port sends: bytes that had time to leave and have not are queued elsewhere, such as
    /// before a receiver that others send to. At 1 nothing is permitted beyond the window.
    pub overcommit: u32,
    /// Bytes that may be in flight to one known peer, at the level of the next bytes or above. 0
    /// means no bound. With it a port permits up to [`PEER_WINDOWS`](crate::link::PEER_WINDOWS)
    /// windows, at its rate. Only `laxity` uses it.
    pub peer_window_bytes: u64,
    /// `K`, number of levels, 2 to [`Level::COUNT_MAX`].
    pub levels: u8,
    /// `U` of the thresholds `Q_i = U · E^(−i)` (MFS §4.3). `laxity` does not use it.
    pub threshold_scale: f64,
    /// `E` of the thresholds, greater than one. In `laxity`, the ratio of slack between levels.
    pub threshold_base: f64,
    /// Time constant of the EWMA that measures `ρ`.
    pub load_time_constant: Span,
    /// Period of promotion after a request has finished computing (MFS §4.5).
    pub promotion_period: Span,
    /// Guaranteed share of the port for scavenged work, in parts per thousand. With it scavenged
    /// work finishes even if the levels always have work (architecture §4.3).
    pub scavenger_permille: u16,
    /// What `fair`, `sjf`, `edf` and `edf_low` treat as one job.
    pub granularity: Granularity,
    /// Slack below which `tent_edf` promotes a flow to its highest class.
    pub slack_threshold: Span,
    /// Maximum number of batches that the link knows.
    pub batches_max: usize,
    /// Maximum number of requests that the link knows.
    pub requests_max: usize,
}

impl Default for LinkConfig {
    fn default() -> Self {
        Self {
            policy: PolicyKind::default(),
            rate: 12_500_000_000,
            chunk_bytes: 1 << 20,
            window_bytes: 4 << 20,
            overcommit: 1,
            peer_window_bytes: 0,
            levels: 8,
            threshold_scale: 0.5,
            threshold_base: 4.0,
            load_time_constant: Span::from_millis(10),
            promotion_period: Span::from_millis(1),
            scavenger_permille: 10,
            granularity: Granularity::default(),
            slack_threshold: Span::from_millis(10),
            batches_max: BATCHES_MAX,
            requests_max: REQUESTS_MAX,
        }
    }
}

/// The error for a configuration value that is out of range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidConfig {
    /// The name of the field.
    pub field: &'static str,
    /// The error, and the values that are allowed.
    pub problem: String,
}

impl fmt::Display for InvalidConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.problem)
    }
}

impl core::error::Error for InvalidConfig {}

impl LinkConfig {
    /// Checks every field.
    ///
    /// # Errors
    /// Returns the first field that is out of range. Show the error to the author of the
    /// configuration.
    pub fn validate(&self) -> Result<(), InvalidConfig> {
        let fail = |field, problem: String| Err(InvalidConfig { field, problem });
        if self.rate == 0 {
            return fail("rate", "must be greater than zero bytes per second".into());
        }
        if self.chunk_bytes == 0 {
            return fail("chunk_bytes", "must be at least 1".into());
        }
        if self.window_bytes < self.chunk_bytes {
            return fail(
                "window_bytes",
                format!(
                    "{} bytes are less than a chunk, {} bytes",
                    self.window_bytes, self.chunk_bytes
                ),
            );
        }
        if self.overcommit == 0 {
            return fail("overcommit", "must be at least 1".into());
        }
        if self.peer_window_bytes != 0 && self.peer_window_bytes < self.chunk_bytes {
            return fail(
                "peer_window_bytes",
                format!(
                    "{} bytes are less than a chunk, {} bytes",
                    self.peer_window_bytes, self.chunk_bytes
                ),
            );
        }
        if self.levels < 2 || self.levels > Level::COUNT_MAX {
            return fail("levels", format!("{} is not in 2..={}", self.levels, Level::COUNT_MAX));
        }
        if !(self.threshold_base.is_finite() && self.threshold_base > 1.0) {
            return fail("threshold_base", format!("{} is not above 1", self.threshold_base));
        }
        if !(self.threshold_scale.is_finite() && self.threshold_scale > 0.0) {
            return fail("threshold_scale", format!("{} is not above 0", self.threshold_scale));
        }
        if self.scavenger_permille > 1000 {
            return fail("scavenger_permille", format!("{} exceeds 1000", self.scavenger_permille));
        }
        Ok(())
    }
}
