//! Perception and prediction together (H-MAS §3.2 and Appendix E.4). A request gets an estimate at
//! once and a better one when perception has answered.
//!
//! The paper's prior of an *unknown* request is "the most frequent task bucket and its coarse cost
//! profile". Here it is the running mean length of the task that was seen most often. While no
//! request has a task, it is the mean of all requests.

use std::collections::BTreeMap;

use super::Estimate;
use super::perception::{Perception, Tags};
use super::prediction::Prediction;
use crate::Time;
use crate::request::{Slo, Spec};

#[derive(Clone, Copy, Debug, Default)]
struct Profile {
    requests: u64,
    mean: f64,
}

impl Profile {
    fn learn(&mut self, length: u32) {
        self.requests += 1;
        // Each length has a weight of at least 1/500, so that recent lengths count.
        self.mean += (f64::from(length) - self.mean) / (self.requests.min(500) as f64);
    }
}

pub struct Cognition {
    pub(super) perception: Perception,
    prediction: Prediction,
    tasks: BTreeMap<u16, Profile>,
    all: Profile,
}

impl Cognition {
    pub fn new(perception: Perception, prediction: Prediction) -> Self {
        Self { perception, prediction, tasks: BTreeMap::new(), all: Profile::default() }
    }

    /// Passes a new request to perception and returns its estimate until the answer.
    pub fn arrived(&mut self, now: Time, spec: &Spec, running: u32) -> Estimate {
        self.perception.ask(now, spec);
        self.prior(spec, running)
    }

    /// Returns the estimate of a request without tags.
    pub fn prior(&self, spec: &Spec, running: u32) -> Estimate {
        let most = self.tasks.values().max_by_key(|profile| profile.requests);
        let profile = most.copied().unwrap_or(self.all);
        let length = if profile.requests == 0 {
            // While no request has ended, the length is half of the request's limit.
            spec.output_max.div_ceil(2)
        } else {
            profile.mean as u32
        };
        self.estimate(spec, None, length, running)
    }

    fn estimate(&self, spec: &Spec, task: Option<u16>, length: u32, running: u32) -> Estimate {
        let length = length.clamp(1, spec.output_max.max(1));
        let [ttft, tpot] = self.prediction.cost(spec.prompt, length, running);
        let due = match spec.slo {
            Slo::Interactive { .. } => spec.deadline(length),
            Slo::Batch { .. } => spec.deadline(0),
        };
        Estimate { task, length, ttft, tpot, due }
    }

    /// Returns the estimate of a request with `tags`, or `None` if they are invalid for it.
    pub fn understood(&self, spec: &Spec, tags: &Tags, running: u32) -> Option<Estimate> {
        tags.are_valid(spec).then(|| {
            let length = tags.length.round() as u32;
            self.estimate(spec, Some(tags.task), length, running)
        })
    }

    pub fn finished(&mut self, spec: &Spec, task: Option<u16>, length: u32) {
        self.perception.learn(spec, length);
        self.all.learn(length);
        if let Some(task) = task {
            self.tasks.entry(task).or_default().learn(length);
        }
    }
}
