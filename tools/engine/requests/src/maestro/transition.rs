//! Weights that leave the GPU: a model that sleeps to make room for KV uses its memory until all of
//! it is moved (Maestro §III-C, Algorithm 2's level 3).
//!
//! The move takes `Size / BW` on the link to the host, one model after another. A stage that may
//! use the memory waits until then. Bytes that no stage may use don't count as headroom yet.
//! `StopTransition` ends the move at once: the weights are dropped, and the next activation loads
//! them from disk or the remote store.
//!
//! Weights that leave for other weights aren't here. The activation includes their time, because it
//! uses the same link afterwards.

use std::collections::BTreeMap;

use crate::workflow::{ModelId, ModelSpec, StageId};
use crate::{Span, Time};

/// Models that move to host memory, and stages that wait for it to grow.
#[derive(Clone, Debug, Default)]
pub(super) struct Leaving {
    until: BTreeMap<ModelId, Time>,
    /// Models that are loaded after the leaving ones on the same link: when that begins, and the
    /// bytes.
    behind: BTreeMap<ModelId, (Time, u64)>,
    /// Bytes that a running stage may use but that aren't free yet.
    growing: BTreeMap<StageId, u64>,
}

impl Leaving {
    /// Begins a move once the link is free. Returns when it ends.
    pub(super) fn begin(&mut self, model: ModelId, link_free: Time, takes: Span) -> Time {
        let until = link_free + takes;
        self.until.insert(model, until);
        until
    }

    /// Ends a transition: the model left, was stopped, or is used again.
    pub(super) fn end(&mut self, model: ModelId) {
        self.until.remove(&model);
        if self.until.is_empty() {
            self.behind.clear();
        }
    }

    /// Ends a transition if it is the one that ends at `now`. An event of an earlier transition of
    /// the model has no effect.
    pub(super) fn left(&mut self, model: ModelId, now: Time) {
        if self.until.get(&model).is_some_and(|until| *until <= now) {
            self.end(model);
        }
        self.behind.retain(|_, (from, _)| *from > now);
    }

    /// Records that `bytes` of a model are loaded from `link_free` on.
    pub(super) fn load_behind(&mut self, model: ModelId, link_free: Time, bytes: u64) {
        if !self.until.is_empty() {
            self.behind.insert(model, (link_free, bytes));
        }
    }

    /// Returns the bytes of models that have memory but aren't loaded at all yet.
    pub(super) fn to_come(&self) -> u64 {
        self.behind.values().map(|(_, bytes)| bytes).sum()
    }

    pub(super) fn models(&self) -> impl Iterator<Item = ModelId> + '_ {
        self.until.keys().copied()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.until.is_empty()
    }

    /// Returns the bytes of leaving weights that are still on the GPU.
    pub(super) fn bytes(&self, table: &[ModelSpec]) -> u64 {
        let models = self.until.keys().filter_map(|model| table.get(usize::from(model.0)));
        models.map(|model| model.weights).sum()
    }

    /// Marks a model as loaded. Weights that left before it on the link are gone, too.
    pub(super) fn loaded(&mut self, model: ModelId) {
        if let Some((from, _)) = self.behind.remove(&model) {
            self.until.retain(|_, until| *until > from);
        }
    }

    /// Records that a running stage waits for `bytes` more bytes.
    pub(super) fn grows(&mut self, stage: StageId, bytes: u64) {
        *self.growing.entry(stage).or_default() += bytes;
    }

    /// Removes a stage that is gone or has its bytes.
    pub(super) fn forget(&mut self, stage: StageId) {
        self.growing.remove(&stage);
    }

    /// Returns the stages that wait to grow, the oldest first.
    pub(super) fn growing(&self) -> impl Iterator<Item = (StageId, u64)> + '_ {
        self.growing.iter().map(|(stage, bytes)| (*stage, *bytes))
    }

    /// Returns the bytes that running stages may use but that aren't free yet.
    pub(super) fn owed(&self) -> u64 {
        self.growing.values().sum()
    }
}
