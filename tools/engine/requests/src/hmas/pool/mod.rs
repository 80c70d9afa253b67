//! The policies Ω that can order a replica's queue (H-MAS Appendix C.2).
//!
//! A [`Policy`] orders the queue. Statera limits memory and concurrency.
//!
//! | policy | aim | rank |
//! |---|---|---|
//! | FCFS | availability | arrival |
//! | EDF | deadline misses | `D_r` |
//! | LLF | deadline misses | `D_r − T_remaining` |
//! | SJF | HOL blocking | `T_tot` at arrival |
//! | SRTF | HOL blocking | `T_tot`, less the finished part |
//! | two-lane | HOL blocking, isolation | lane, then slack (eq. 5) |
//!
//! The paper's other policies were better in no respect, so they are not here
//! (`docs/requests/hmas.md`).

mod orders;
mod two_lane;

pub use orders::Order;
pub use two_lane::TwoLane;

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
    Fcfs,
    Edf,
    /// The least laxity first.
    Llf,
    /// The shortest job first. H-MAS starts with this policy (Algorithm 1).
    #[default]
    Sjf,
    /// The shortest remaining time first.
    Srtf,
    /// A fast and a slow lane.
    TwoLane,
}

impl Kind {
    pub const ALL: [Self; 6] =
        [Self::Fcfs, Self::Edf, Self::Llf, Self::Sjf, Self::Srtf, Self::TwoLane];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Fcfs => "fcfs",
            Self::Edf => "edf",
            Self::Llf => "llf",
            Self::Sjf => "sjf",
            Self::Srtf => "srtf",
            Self::TwoLane => "two_lane",
        }
    }

    pub fn build(self, hints: &Hints) -> Box<dyn Policy> {
        match self {
            Self::Fcfs => Box::new(Order::Fcfs),
            Self::Edf => Box::new(Order::Edf),
            Self::Llf => Box::new(Order::Llf),
            Self::Sjf => Box::new(Order::Sjf),
            Self::Srtf => Box::new(Order::Srtf),
            Self::TwoLane => Box::new(TwoLane::new(hints)),
        }
    }
}

/// The parameters of a policy (Appendix C.1, `h_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hints {
    /// Largest `T_tot` of a request in the fast lane of the two-lane policy.
    pub lane_split: Span,
    /// Ratio of the fast lane's work to the slow lane's work while requests wait in both.
    pub fast_weight: u32,
}

impl Default for Hints {
    fn default() -> Self {
        Self { lane_split: Span::from_millis(5_000), fast_weight: 4 }
    }
}

/// The concurrency limit and its use, which a policy with lanes divides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    pub concurrency: u32,
    pub running: u32,
}

/// An order of the queue, with the state that it needs.
pub trait Policy: Send {
    /// Returns the rank of a job with prompt tokens to compute, under the rules of
    /// [`crate::discipline::Discipline::rank`].
    fn rank(&self, job: &Job, estimate: &Estimate) -> Rank;

    /// Adds a request to the queue. The rank is asked for afterwards. After a change of an estimate
    /// it is called again after [`Self::left`].
    fn arrived(&mut self, spec: &Spec, estimate: &Estimate) {
        let _ = (spec, estimate);
    }

    fn began(&mut self, spec: &Spec, estimate: &Estimate) {
        let _ = (spec, estimate);
    }

    /// Reports that a request lost its blocks and is in the queue again.
    fn dropped(&mut self, spec: &Spec, estimate: &Estimate) {
        let _ = (spec, estimate);
    }

    /// Removes a request. `running` is whether it held blocks.
    fn left(&mut self, spec: &Spec, estimate: &Estimate, running: bool) {
        let _ = (spec, estimate, running);
    }

    /// Decides whether a waiting job may start under this policy.
    fn start(&mut self, spec: &Spec, estimate: &Estimate, room: Room) -> Start {
        let _ = (spec, estimate, room);
        Start::Now
    }

    /// Whether prompts that have begun go before those ahead of them in the queue.
    fn begun_first(&self) -> bool {
        false
    }
}
