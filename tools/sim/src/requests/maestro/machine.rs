//! A node in virtual time that runs stages of several models on one GPU.
//!
//! Like the paper's simulator it has no iterations, in contrast to [`super::super::cluster`].
//! Stages of one model decode together, at the speed of an iteration of that batch. Models with
//! stages share the GPU's time evenly. A prompt is computed before the first token. Memory is
//! exact: a stage that has filled its promised memory stops until it gets more.

use std::collections::BTreeMap;

use laxity_requests::workflow::{ModelId, StageId};

use super::catalogue::ServedModel;

#[derive(Clone, Debug)]
pub(super) struct Running {
    pub(super) model: ModelId,
    pub(super) prompt: u32,
    pub(super) output: u32,
    /// Bytes of KV cache that the stage may use.
    pub(super) promised: u64,
    /// Time until the stage computes, in nanoseconds: network delay and reload of its KV cache from
    /// host memory. It uses no GPU time meanwhile.
    pub(super) delay: f64,
    /// Remaining time of the prompt on an idle GPU, in nanoseconds.
    pub(super) prefill: f64,
    pub(super) generated: f64,
    pub(super) stopped: bool,
}

impl Running {
    /// Returns the number of tokens up to which the stage may run.
    fn goal(&self, kv_per_token: u64) -> f64 {
        let tokens = self.promised / kv_per_token.max(1);
        let room = tokens.saturating_sub(u64::from(self.prompt));
        (room as f64).min(f64::from(self.output))
    }

    fn kv(&self, kv_per_token: u64) -> u64 {
        let tokens = f64::from(self.prompt) + self.generated;
        if self.delay > 0.0 { 0 } else { (tokens * kv_per_token as f64) as u64 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Came {
    Finished(StageId),
    Outgrew(StageId, u64),
}

#[derive(Clone, Debug, Default)]
pub(super) struct NodeState {
    pub(super) running: BTreeMap<StageId, Running>,
    /// Time up to which the node was advanced, in nanoseconds.
    at: f64,
    /// Number of events so far. Predictions of an earlier epoch are void.
    pub(super) epoch: u64,
    /// Time in which the node was busy, in nanoseconds.
    pub(super) busy: f64,
}

const NONE: f64 = 1e-6;

impl NodeState {
    fn batches(&self, models: usize) -> (Vec<usize>, f64) {
        let mut batches = vec![0; models];
        for stage in self.running.values() {
            if stage.delay <= NONE && !stage.stopped {
                batches[usize::from(stage.model.0)] += 1;
            }
        }
        let active = batches.iter().filter(|batch| **batch > 0).count();
        (batches, active as f64)
    }

    /// Advances to `now`. No event may lie in between.
    pub(super) fn advance(&mut self, now: f64, models: &[ServedModel]) {
        let passed = now - self.at;
        self.at = now;
        if passed <= 0.0 || self.running.is_empty() {
            return;
        }
        self.busy += passed;
        let (batches, active) = self.batches(models.len());
        for stage in self.running.values_mut() {
            if stage.stopped {
                continue;
            }
            if stage.delay > NONE {
                stage.delay = (stage.delay - passed).max(0.0);
            } else if stage.prefill > NONE {
                stage.prefill = (stage.prefill - passed / active).max(0.0);
            } else {
                let model = usize::from(stage.model.0);
                let tokens = passed / (active * models[model].decode(batches[model]));
                // Times are rounded up to nanoseconds, so tokens are clipped at the stage's goal.
                let goal = stage.goal(models[model].spec.kv_per_token);
                stage.generated = (stage.generated + tokens).min(goal);
            }
        }
    }

    pub(super) fn next(&self, models: &[ServedModel]) -> Option<f64> {
        let (batches, active) = self.batches(models.len());
        self.running
            .values()
            .filter(|stage| !stage.stopped)
            .map(|stage| {
                let model = usize::from(stage.model.0);
                let served = &models[model];
                if stage.delay > NONE {
                    stage.delay
                } else if stage.prefill > NONE {
                    stage.prefill * active
                } else {
                    let left = stage.goal(served.spec.kv_per_token) - stage.generated;
                    left.max(0.0) * active * served.decode(batches[model])
                }
            })
            .min_by(f64::total_cmp)
            .map(|left| self.at + left)
    }

    pub(super) fn came(&mut self, models: &[ServedModel]) -> Vec<Came> {
        let mut came = Vec::new();
        for (id, stage) in &mut self.running {
            if stage.stopped || stage.delay > NONE || stage.prefill > NONE {
                continue;
            }
            let kv = models[usize::from(stage.model.0)].spec.kv_per_token;
            if stage.generated + NONE < stage.goal(kv) {
                continue;
            }
            stage.stopped = true;
            if stage.generated + NONE >= f64::from(stage.output) {
                came.push(Came::Finished(*id));
            } else {
                let tokens = u64::from(stage.prompt) + stage.generated as u64 + 16;
                let most = u64::from(stage.prompt) + u64::from(stage.output);
                came.push(Came::Outgrew(*id, tokens.min(most) * kv));
            }
        }
        came
    }

    pub(super) fn kv(&self, models: &[ServedModel]) -> u64 {
        let of = |stage: &Running| stage.kv(models[usize::from(stage.model.0)].spec.kv_per_token);
        self.running.values().map(of).sum()
    }
}
