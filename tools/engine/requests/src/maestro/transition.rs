//! Weights on their way out: a model that is put to sleep for KV has its memory until it has left
//! (Maestro §III-C, Algorithm 2's level 3).
//!
//! Going to sleep takes `Size / BW` over the link to the host, one model after the other. Until
//! then its bytes are on the GPU: who was promised KV out of them starts, or goes on, when they are
//! gone. What of them was promised to nobody is no headroom yet either. Whoever can't wait stops
//! the transition: the weights are dropped where they are, at once, and come from disk or farther
//! the next time (`StopTransition`).
//!
//! Weights that leave for other weights are not here: their time is in that of the activation,
//! which uses the same link after them.

use std::collections::BTreeMap;

use crate::workflow::{ModelId, ModelSpec, StageId};
use crate::{Span, Time};

fn sum<'a>(models: impl Iterator<Item = &'a ModelId>, table: &[ModelSpec]) -> u64 {
    models
        .filter_map(|model| table.get(usize::from(model.0)))
        .map(|model| model.weights)
        .sum()
}

/// Models that go to sleep, and stages that wait for that to grow.
#[derive(Clone, Debug, Default)]
pub(super) struct Leaving {
    until: BTreeMap<ModelId, Time>,
    /// Models that are loaded behind those that leave, over the same link: from when on, and bytes.
    behind: BTreeMap<ModelId, (Time, u64)>,
    /// Bytes that a running stage was promised and can't have yet.
    growing: BTreeMap<StageId, u64>,
}

impl Leaving {
    /// Weights begin to leave, after what the link has to do. When they have left.
    pub(super) fn begin(&mut self, model: ModelId, link_free: Time, takes: Span) -> Time {
        let until = link_free + takes;
        self.until.insert(model, until);
        until
    }

    /// The transition is over, or is no more: the model left, was stopped, or is wanted again.
    pub(super) fn end(&mut self, model: ModelId) {
        self.until.remove(&model);
        if self.until.is_empty() {
            self.behind.clear();
        }
    }

    /// It has left, if the transition that is under way is the one that ends at `now`: an end that
    /// was announced for an earlier one says nothing.
    pub(super) fn left(&mut self, model: ModelId, now: Time) {
        if self.until.get(&model).is_some_and(|until| *until <= now) {
            self.end(model);
        }
        self.behind.retain(|_, (from, _)| *from > now);
    }

    /// So many bytes of a model are loaded from `link_free` on.
    pub(super) fn load_behind(&mut self, model: ModelId, link_free: Time, bytes: u64) {
        if !self.until.is_empty() {
            self.behind.insert(model, (link_free, bytes));
        }
    }

    /// Bytes of models that have a place and are not there at all yet.
    pub(super) fn to_come(&self) -> u64 {
        self.behind.values().map(|(_, bytes)| bytes).sum()
    }

    /// Models that leave.
    pub(super) fn models(&self) -> impl Iterator<Item = ModelId> + '_ {
        self.until.keys().copied()
    }

    /// None does.
    pub(super) fn is_empty(&self) -> bool {
        self.until.is_empty()
    }

    /// Bytes of weights that are still there.
    pub(super) fn bytes(&self, table: &[ModelSpec]) -> u64 {
        sum(self.until.keys(), table)
    }

    /// Weights are there. What they came behind has left, then.
    pub(super) fn loaded(&mut self, model: ModelId) {
        if let Some((from, _)) = self.behind.remove(&model) {
            self.until.retain(|_, until| *until > from);
        }
    }

    /// A running stage waits for so many bytes.
    pub(super) fn grows(&mut self, stage: StageId, bytes: u64) {
        *self.growing.entry(stage).or_default() += bytes;
    }

    /// It is gone, or has them.
    pub(super) fn forget(&mut self, stage: StageId) {
        self.growing.remove(&stage);
    }

    /// Stages that wait to grow, the oldest first.
    pub(super) fn growing(&self) -> impl Iterator<Item = (StageId, u64)> + '_ {
        self.growing.iter().map(|(stage, bytes)| (*stage, *bytes))
    }

    /// Bytes that running stages were promised and don't have.
    pub(super) fn owed(&self) -> u64 {
        self.growing.values().sum()
    }
}
