//! The shortest remaining time first: as [`super::Sjf`], less what was done (H-MAS Appendix C.2). A
//! job that was dropped has its prompt to compute again, and the tokens that it gave out stay
//! given.

use super::{Kind, Policy, rank_of};
use crate::Time;
use crate::discipline::Rank;
use crate::hmas::Estimate;
use crate::job::Job;

/// Shortest remaining time first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Srtf;

impl Policy for Srtf {
    fn kind(&self) -> Kind {
        Kind::Srtf
    }

    fn rank(&self, job: &Job, estimate: &Estimate) -> Rank {
        rank_of(Time(estimate.remaining(job).0))
    }
}
