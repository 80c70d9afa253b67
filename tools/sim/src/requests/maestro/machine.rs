//! A node in virtual time: stages of several models on one GPU.
//!
//! Coarser than [`super::super::cluster`], as the paper's own simulator is: no iterations. Stages
//! of one model decode together, each as fast as an iteration of that batch; models that have
//! stages share the GPU evenly in time; a prompt is computed before the first token. What is exact
//! is memory: a stage that has filled what it was promised stops until it may have more.

use std::collections::BTreeMap;

use laxity_requests::workflow::{ModelId, StageId};

use super::catalogue::Served;

/// A stage that runs.
#[derive(Clone, Debug)]
pub(super) struct Running {
    pub(super) model: ModelId,
    pub(super) prompt: u32,
    pub(super) output: u32,
    /// Bytes of KV that it may have.
    pub(super) promised: u64,
    /// Time until it computes: the way there, its KV's way back from host memory, ns. It has no
    /// share of the GPU meanwhile.
    pub(super) delay: f64,
    /// Of its prompt, ns alone.
    pub(super) prefill: f64,
    pub(super) generated: f64,
    /// It asked for more and waits.
    pub(super) stopped: bool,
}

impl Running {
    /// Tokens up to which it may go.
    fn goal(&self, kv_per_token: u64) -> f64 {
        let tokens = self.promised / kv_per_token.max(1);
        let room = tokens.saturating_sub(u64::from(self.prompt));
        (room as f64).min(f64::from(self.output))
    }

    /// Bytes of KV that it has.
    fn kv(&self, kv_per_token: u64) -> u64 {
        let tokens = f64::from(self.prompt) + self.generated;
        if self.delay > 0.0 {
            0
        } else {
            (tokens * kv_per_token as f64) as u64
        }
    }
}

/// What a stage came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Came {
    Finished(StageId),
    /// It needs this many bytes in all.
    Outgrew(StageId, u64),
}

/// A node.
#[derive(Clone, Debug, Default)]
pub(super) struct Machine {
    pub(super) running: BTreeMap<StageId, Running>,
    /// Until when it is advanced, ns.
    at: f64,
    /// Changes with every event: what was foreseen before is void.
    pub(super) epoch: u64,
    /// ns in which it had something to do.
    pub(super) busy: f64,
}

/// Amounts below this are none: rounding.
const NONE: f64 = 1e-6;

impl Machine {
    /// Stages per model, and models that have some.
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

    /// Runs until `now`, with nothing that changes in between.
    pub(super) fn advance(&mut self, now: f64, models: &[Served]) {
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
                // Times are whole nanoseconds, rounded up: not a part of a token more than it may.
                let goal = stage.goal(models[model].spec.kv_per_token);
                stage.generated = (stage.generated + tokens).min(goal);
            }
        }
    }

    /// When something changes by itself.
    pub(super) fn next(&self, models: &[Served]) -> Option<f64> {
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

    /// Stages that came to their end, or to the end of what they were promised. They stop.
    pub(super) fn came(&mut self, models: &[Served]) -> Vec<Came> {
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

    /// Bytes of KV that are written.
    pub(super) fn kv(&self, models: &[Served]) -> u64 {
        let of = |stage: &Running| stage.kv(models[usize::from(stage.model.0)].spec.kv_per_token);
        self.running.values().map(of).sum()
    }
}
