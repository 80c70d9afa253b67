//! The configuration of a link, with the defaults of architecture §4.2.

use core::fmt;
use core::str::FromStr;

use laxity_types::Level;

use crate::time::Span;

/// Maximum number of batches that a link knows.
pub const BATCHES_MAX: usize = 65_536;
/// Maximum number of requests that a link knows.
pub const REQUESTS_MAX: usize = 262_144;
/// Maximum number of members of a batch. Requests beyond it belong to no batch. The end of a batch
/// visits all of them at once.
pub const BATCH_MEMBERS_MAX: usize = 4096;

macro_rules! policies {
    ($($(#[$attribute:meta])* $kind:ident = $name:literal,)*) => {
        /// The policy that arbitrates a port. All policies run behind the same interface.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum PolicyKind {
            $($(#[$attribute])* $kind,)*
        }

        impl PolicyKind {
            /// All policies, in the order in which tables show them.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$kind),*];

            /// Returns the name used in configuration and reports.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)*
                }
            }
        }
    };
}

policies! {
    /// Max-min fairness between flows: what a network does by itself.
    Fair = "fair",
    /// Shortest job first.
    Sjf = "sjf",
    /// Earliest deadline first. Flows with an implicit deadline share what is left (MFS §6.3).
    Edf = "edf",
    /// Earliest deadline first, but with flows of an explicit deadline *below* implicit ones.
    EdfLow = "edf_low",
    /// Karuna: minimal rate for flows with a deadline, the others by size.
    Karuna = "karuna",
    /// Karuna that gives idle time to deadline flows.
    KarunaWc = "karuna_wc",
    /// Static classes, with collectives above KV traffic: what operators configure today.
    TwoClass = "two_class",
    /// Two classes weighted 99 : 1, collectives over all other traffic, as in DualPath.
    TwoClass99 = "two_class_99",
    /// Priority, then deadline, with promotion on slack: as Mooncake's TENT first ordered traffic.
    TentEdf = "tent_edf",
    /// Priority, then predicted MLU, and doomed transfers scavenged: as Mooncake's TENT does now.
    Tent = "tent",
    /// The policy of the paper without changes.
    Mfs = "mfs",
    /// Collectives first, then KV reuse and P2D together, by laxity and deadline.
    #[default]
    Laxity = "laxity",
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
        let known = PolicyKind::ALL.map(PolicyKind::name).join(", ");
        write!(f, "unknown policy `{}`; known are {known}", self.0)
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
    /// Largest permit of a flow that can be cut, in bytes. A flow of higher level waits for at most
    /// one such chunk.
    pub chunk_bytes: u64,
    /// Bytes that may be in flight on the port, best a bandwidth-delay product plus one chunk.
    pub window_bytes: u64,
    /// Maximum number of windows in flight. Beyond the first window, bytes are permitted no faster
    /// than the port sends: bytes that had time to leave and have not are queued elsewhere, such as
    /// before a receiver that others send to. At 1 this rule permits nothing beyond the window.
    pub overcommit: u32,
    /// Bytes that may be in flight to one known peer, at the level of the next bytes or above. 0
    /// means no bound. With it a port goes on to permit bytes for peers that are not busy up to
    /// [`PEER_WINDOWS`](crate::link::PEER_WINDOWS) windows. Only `laxity` uses it.
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
        let (chunk, window, peers) = (self.chunk_bytes, self.window_bytes, self.peer_window_bytes);
        let (levels, most) = (self.levels, Level::COUNT_MAX);
        let (base, scale) = (self.threshold_base, self.threshold_scale);
        let permille = self.scavenger_permille;
        let less = |bytes| format!("{bytes} bytes are less than a chunk, {chunk} bytes");
        let at_least_one = || "must be at least 1".to_owned();
        let is_above = |number: f64, least| number.is_finite() && number > least;
        let checks = [
            ("rate", self.rate > 0, "must be greater than zero bytes per second".to_owned()),
            ("chunk_bytes", chunk > 0, at_least_one()),
            ("window_bytes", window >= chunk, less(window)),
            ("overcommit", self.overcommit > 0, at_least_one()),
            ("peer_window_bytes", peers == 0 || peers >= chunk, less(peers)),
            ("levels", (2..=most).contains(&levels), format!("{levels} is not in 2..={most}")),
            ("threshold_base", is_above(base, 1.0), format!("{base} is not above 1")),
            ("threshold_scale", is_above(scale, 0.0), format!("{scale} is not above 0")),
            ("scavenger_permille", permille <= 1000, format!("{permille} exceeds 1000")),
        ];
        let wrong = checks.into_iter().find(|(_, is_valid, _)| !is_valid);
        wrong.map_or(Ok(()), |(field, _, problem)| Err(InvalidConfig { field, problem }))
    }
}
