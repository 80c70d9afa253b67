//! The orders of a replica's queue (H-MAS Appendix C.2). Statera limits memory and concurrency.
//!
//! | order | aim | rank |
//! |---|---|---|
//! | FCFS | availability | arrival |
//! | EDF | deadline misses | `D_r` |
//! | SJF | HOL blocking | `T_tot` at arrival |
//! | SRTF | HOL blocking | `T_tot`, less the finished part |
//!
//! The paper's other orders were better in no respect, so they are not here
//! (`docs/requests/hmas.md`).

use core::fmt;

use serde::{Deserialize, Serialize};

use super::Estimate;
use crate::Time;
use crate::discipline::Rank;
use crate::job::Job;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// First come, first served: the baseline.
    Fcfs,
    /// The earliest deadline first, `D_r = a_r + SLO_ttft + SLO_tpot · l_pred`. With that deadline
    /// a short answer with a lax objective comes before a long one with a strict one. The paper
    /// chooses so.
    Edf,
    /// The shortest job first, by `T_tot` as it was estimated. H-MAS starts with this order
    /// (Algorithm 1).
    #[default]
    Sjf,
    /// The shortest remaining time first. A dropped job has to compute its prompt again, but keeps
    /// its generated tokens.
    Srtf,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl Kind {
    pub const ALL: [Self; 4] = [Self::Fcfs, Self::Edf, Self::Sjf, Self::Srtf];

    /// Returns the rank of a job with prompt tokens to compute, under the rules of
    /// [`crate::discipline::Discipline::rank`].
    pub(super) fn rank(self, job: &Job, estimate: &Estimate) -> Rank {
        let at = match self {
            // Ties are broken by arrival.
            Self::Fcfs => Time::ZERO,
            Self::Edf => estimate.due,
            Self::Sjf => Time(estimate.total().0),
            Self::Srtf => Time(estimate.remaining(job).0),
        };
        Rank(i64::try_from(at.0).unwrap_or(i64::MAX))
    }
}
