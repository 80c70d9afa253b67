//! Fair shares between applications (H-MAS Appendix C.2): weighted fair queueing by virtual finish
//! times, self-clocked (Golestani 1994), or stride scheduling (Waldspurger 1995), which goes by
//! virtual starts.
//!
//! An application is charged the tokens that it asks for, prompt and predicted answer, when a
//! request of it arrives. Virtual time is the tag of whoever started last. All weigh the same: the
//! core knows of no tenants' weights; importance is [`super::Priority`]'s.

use rustc_hash::FxHashMap;

use super::{Kind, Policy};
use crate::discipline::Rank;
use crate::hmas::Estimate;
use crate::job::Job;
use crate::request::{ApplicationId, RequestId, Spec};

/// What a request is ranked by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stamp {
    /// Its virtual finish: WFQ.
    Finish,
    /// Its virtual start: stride, the application's pass before it is charged.
    Start,
}

/// Fair shares.
#[derive(Clone, Debug)]
pub struct Wfq {
    stamp: Stamp,
    virtual_time: u64,
    finishes: FxHashMap<ApplicationId, u64>,
    tags: FxHashMap<RequestId, u64>,
}

impl Wfq {
    /// By such a stamp.
    #[must_use]
    pub fn new(stamp: Stamp) -> Self {
        Self {
            stamp,
            virtual_time: 0,
            finishes: FxHashMap::default(),
            tags: FxHashMap::default(),
        }
    }
}

impl Policy for Wfq {
    fn kind(&self) -> Kind {
        match self.stamp {
            Stamp::Finish => Kind::Wfq,
            Stamp::Start => Kind::Stride,
        }
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
        let tag = match self.stamp {
            Stamp::Finish => start + cost,
            Stamp::Start => start,
        };
        self.tags.insert(spec.id, tag);
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
