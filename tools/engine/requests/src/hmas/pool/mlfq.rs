//! A multi-level feedback queue (H-MAS Appendix C.2): who took more service stands lower, so that
//! no prediction is needed.
//!
//! Levels double: level 0 up to `quantum` tokens of service, level 1 up to twice as much beyond it.
//! A request enters at the level that its own prompt will take it to (FastServe's skip-join), since
//! that much is known. Once in `boost` everybody who stands in line then comes to the top: nobody
//! starves.

use super::{Kind, Policy};
use crate::discipline::Rank;
use crate::hmas::Estimate;
use crate::job::Job;
use crate::{Span, Time};

/// Levels there are.
const LEVELS: u32 = 8;

/// Multi-level feedback.
#[derive(Clone, Copy, Debug)]
pub struct Mlfq {
    quantum: u32,
    boost: Span,
    /// When everybody came to the top last.
    boosted: Option<Time>,
    next: Option<Time>,
}

impl Mlfq {
    /// With such a first quantum, in tokens, and time between boosts.
    #[must_use]
    pub fn new(quantum: u32, boost: Span) -> Self {
        Self {
            quantum: quantum.max(1),
            boost,
            boosted: None,
            next: None,
        }
    }

    fn level(&self, service: u32) -> u32 {
        (service / self.quantum + 1).ilog2().min(LEVELS - 1)
    }
}

impl Default for Mlfq {
    fn default() -> Self {
        Self::new(512, Span::from_millis(30_000))
    }
}

impl Policy for Mlfq {
    fn kind(&self) -> Kind {
        Kind::Mlfq
    }

    fn rank(&self, job: &Job, _: &Estimate) -> Rank {
        if self.boosted.is_some_and(|at| job.spec.arrival <= at) {
            return Rank(-1);
        }
        let service = job.spec.prompt.saturating_add(job.generated);
        Rank(i64::from(self.level(service)))
    }

    fn turn(&mut self, now: Time) -> bool {
        let next = *self.next.get_or_insert(now + self.boost);
        if now < next {
            return false;
        }
        self.boosted = Some(now);
        self.next = Some(now + self.boost);
        true
    }
}
