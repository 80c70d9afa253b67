//! Important requests first (H-MAS Appendix C.2), with a head start rather than for ever: one of
//! low importance that came `head_start` earlier goes first, so that it waits and does not starve.

use super::{Kind, Policy, rank_of};
use crate::discipline::Rank;
use crate::hmas::Estimate;
use crate::job::Job;
use crate::request::Importance;
use crate::{Span, Time};

/// By importance.
#[derive(Clone, Copy, Debug)]
pub struct Priority {
    head_start: Span,
}

impl Priority {
    /// With such a head start.
    #[must_use]
    pub const fn new(head_start: Span) -> Self {
        Self { head_start }
    }
}

impl Default for Priority {
    fn default() -> Self {
        Self::new(Span::from_millis(60_000))
    }
}

impl Policy for Priority {
    fn kind(&self) -> Kind {
        Kind::Priority
    }

    fn rank(&self, job: &Job, _: &Estimate) -> Rank {
        let behind = match job.spec.importance {
            Importance::Important => 0,
            Importance::Low => self.head_start.0,
        };
        rank_of(Time(job.spec.arrival.0.saturating_add(behind)))
    }
}
