//! Whoever came first: the baseline, and what an emergency falls back to (H-MAS Appendix C.2).

use super::{Kind, Policy};
use crate::discipline::Rank;
use crate::hmas::Estimate;
use crate::job::Job;

/// First come, first served.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fcfs;

impl Policy for Fcfs {
    fn kind(&self) -> Kind {
        Kind::Fcfs
    }

    fn rank(&self, _: &Job, _: &Estimate) -> Rank {
        // Ties are broken by arrival.
        Rank(0)
    }

    fn begun_first(&self) -> bool {
        true
    }
}
