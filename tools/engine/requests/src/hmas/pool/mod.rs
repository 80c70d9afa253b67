//! The structures Ω that a replica's line can have (H-MAS Appendix C.2).
//!
//! A [`Policy`] orders a line; memory and concurrency are Statera's.
//!
//! | policy | targets | rank |
//! |---|---|---|
//! | FCFS | availability | arrival |
//! | EDF | deadline misses | `D_r` |
//! | LLF | deadline misses | `D_r − T_remaining` |
//! | SJF | HOL blocking | `T_tot` at arrival |
//! | SRTF | HOL blocking | `T_tot`, less what was done |
//! | two-lane | HOL blocking, isolation | lane, then slack (eq. 5) |
//! | WFQ | unfairness between applications | virtual finish |
//!
//! The rest of the paper's list was dominated and is not here (`docs/requests/hmas.md`).

mod orders;
mod two_lane;
mod wfq;

pub use orders::Order;
pub use two_lane::TwoLane;
pub use wfq::Wfq;

use serde::{Deserialize, Serialize};

use super::Estimate;
use crate::Span;
use crate::discipline::{Rank, Start};
use crate::job::Job;
use crate::request::Spec;

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
    /// Shortest job, with which H-MAS begins (Algorithm 1).
    #[default]
    Sjf,
    /// Shortest remaining time.
    Srtf,
    /// Fast and slow lane.
    TwoLane,
    /// Weighted fair queueing.
    Wfq,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Fcfs,
        Self::Edf,
        Self::Llf,
        Self::Sjf,
        Self::Srtf,
        Self::TwoLane,
        Self::Wfq,
    ];

    /// Its name on tables.
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
        }
    }

    /// A policy of that kind.
    #[must_use]
    pub fn build(self, hints: &Hints) -> Box<dyn Policy> {
        match self {
            Self::Fcfs => Box::new(Order::Fcfs),
            Self::Edf => Box::new(Order::Edf),
            Self::Llf => Box::new(Order::Llf),
            Self::Sjf => Box::new(Order::Sjf),
            Self::Srtf => Box::new(Order::Srtf),
            Self::TwoLane => Box::new(TwoLane::new(hints)),
            Self::Wfq => Box::new(Wfq::default()),
        }
    }
}

/// The numbers of a structure (Appendix C.1, `h_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hints {
    /// Two-lane: requests whose `T_tot` is above this are slow.
    pub lane_split: Span,
    /// Two-lane: work of the fast lane for one part of the slow lane's while both wait.
    pub fast_weight: u32,
}

impl Hints {
    /// Weights that may be set.
    pub const WEIGHTS: std::ops::RangeInclusive<u32> = 1..=16;
    /// Splits that may be set, ms.
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
