//! The shortest job first, by `T_tot` as it was estimated (H-MAS Appendix C.1).

use super::{Kind, Policy, rank_of};
use crate::Time;
use crate::discipline::Rank;
use crate::hmas::Estimate;
use crate::job::Job;

/// Shortest job first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sjf;

impl Policy for Sjf {
    fn kind(&self) -> Kind {
        Kind::Sjf
    }

    fn rank(&self, _: &Job, estimate: &Estimate) -> Rank {
        rank_of(Time(estimate.total().0))
    }
}
