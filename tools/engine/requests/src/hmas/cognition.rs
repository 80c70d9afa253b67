//! Perception and prediction together (H-MAS §3.2 and Appendix E.4): an estimate at once, a better
//! one when perception has answered.
//!
//! The prior of a request that is *unknown* is "the most frequent task bucket and its coarse cost
//! profile": here the running mean length of the task that was seen most often, of all requests
//! while none was tagged.

use std::collections::BTreeMap;

use super::Estimate;
use super::perception::{Perception, Tags};
use super::prediction::{Prediction, Ran};
use crate::Time;
use crate::request::{RequestId, Slo, Spec};

/// Mean length of a task.
#[derive(Clone, Copy, Debug, Default)]
struct Profile {
    requests: u64,
    mean: f64,
}

impl Profile {
    fn learn(&mut self, length: u32) {
        self.requests += 1;
        // Recent ones weigh one in 500 at least.
        self.mean += (f64::from(length) - self.mean) / (self.requests.min(500) as f64);
    }
}

/// What is believed of requests.
pub struct Cognition {
    perception: Box<dyn Perception>,
    prediction: Box<dyn Prediction>,
    tasks: BTreeMap<u16, Profile>,
    all: Profile,
}

impl std::fmt::Debug for Cognition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cognition")
            .field("tasks", &self.tasks)
            .finish_non_exhaustive()
    }
}

impl Cognition {
    /// Of such parts.
    #[must_use]
    pub fn new(perception: Box<dyn Perception>, prediction: Box<dyn Prediction>) -> Self {
        Self {
            perception,
            prediction,
            tasks: BTreeMap::new(),
            all: Profile::default(),
        }
    }

    /// A request came: what to believe of it until perception has answered.
    pub fn arrived(&mut self, now: Time, spec: &Spec, running: u32) -> Estimate {
        self.perception.ask(now, spec);
        self.prior(spec, running)
    }

    /// What to believe of a request of which nothing is known.
    #[must_use]
    pub fn prior(&self, spec: &Spec, running: u32) -> Estimate {
        let most = self.tasks.values().max_by_key(|profile| profile.requests);
        let profile = most.copied().unwrap_or(self.all);
        let length = if profile.requests == 0 {
            // Half of what is allowed, before anybody ended.
            spec.output_max.div_ceil(2)
        } else {
            profile.mean as u32
        };
        self.estimate(spec, None, length, running)
    }

    fn estimate(&self, spec: &Spec, task: Option<u16>, length: u32, running: u32) -> Estimate {
        let length = length.clamp(1, spec.output_max.max(1));
        let cost = self.prediction.cost(spec.prompt, length, running);
        let due = match spec.slo {
            Slo::Interactive { .. } => spec.deadline(length),
            Slo::Batch { .. } => spec.deadline(0),
        };
        Estimate {
            task,
            length,
            ttft: cost.ttft,
            tpot: cost.tpot,
            due,
        }
    }

    /// The next request that perception has answered for; no tags if it was not understood, and its
    /// prior stays.
    pub fn poll(&mut self, now: Time) -> Option<(RequestId, Option<Tags>)> {
        self.perception.poll(now)
    }

    /// What to believe of a request with such tags; `None` if they make no sense for it.
    #[must_use]
    pub fn understood(&self, spec: &Spec, tags: &Tags, running: u32) -> Option<Estimate> {
        tags.are_valid(spec).then(|| {
            let length = tags.length.round() as u32;
            self.estimate(spec, Some(tags.task), length, running)
        })
    }

    /// A request generated so many tokens.
    pub fn finished(&mut self, spec: &Spec, task: Option<u16>, length: u32) {
        self.perception.learn(spec, length);
        self.all.learn(length);
        if let Some(task) = task {
            self.tasks.entry(task).or_default().learn(length);
        }
    }

    /// An iteration was run.
    pub fn ran(&mut self, ran: &Ran) {
        self.prediction.learn(ran);
    }
}
