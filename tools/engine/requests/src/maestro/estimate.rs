//! The expected cost of a stage and of the rest of its job (Maestro eq. 7), from a predictor of
//! stages and profiles of workflows, or from the driver.

use super::predict::{Forecast, TwoPhase};
use super::profile::Profiles;
use crate::Span;
use crate::workflow::{Job, JobId, Outcome, Stage};

/// Estimates the costs of stages and jobs, and learns from measured ones.
pub trait Estimator {
    fn ready(&mut self, job: &Job, stage: &Stage) -> Forecast;
    /// Returns the time of what follows a stage in its job: `T_future` of eq. 8.
    fn future(&self, job: &Job, stage: &Stage, forecast: &Forecast) -> Span;
    fn finished(&mut self, stage: &Stage, forecast: &Forecast, outcome: &Outcome);
    fn ended(&mut self, job: JobId);
}

/// Maestro's estimator: a predictor and rolling profiles.
pub struct Learned {
    predictor: TwoPhase,
    profiles: Profiles,
}

impl Learned {
    pub fn new(predictor: TwoPhase) -> Self {
        Self { predictor, profiles: Profiles::default() }
    }
}

impl Estimator for Learned {
    fn ready(&mut self, job: &Job, stage: &Stage) -> Forecast {
        let forecast = self.predictor.predict(stage);
        self.profiles.ready(job, stage, forecast.tool);
        forecast
    }

    fn future(&self, job: &Job, stage: &Stage, forecast: &Forecast) -> Span {
        self.profiles.future(job, stage, forecast.tool)
    }

    fn finished(&mut self, stage: &Stage, forecast: &Forecast, outcome: &Outcome) {
        self.predictor.observe(stage, forecast, outcome.output);
        self.profiles.finished(stage, outcome.took);
    }

    fn ended(&mut self, job: JobId) {
        self.profiles.ended(job);
    }
}
