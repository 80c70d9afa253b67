//! The Perception Agent (H-MAS §3.2), which determines the type of a request's task and the length
//! of its answer.
//!
//! The paper fine-tunes a small language model (Qwen3-1.7B) that reads the prompt. Here a
//! [`Tagger`] answers from other data, and [`Perception`] delays the answer as long as such a model
//! would take. Scheduling doesn't wait for the answer. Without a valid answer a request is
//! *unknown*, and [`super::cognition`] estimates it from statistics.

use std::collections::{HashMap, VecDeque};

use crate::request::{ApplicationId, Importance, RequestId, Slo, Spec};
use crate::trees::{Forest, TrainingError};
use crate::{Span, Time};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tags {
    /// The type of the task, as an index into the operator's table.
    pub task: u16,
    /// Number of tokens that the request will generate.
    pub length: f64,
}

impl Tags {
    /// Reports whether the tags are valid for `spec`: the length is finite and within the request's
    /// limit.
    pub fn are_valid(&self, spec: &Spec) -> bool {
        self.length.is_finite()
            && self.length >= 0.5
            && self.length < f64::from(spec.output_max) + 0.5
    }
}

pub trait Tagger: Send {
    /// Returns the tags of a request, or `None` if they can't be determined.
    fn tag(&mut self, spec: &Spec) -> Option<Tags>;

    fn learn(&mut self, _spec: &Spec, _length: u32) {}
}

/// A tagger with a delay. It handles one request after another, with `service` time for each.
/// Appendix E.4 measured 1.64 ms on average.
pub struct Perception {
    tagger: Box<dyn Tagger>,
    service: Span,
    busy_until: Time,
    ready: VecDeque<(Time, RequestId, Option<Tags>)>,
}

impl Perception {
    /// Wraps a tagger. With a `service` of zero it answers at once.
    pub fn new(tagger: impl Tagger + 'static, service: Span) -> Self {
        let (tagger, ready) = (Box::new(tagger), VecDeque::new());
        Self { tagger, service, busy_until: Time::ZERO, ready }
    }

    pub fn ask(&mut self, now: Time, spec: &Spec) {
        self.busy_until = self.busy_until.max(now) + self.service;
        let tags = self.tagger.tag(spec);
        self.ready.push_back((self.busy_until, spec.id, tags));
    }

    /// Returns the next answer that is ready at `now`. Its tags are `None` if analysis failed.
    pub fn poll(&mut self, now: Time) -> Option<(RequestId, Option<Tags>)> {
        let (at, ..) = self.ready.front()?;
        if *at > now {
            return None;
        }
        self.ready.pop_front().map(|(_, id, tags)| (id, tags))
    }

    pub fn learn(&mut self, spec: &Spec, length: u32) {
        self.tagger.learn(spec, length);
    }
}

/// A tagger without answers, under which all requests are unknown.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unknown;

impl Tagger for Unknown {
    fn tag(&mut self, _: &Spec) -> Option<Tags> {
        None
    }
}

/// A tagger with rules and statistics (the ablation "rule-based perception" of table 2). The task
/// is the class of service. The length is the mean of the application so far.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    means: HashMap<ApplicationId, (f64, u64)>,
}

impl Tagger for Rules {
    fn tag(&mut self, spec: &Spec) -> Option<Tags> {
        let (mean, _) = self.means.get(&spec.application)?;
        Some(Tags { task: spec.class.0, length: mean.clamp(1.0, f64::from(spec.output_max)) })
    }

    fn learn(&mut self, spec: &Spec, length: u32) {
        let (mean, count) = self.means.entry(spec.application).or_default();
        // Each length has a weight of at least 1/100, so that the mean follows changes of the mix.
        *count = (*count + 1).min(100);
        *mean += (f64::from(length) - *mean) / *count as f64;
    }
}

/// A trained regressor of the logarithm of the length. It uses the request's metadata, not its
/// text: prompt length, limit, class, application, importance and objective.
#[derive(Debug)]
pub struct Trained {
    forest: Forest,
}

impl Trained {
    /// Trains on pairs of a request and the number of tokens that it generated.
    pub fn fit(examples: &[(Spec, u32)], seed: u64) -> Result<Self, TrainingError> {
        let rows: Vec<Vec<f64>> = examples.iter().map(|(spec, _)| features(spec)).collect();
        let lengths = examples.iter().map(|(_, length)| f64::from((*length).max(1)).ln());
        let lengths: Vec<f64> = lengths.collect();
        let forest = Forest::fit(&rows, &lengths, seed)?;
        Ok(Self { forest })
    }

    pub fn length(&self, spec: &Spec) -> f64 {
        let most = f64::from(spec.output_max);
        self.forest.predict(&features(spec)).exp().clamp(1.0, most)
    }

    /// Returns the mean absolute error over the mean length, for requests outside the training set.
    /// Unlike the paper's MAPE it doesn't weight short answers more.
    pub fn error(&self, held_out: &[(Spec, u32)]) -> f64 {
        let off: f64 = held_out
            .iter()
            .map(|(spec, length)| (self.length(spec) - f64::from(*length)).abs())
            .sum();
        let all: f64 = held_out.iter().map(|(_, length)| f64::from(*length)).sum();
        off / all.max(1.0)
    }
}

fn features(spec: &Spec) -> Vec<f64> {
    let (first, each) = match spec.slo {
        Slo::Interactive { ttft, tbt } => (ttft, tbt),
        Slo::Batch { ttlt } => (ttlt, 0),
    };
    vec![
        f64::from(spec.prompt).ln(),
        f64::from(spec.output_max),
        f64::from(spec.class.0),
        f64::from(spec.application.0),
        f64::from(u8::from(spec.importance == Importance::Important)),
        first as f64 / 1e9,
        each as f64 / 1e6,
    ]
}

impl Tagger for Trained {
    fn tag(&mut self, spec: &Spec) -> Option<Tags> {
        Some(Tags { task: spec.class.0, length: self.length(spec) })
    }
}
