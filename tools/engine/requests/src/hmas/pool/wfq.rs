//! Fair shares between applications (H-MAS Appendix C.2): weighted fair queueing by virtual finish
//! times, self-clocked (Golestani 1994).
//!
//! An application is charged the tokens that it asks for, prompt and predicted answer, when a
//! request of it arrives. Virtual time is the tag of whoever started last. All applications weigh
//! the same.

use rustc_hash::FxHashMap;

use super::{Kind, Policy};
use crate::discipline::Rank;
use crate::hmas::Estimate;
use crate::job::Job;
use crate::request::{ApplicationId, RequestId, Spec};

/// Fair shares.
#[derive(Clone, Debug, Default)]
pub struct Wfq {
    virtual_time: u64,
    finishes: FxHashMap<ApplicationId, u64>,
    tags: FxHashMap<RequestId, u64>,
}

impl Policy for Wfq {
    fn kind(&self) -> Kind {
        Kind::Wfq
    }

    fn rank(&self, job: &Job, _: &Estimate) -> Rank {
        let tag = self.tags.get(&job.id());
        // Of those that began before this policy took over nobody knows a tag: they go on first.
        Rank(tag.map_or(0, |tag| i64::try_from(*tag).unwrap_or(i64::MAX)))
    }

    fn arrived(&mut self, spec: &Spec, estimate: &Estimate) {
        let cost = u64::from(spec.prompt) + u64::from(estimate.length);
        let finish = self.finishes.entry(spec.application).or_default();
        let start = self.virtual_time.max(*finish);
        *finish = start + cost;
        self.tags.insert(spec.id, *finish);
    }

    fn began(&mut self, spec: &Spec, _: &Estimate) {
        if let Some(tag) = self.tags.get(&spec.id) {
            self.virtual_time = self.virtual_time.max(*tag);
        }
    }

    fn left(&mut self, spec: &Spec, _: &Estimate, _: bool) {
        self.tags.remove(&spec.id);
        if self.tags.is_empty() {
            // Nobody is owed anything.
            self.finishes.clear();
        }
    }
}
