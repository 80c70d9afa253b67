//! The earliest deadline first, `D_r = a_r + SLO_ttft + SLO_tpot · l_pred` (H-MAS §3.5, Appendix
//! C.1). With that deadline a short answer with a lax objective comes before a long one with a
//! strict one: the paper's choice, kept.

use super::{Kind, Policy, rank_of};
use crate::discipline::Rank;
use crate::hmas::Estimate;
use crate::job::Job;

/// Earliest deadline first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Edf;

impl Policy for Edf {
    fn kind(&self) -> Kind {
        Kind::Edf
    }

    fn rank(&self, _: &Job, estimate: &Estimate) -> Rank {
        rank_of(estimate.due)
    }
}
