//! The names of things that are scheduled (architecture §1).

use core::fmt;

/// One transfer of bytes between two endpoints. Chosen by the driver, unique while it lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId(pub u64);

/// The requests that one prefill unit executes together. Zero means "no batch known".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchId(pub u64);

/// One prompt with a TTFT deadline. Zero means "no request known".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// One direction of one NIC somewhere in the cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub u32);

/// Index of a transformer layer, from zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Layer(pub u16);

/// What a flow is for: MFS §2.2 and §3.1, plus two kinds that no request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Stage {
    /// Stage 1: fetch of reusable KV-cache blocks.
    KvReuse = 1,
    /// Stage 2: a collective inside a layer; the computation is blocked on it.
    Collective = 2,
    /// Stage 3: prefill-to-decode transfer of a layer's KV cache.
    P2d = 3,
    /// Model weights of a scale-out.
    Weights = 4,
    /// Anything else.
    Background = 5,
}

impl Stage {
    /// All stages, in the order of their numbers.
    pub const ALL: [Self; 5] = [
        Self::KvReuse,
        Self::Collective,
        Self::P2d,
        Self::Weights,
        Self::Background,
    ];

    /// The stage of a wire number, or `None` if it names no stage: the number may come from
    /// another process, so it is never trusted.
    #[must_use]
    pub const fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::KvReuse,
            2 => Self::Collective,
            3 => Self::P2d,
            4 => Self::Weights,
            5 => Self::Background,
            _ => return None,
        })
    }

    /// Zero-based index, for tables of counters.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize - 1
    }

    /// Stages 1 and 2, whose deadline is implicit (MFS §4.4).
    #[must_use]
    pub const fn is_early(self) -> bool {
        matches!(self, Self::KvReuse | Self::Collective)
    }

    /// The name used in metrics, files and tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::KvReuse => "kv_reuse",
            Self::Collective => "collective",
            Self::P2d => "p2d",
            Self::Weights => "weights",
            Self::Background => "background",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A level of the reverse multi-level queue: 1 is the highest, [`Level::SCAVENGER`] lies below
/// all. A numerically smaller level is served first, so `Ord` reads "comes before".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Level(pub u8);

impl Level {
    /// The highest level, `P_1`, reserved for urgent last-stage flows (MFS §4.5).
    pub const HIGHEST: Self = Self(1);
    /// The highest level that is not reserved, `P_2`: collectives enter here.
    pub const FIRST_UNRESERVED: Self = Self(2);
    /// The class below all levels, for pruned work, weights and background.
    pub const SCAVENGER: Self = Self(u8::MAX);
    /// The most levels a configuration may have.
    pub const COUNT_MAX: u8 = 16;
    /// Length of a table with one row for each level and one for the scavenger.
    pub const ROWS: usize = Self::COUNT_MAX as usize + 1;

    /// Zero-based row in a table of [`Level::ROWS`]; the scavenger has the last one.
    #[must_use]
    pub const fn row(self) -> usize {
        if self.0 >= 1 && self.0 <= Self::COUNT_MAX {
            self.0 as usize - 1
        } else {
            Self::ROWS - 1
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::SCAVENGER {
            f.write_str("scavenger")
        } else {
            write!(f, "P{}", self.0)
        }
    }
}
