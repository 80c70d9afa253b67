//! The expected cost of a stage and of the rest of its job (Maestro eq. 7), from a predictor of
//! stages and profiles of workflows, or from the driver.

use super::predict::LengthPredictor;
use super::profile::Profiles;
use crate::Span;
use crate::workflow::{JobId, Outcome, Stage, WorkflowJob};

pub trait Estimator {
    /// Returns the expected number of tokens that a stage generates.
    fn ready(&mut self, job: &WorkflowJob, stage: &Stage) -> f64;
    /// Returns the time of what follows a stage in its job: `T_future` of eq. 8.
    fn future(&self, job: &WorkflowJob, stage: &Stage) -> Span;
    fn finished(&mut self, stage: &Stage, expected: f64, outcome: &Outcome);
    fn ended(&mut self, job: JobId);
}

pub struct LearnedEstimator {
    predictor: LengthPredictor,
    profiles: Profiles,
}

impl LearnedEstimator {
    pub fn new(predictor: LengthPredictor) -> Self {
        Self { predictor, profiles: Profiles::default() }
    }
}

impl Estimator for LearnedEstimator {
    fn ready(&mut self, job: &WorkflowJob, stage: &Stage) -> f64 {
        self.profiles.ready(job, stage);
        self.predictor.predict(stage)
    }

    fn future(&self, job: &WorkflowJob, stage: &Stage) -> Span {
        self.profiles.future(job, stage)
    }

    fn finished(&mut self, stage: &Stage, expected: f64, outcome: &Outcome) {
        self.predictor.observe(stage, expected, outcome.output);
        self.profiles.finished(stage, outcome.took);
    }

    fn ended(&mut self, job: JobId) {
        self.profiles.ended(job);
    }
}
