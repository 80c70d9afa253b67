//! The Perception Agent (H-MAS §3.2): the type of a request's task, and how long its answer will
//! be.
//!
//! The paper fine-tunes a small language model (Qwen3-1.7B) that reads the prompt. Here a
//! [`Tagger`] answers from what it knows, and [`Paced`] delays the answer as long as such a model
//! would take. Nobody waits for it. Until there is an answer, and where there is none or it makes
//! no sense, a request is *unknown* and its estimate is the prior of [`super::cognition`].

use std::collections::{HashMap, VecDeque};

use super::regressor::Forest;
use crate::request::{ApplicationId, RequestId, Spec};
use crate::{Span, Time};

/// What perception says of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tags {
    /// The type of its task: an index into the operator's table.
    pub task: u16,
    /// Tokens that it will generate.
    pub length: f64,
}

impl Tags {
    /// Whether they make sense for that request: the length is a number, and no more than the
    /// request may generate.
    #[must_use]
    pub fn are_valid(&self, spec: &Spec) -> bool {
        self.length.is_finite()
            && self.length >= 0.5
            && self.length < f64::from(spec.output_max) + 0.5
    }
}

/// Perceives, whenever it does.
pub trait Perception: Send {
    /// A request came. Must not take long: whoever has to think does it elsewhere.
    fn ask(&mut self, now: Time, spec: &Spec);

    /// The next answer that is there by now; `None` in it if the request could not be understood.
    fn poll(&mut self, now: Time) -> Option<(RequestId, Option<Tags>)>;

    /// A request generated so many tokens.
    fn learn(&mut self, spec: &Spec, length: u32) {
        let _ = (spec, length);
    }
}

/// Understands a request at once.
pub trait Tagger: Send {
    /// What it is; `None` if that can't be said.
    fn tag(&mut self, spec: &Spec) -> Option<Tags>;

    /// A request generated so many tokens.
    fn learn(&mut self, spec: &Spec, length: u32) {
        let _ = (spec, length);
    }
}

/// A tagger that takes its time: one request after the other, `service` each (1.64 ms on average in
/// Appendix E.4).
#[derive(Debug)]
pub struct Paced<T> {
    tagger: T,
    service: Span,
    busy_until: Time,
    ready: VecDeque<(Time, RequestId, Option<Tags>)>,
}

impl<T: Tagger> Paced<T> {
    /// With such a time for each request; zero for an answer at once.
    #[must_use]
    pub const fn new(tagger: T, service: Span) -> Self {
        Self {
            tagger,
            service,
            busy_until: Time::ZERO,
            ready: VecDeque::new(),
        }
    }
}

impl<T: Tagger> Perception for Paced<T> {
    fn ask(&mut self, now: Time, spec: &Spec) {
        self.busy_until = self.busy_until.max(now) + self.service;
        let tags = self.tagger.tag(spec);
        self.ready.push_back((self.busy_until, spec.id, tags));
    }

    fn poll(&mut self, now: Time) -> Option<(RequestId, Option<Tags>)> {
        let (at, ..) = self.ready.front()?;
        if *at > now {
            return None;
        }
        self.ready.pop_front().map(|(_, id, tags)| (id, tags))
    }

    fn learn(&mut self, spec: &Spec, length: u32) {
        self.tagger.learn(spec, length);
    }
}

/// Says nothing: all are unknown.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unknown;

impl Tagger for Unknown {
    fn tag(&mut self, _: &Spec) -> Option<Tags> {
        None
    }
}

/// Rules and statistics (the ablation "rule-based perception" of table 2): the class is the task,
/// and the mean of what the application generated so far is the length.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    means: HashMap<ApplicationId, (f64, u64)>,
}

impl Tagger for Rules {
    fn tag(&mut self, spec: &Spec) -> Option<Tags> {
        let (mean, _) = self.means.get(&spec.application)?;
        Some(Tags {
            task: spec.class.0,
            length: mean.clamp(1.0, f64::from(spec.output_max)),
        })
    }

    fn learn(&mut self, spec: &Spec, length: u32) {
        let (mean, count) = self.means.entry(spec.application).or_default();
        // Recent ones weigh one in a hundred at least: mixes drift.
        *count = (*count + 1).min(100);
        *mean += (f64::from(length) - *mean) / *count as f64;
    }
}

/// A trained regressor of the logarithm of the length, from what comes with a request (the text is
/// not there): prompt, limit, class, application, importance, objective.
#[derive(Debug)]
pub struct Trained {
    forest: Forest,
}

impl Trained {
    /// Trains on requests and what they generated.
    ///
    /// # Errors
    /// If there is nothing to train on.
    pub fn fit(
        examples: &[(Spec, u32)],
        seed: u64,
    ) -> Result<Self, super::regressor::TrainingError> {
        let rows: Vec<Vec<f64>> = examples.iter().map(|(spec, _)| features(spec)).collect();
        let lengths = examples
            .iter()
            .map(|(_, length)| f64::from((*length).max(1)).ln());
        let lengths: Vec<f64> = lengths.collect();
        let forest = Forest::fit(&rows, &lengths, seed)?;
        Ok(Self { forest })
    }

    /// The length that it expects.
    #[must_use]
    pub fn length(&self, spec: &Spec) -> f64 {
        let most = f64::from(spec.output_max);
        self.forest.predict(&features(spec)).exp().clamp(1.0, most)
    }

    /// Mean absolute error over the mean length, on requests that it was not trained on: the
    /// paper's MAPE without its weight on short answers.
    #[must_use]
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
    use crate::request::Slo;
    let (first, each) = match spec.slo {
        Slo::Interactive { ttft, tbt } => (ttft, tbt),
        Slo::Batch { ttlt } => (ttlt, 0),
    };
    vec![
        f64::from(spec.prompt).ln(),
        f64::from(spec.output_max),
        f64::from(spec.class.0),
        f64::from(spec.application.0),
        f64::from(u8::from(
            spec.importance == crate::request::Importance::Important,
        )),
        first as f64 / 1e9,
        each as f64 / 1e6,
    ]
}

impl Tagger for Trained {
    fn tag(&mut self, spec: &Spec) -> Option<Tags> {
        Some(Tags {
            task: spec.class.0,
            length: self.length(spec),
        })
    }
}
