//! The expected lengths of an application's answers (QoServe §3.4, "Hybrid prioritization"): the
//! mean of finished answers plus two standard deviations.
//!
//! Departures from the paper: estimates for ranks change only in [`Lengths::settle`], because not
//! every finished answer may reorder the queue. For an unknown application the estimate is that of
//! all applications. While no answer has finished, it is `UNKNOWN` tokens. The paper leaves both
//! open.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use crate::job::Job;
use crate::request::ApplicationId;

/// Assumed tokens of an answer while none has finished.
const UNKNOWN: u32 = 128;

/// Number of finished answers that an application needs for its own estimate.
const KNOWN: u64 = 4;

/// Relative change of an estimate that makes [`Lengths::settle`] replace it.
const DRIFT: f64 = 0.25;

/// Mean and deviation of lengths (Welford's recurrence).
#[derive(Clone, Copy, Debug, Default)]
struct Moments {
    count: u64,
    mean: f64,
    squares: f64,
}

impl Moments {
    fn add(&mut self, length: f64) {
        self.count += 1;
        let off = length - self.mean;
        self.mean += off / self.count as f64;
        self.squares += off * (length - self.mean);
    }

    /// Returns the mean plus two deviations, or `None` with too few answers.
    fn estimate(&self) -> Option<f64> {
        let deviation = (self.squares / self.count.max(1) as f64).max(0.0).sqrt();
        (self.count >= KNOWN).then_some(self.mean + 2.0 * deviation)
    }
}

#[derive(Clone, Debug, Default)]
pub struct Lengths {
    all: Moments,
    of: BTreeMap<ApplicationId, Moments>,
    /// The settled estimates, also in whole tokens. Each decode of each iteration looks them up.
    settled: FxHashMap<ApplicationId, (f64, u32)>,
    settled_all: Option<(f64, u32)>,
    fresh: bool,
}

impl Lengths {
    pub fn add(&mut self, application: ApplicationId, tokens: u32) {
        self.all.add(f64::from(tokens));
        self.of.entry(application).or_default().add(f64::from(tokens));
        self.fresh = true;
    }

    /// Replaces the estimates if any changed enough. Returns whether it did.
    pub fn settle(&mut self) -> bool {
        if !std::mem::take(&mut self.fresh) {
            return false;
        }
        let drifted = |new: Option<f64>, old: Option<(f64, u32)>| match (new, old) {
            (Some(new), Some((old, _))) => (new - old).abs() > DRIFT * old.max(1.0),
            (new, old) => new.is_some() != old.is_some(),
        };
        let some = drifted(self.all.estimate(), self.settled_all)
            || self.of.iter().any(|(application, moments)| {
                let old = self.settled.get(application).copied();
                drifted(moments.estimate(), old)
            });
        if some {
            // The cast saturates. An estimate is positive and finite.
            let whole = |estimate: f64| (estimate, estimate.ceil() as u32);
            self.settled_all = self.all.estimate().map(whole);
            let known = self.of.iter();
            self.settled = known
                .filter_map(|(application, moments)| {
                    Some((*application, whole(moments.estimate()?)))
                })
                .collect();
        }
        some
    }

    /// Returns the expected number of remaining tokens of a job: `max(0, mean + 2σ − done)`, but at
    /// most what the job may generate.
    pub fn left(&self, job: &Job) -> u32 {
        let settled = self.settled.get(&job.spec.application).copied().or(self.settled_all);
        let tokens = settled.map_or(UNKNOWN, |(_, tokens)| tokens);
        tokens.min(job.spec.output_max).saturating_sub(job.generated)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{RequestId, Spec};

    fn job(application: u32, generated: u32) -> Job {
        let mut job = Job::new(Spec {
            id: RequestId(1),
            prompt: 10,
            output_max: 10_000,
            application: ApplicationId(application),
            ..Spec::default()
        });
        job.generated = generated;
        job
    }

    #[test]
    fn an_answer_is_as_long_as_its_application_s_mean_and_two_deviations() {
        let mut lengths = Lengths::default();
        for tokens in [10, 20, 10, 20] {
            lengths.add(ApplicationId(1), tokens);
            lengths.add(ApplicationId(2), 500);
        }
        assert_eq!(lengths.left(&job(1, 0)), 128, "nothing counts before it settles");
        assert!(lengths.settle());
        assert_eq!(lengths.left(&job(1, 0)), 25);
        assert_eq!(lengths.left(&job(1, 7)), 18);
        assert_eq!(lengths.left(&job(1, 400)), 0);
        assert_eq!(lengths.left(&job(2, 0)), 500);
        assert!(lengths.left(&job(3, 0)) > 257, "all stand in for the unknown");
    }

    #[test]
    fn ranks_are_made_anew_only_for_what_has_changed_much() {
        let mut lengths = Lengths::default();
        for _ in 0..1_000 {
            lengths.add(ApplicationId(1), 100);
        }
        assert!(lengths.settle());
        lengths.add(ApplicationId(1), 101);
        assert!(!lengths.settle());
        for _ in 0..1_000 {
            lengths.add(ApplicationId(1), 300);
        }
        assert!(lengths.settle());
    }
}
