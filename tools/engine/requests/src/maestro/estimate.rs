//! What is expected of a stage and of the rest of its job, in one place: a predictor of stages and
//! profiles of workflows (Maestro eq. 7), or an oracle of the driver's.

use super::predict::{Forecast, Predict};
use super::profile::Profiles;
use crate::Span;
use crate::workflow::{Job, JobId, Outcome, Stage};

/// Says what stages and jobs will cost, and learns from what they did.
pub trait Estimator {
    /// A stage is ready: what is expected of it.
    fn ready(&mut self, job: &Job, stage: &Stage) -> Forecast;
    /// What follows it in its job: `T_future` of eq. 8.
    fn future(&self, job: &Job, stage: &Stage, forecast: &Forecast) -> Span;
    /// A stage has ended.
    fn finished(&mut self, job: &Job, stage: &Stage, forecast: &Forecast, outcome: &Outcome);
    /// A job is over; if `whole`, all its stages have run.
    fn ended(&mut self, job: JobId, whole: bool);
}

/// What Maestro knows: a predictor and rolling profiles.
pub struct Learned<P> {
    predictor: P,
    profiles: Profiles,
}

impl<P: Predict> Learned<P> {
    /// With empty profiles.
    #[must_use]
    pub fn new(predictor: P) -> Self {
        Self {
            predictor,
            profiles: Profiles::default(),
        }
    }
}

impl<P: Predict> Estimator for Learned<P> {
    fn ready(&mut self, job: &Job, stage: &Stage) -> Forecast {
        let forecast = self.predictor.predict(stage);
        self.profiles.ready(job, stage, forecast.tool);
        forecast
    }

    fn future(&self, job: &Job, stage: &Stage, forecast: &Forecast) -> Span {
        self.profiles.future(job, stage, forecast.tool)
    }

    fn finished(&mut self, _: &Job, stage: &Stage, forecast: &Forecast, outcome: &Outcome) {
        self.predictor.observe(stage, forecast, outcome.output);
        self.profiles.finished(stage, outcome.took);
    }

    fn ended(&mut self, job: JobId, whole: bool) {
        if whole {
            self.profiles.ended(job);
        } else {
            self.profiles.forget(job);
        }
    }
}

impl<P: Predict + ?Sized> Predict for Box<P> {
    fn predict(&self, stage: &Stage) -> Forecast {
        (**self).predict(stage)
    }

    fn observe(&mut self, stage: &Stage, forecast: &Forecast, output: u32) {
        (**self).observe(stage, forecast, output);
    }
}
