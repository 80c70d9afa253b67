//! Fair shares between applications (H-MAS Appendix C.2), by self-clocked weighted fair queueing
//! (Golestani 1994).
//!
//! When a request arrives, its application is charged the tokens of the prompt and of the predicted
//! answer. Virtual time is the largest tag of a started request. All applications have the same
//! weight.

use rustc_hash::FxHashMap;

use super::{Kind, Policy};
use crate::discipline::Rank;
use crate::hmas::Estimate;
use crate::job::Job;
use crate::request::{ApplicationId, RequestId, Spec};

/// The fair-queueing policy.
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
        // Requests that began before this policy took over have no tag. They go first.
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
            // All requests are gone, so no application has a claim from before.
            self.finishes.clear();
        }
    }
}
