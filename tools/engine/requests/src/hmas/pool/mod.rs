//! The pool Ω of structures that the Meta controller chooses from (H-MAS Appendix C.2), a file
//! each.
//!
//! A [`Policy`] orders a line; memory, concurrency and budgets are Statera's. A policy without the
//! layers above it is
//! [`super::Agent::fixed`]: what H-MAS is compared with, and what
//! [`crate::replica::Replica::exchange`] takes.
//!
//! | policy | targets | rank |
//! |---|---|---|
//! | FCFS | availability, the baseline of the bypass | arrival |
//! | EDF | deadline misses | `D_r` |
//! | LLF | deadline misses | `D_r − T_remaining` |
//! | SJF | HOL blocking | `T_tot` at arrival |
//! | SRTF | HOL blocking | `T_tot`, what was done taken off |
//! | two-lane | HOL blocking, isolation | lane, then slack (eq. 5) |
//! | WFQ, stride | unfairness between applications | virtual finish or start |
//! | MLFQ | unknown lengths | level by service taken |
//! | priority | classes of unequal worth | importance, aged |
//!
//! Lottery, CFS and RR of the paper's list are left out: they share what WFQ and stride share, the
//! first at random.

mod edf;
mod fcfs;
mod llf;
mod mlfq;
mod priority;
mod sjf;
mod srtf;
mod two_lane;
mod wfq;

pub use edf::Edf;
pub use fcfs::Fcfs;
pub use llf::Llf;
pub use mlfq::Mlfq;
pub use priority::Priority;
pub use sjf::Sjf;
pub use srtf::Srtf;
pub use two_lane::TwoLane;
pub use wfq::{Stamp, Wfq};

use serde::{Deserialize, Serialize};

use super::Estimate;
use crate::discipline::{Rank, Start};
use crate::job::Job;
use crate::request::Spec;
use crate::{Span, Time};

/// The policies of the pool, by name.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Whoever came first.
    Fcfs,
    /// Earliest deadline.
    Edf,
    /// Least laxity.
    Llf,
    /// Shortest job; where H-MAS begins (Algorithm 1).
    #[default]
    Sjf,
    /// Shortest remaining time.
    Srtf,
    /// Fast and slow lane.
    TwoLane,
    /// Weighted fair queueing.
    Wfq,
    /// Stride scheduling.
    Stride,
    /// Multi-level feedback queue.
    Mlfq,
    /// By importance.
    Priority,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Fcfs,
        Self::Edf,
        Self::Llf,
        Self::Sjf,
        Self::Srtf,
        Self::TwoLane,
        Self::Wfq,
        Self::Stride,
        Self::Mlfq,
        Self::Priority,
    ];

    /// How it is called on tables and in decisions of an outside service.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fcfs => "fcfs",
            Self::Edf => "edf",
            Self::Llf => "llf",
            Self::Sjf => "sjf",
            Self::Srtf => "srtf",
            Self::TwoLane => "two_lane",
            Self::Wfq => "wfq",
            Self::Stride => "stride",
            Self::Mlfq => "mlfq",
            Self::Priority => "priority",
        }
    }

    /// The one of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// A policy of that kind.
    #[must_use]
    pub fn build(self, hints: &Hints) -> Box<dyn Policy> {
        match self {
            Self::Fcfs => Box::new(Fcfs),
            Self::Edf => Box::new(Edf),
            Self::Llf => Box::new(Llf),
            Self::Sjf => Box::new(Sjf),
            Self::Srtf => Box::new(Srtf),
            Self::TwoLane => Box::new(TwoLane::new(hints)),
            Self::Wfq => Box::new(Wfq::new(Stamp::Finish)),
            Self::Stride => Box::new(Wfq::new(Stamp::Start)),
            Self::Mlfq => Box::new(Mlfq::default()),
            Self::Priority => Box::new(Priority::default()),
        }
    }
}

/// Few numbers that a decision may set beside the structure (Appendix C.1, `h_t`).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hints {
    /// Two-lane: requests whose `T_tot` is above this are slow.
    #[serde(rename = "lane_split_ns", with = "crate::nanoseconds::span")]
    pub lane_split: Span,
    /// Two-lane: work of the fast lane for one part of the slow lane's while both wait.
    pub fast_weight: u32,
}

impl Hints {
    /// Weights that a decision may set.
    pub const WEIGHTS: std::ops::RangeInclusive<u32> = 1..=16;
    /// Splits that a decision may set, ms.
    pub const SPLITS_MS: std::ops::RangeInclusive<u64> = 10..=600_000;
}

impl Default for Hints {
    fn default() -> Self {
        Self {
            lane_split: Span::from_millis(5_000),
            fast_weight: 4,
        }
    }
}

/// What Statera leaves to start now: a policy that keeps lanes divides it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Most that may run.
    pub concurrency: u32,
    /// Those that do.
    pub running: u32,
}

/// An order, and what it needs to know to keep it.
pub trait Policy: Send {
    /// Which it is.
    fn kind(&self) -> Kind;

    /// Where a job with prompt tokens to compute stands in line. The same contract as
    /// [`crate::discipline::Discipline::rank`].
    fn rank(&self, job: &Job, estimate: &Estimate) -> Rank;

    /// A request is in line from now on; its rank is asked for after this. Also told, in order of
    /// arrival, of all that stand in line when the policy takes over, and again when an estimate
    /// changes (after [`Self::left`]).
    fn arrived(&mut self, spec: &Spec, estimate: &Estimate) {
        let _ = (spec, estimate);
    }

    /// It holds blocks from now on.
    fn began(&mut self, spec: &Spec, estimate: &Estimate) {
        let _ = (spec, estimate);
    }

    /// It gave them back and is in line again.
    fn dropped(&mut self, spec: &Spec, estimate: &Estimate) {
        let _ = (spec, estimate);
    }

    /// It is gone; it held blocks or not.
    fn left(&mut self, spec: &Spec, estimate: &Estimate, running: bool) {
        let _ = (spec, estimate, running);
    }

    /// Whether all ranks are others from now on.
    fn turn(&mut self, now: Time) -> bool {
        let _ = now;
        false
    }

    /// Whether a job that waits may start, as far as this policy is concerned.
    fn start(&mut self, spec: &Spec, estimate: &Estimate, room: Room) -> Start {
        let _ = (spec, estimate, room);
        Start::Now
    }

    /// Whether prompts that have begun go on before those that come before them in line.
    fn begun_first(&self) -> bool {
        false
    }
}

/// A time as a rank.
pub(super) fn rank_of(time: Time) -> Rank {
    Rank(i64::try_from(time.0).unwrap_or(i64::MAX))
}
