//! Orders that need nothing but a request's estimate (H-MAS §3.5, Appendix C).

use super::Policy;
use crate::Time;
use crate::discipline::Rank;
use crate::hmas::Estimate;
use crate::job::Job;

/// One of the orders without a state of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// First come, first served: the baseline.
    Fcfs,
    /// The earliest deadline first, `D_r = a_r + SLO_ttft + SLO_tpot · l_pred`. With that deadline
    /// a short answer with a lax objective comes before a long one with a strict one. The paper
    /// chooses so.
    Edf,
    /// The least laxity first, `D_r − V_sys − T_remaining` (eq. 5). `V_sys`, the delay of the
    /// system now, is the same for all requests. It changes no order and is left out.
    Llf,
    /// The shortest job first, by `T_tot` as it was estimated.
    Sjf,
    /// The shortest remaining time first. A dropped job has to compute its prompt again, but keeps
    /// its generated tokens.
    Srtf,
}

impl Policy for Order {
    fn rank(&self, job: &Job, estimate: &Estimate) -> Rank {
        let at = match self {
            // Ties are broken by arrival.
            Self::Fcfs => Time::ZERO,
            Self::Edf => estimate.due,
            Self::Llf => Time(estimate.due.0.saturating_sub(estimate.remaining(job).0)),
            Self::Sjf => Time(estimate.total().0),
            Self::Srtf => Time(estimate.remaining(job).0),
        };
        Rank(i64::try_from(at.0).unwrap_or(i64::MAX))
    }

    fn begun_first(&self) -> bool {
        matches!(self, Self::Fcfs)
    }
}
