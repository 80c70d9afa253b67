//! The least laxity first: `D_r − V_sys − T_remaining` (H-MAS eq. 5, Appendix C.2). `V_sys`, the
//! delay of the system now, is the same for all and so never changes their order: it is left out
//! here.

use super::{Kind, Policy, rank_of};
use crate::Time;
use crate::discipline::Rank;
use crate::hmas::Estimate;
use crate::job::Job;

/// Least laxity first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Llf;

impl Policy for Llf {
    fn kind(&self) -> Kind {
        Kind::Llf
    }

    fn rank(&self, job: &Job, estimate: &Estimate) -> Rank {
        let remaining = estimate.remaining(job);
        rank_of(Time(estimate.due.0.saturating_sub(remaining.0)))
    }
}
