//! The migrator (§5.1, disaggregated pools): where a request decodes is decided when its prompt is
//! computed, not when it came.
//!
//! Algorithm 1 for the second stage. Prompts that are computed wait by (TPOT, arrival); instances
//! are asked by when their next step ends, since "in the D stage, workers can be interrupted at
//! each decode iteration". An instance takes whom it has room for and whose step stays below the
//! tightest TPOT (the second half of eq. 7; there is no prompt to compute).
//!
//! Departures. There is no admission probability: the first token is out, `calculate_p` has nothing
//! to be about. An instance with nothing to do takes the first though its step alone is too long:
//! nobody else could do better. KV that is on its way counts as if it were there.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::budget::InstanceLoad;
use super::latency::Linear;
use crate::Time;
use crate::ledger::{InstanceTable, Targets};
use crate::request::{InstanceId, RequestId, Spec};

type Key = (u64, Time, RequestId);

/// Prompts that are computed and instances that decode.
#[derive(Clone, Debug, Default)]
pub struct Migrator {
    line: BTreeMap<Key, Spec>,
    keys: BTreeMap<RequestId, Key>,
    /// Those that came since all instances were asked.
    fresh: VecDeque<Key>,
    /// Instances to ask, by the end of their next step.
    open: BTreeSet<(Time, InstanceId)>,
    /// Instances that take none of those that are not fresh. They say so until something changes
    /// there.
    full: BTreeSet<(Time, InstanceId)>,
    ends: BTreeMap<InstanceId, Time>,
}

/// What instances are judged by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Judge<'a> {
    pub ledger: &'a InstanceTable,
    pub model: &'a Linear,
    pub block_tokens: u32,
    pub headroom: f64,
}

impl Judge<'_> {
    fn takes(&self, instance: InstanceId, tpot: u64, spec: &Spec) -> bool {
        let Some(row) = self.ledger.row(instance) else {
            return false;
        };
        let tokens = spec.prompt.saturating_add(spec.generated);
        let with = InstanceLoad::of(row).with_decode(tokens, tpot);
        let room = row.room(self.block_tokens, self.headroom) >= f64::from(tokens);
        row.is_idle() || room && with.relax_ns(self.model) > 0.0
    }
}

impl Migrator {
    /// A prompt is computed.
    pub fn push(&mut self, spec: &Spec, targets: Targets) {
        let key = (targets.tpot, spec.arrival, spec.id);
        self.keys.insert(spec.id, key);
        self.line.insert(key, *spec);
        self.fresh.push_back(key);
    }

    /// Nobody wants it any more, or it was lost.
    pub fn remove(&mut self, request: RequestId) {
        if let Some(key) = self.keys.remove(&request) {
            self.line.remove(&key);
        }
    }

    /// An instance may be asked (again); its next step ends then.
    pub fn open(&mut self, instance: InstanceId, end: Time) {
        self.close(instance);
        self.ends.insert(instance, end);
        self.open.insert((end, instance));
    }

    /// An instance is gone.
    pub fn close(&mut self, instance: InstanceId) {
        if let Some(end) = self.ends.remove(&instance) {
            self.open.remove(&(end, instance));
            self.full.remove(&(end, instance));
        }
    }

    /// Prompts that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.line.len()
    }

    /// None waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.line.is_empty()
    }

    /// The next one that can move, and where to. An instance looks at the first `scan_max` in line.
    pub(super) fn next(&mut self, judge: Judge<'_>, scan_max: usize) -> Option<(Spec, InstanceId)> {
        if self.line.is_empty() {
            self.fresh.clear();
            return None;
        }
        while let Some((end, instance)) = self.open.first().copied() {
            let mut line = self.line.iter().take(scan_max);
            if let Some((key, _)) = line.find(|(key, spec)| judge.takes(instance, key.0, spec)) {
                return self.leave(*key, instance);
            }
            self.open.pop_first();
            self.full.insert((end, instance));
        }
        while let Some(key) = self.fresh.front().copied() {
            let taker = self.line.get(&key).and_then(|spec| {
                let mut full = self.full.iter();
                full.find(|at| judge.takes(at.1, key.0, spec))
            });
            if let Some((_, instance)) = taker.copied() {
                return self.leave(key, instance);
            }
            self.fresh.pop_front();
        }
        None
    }

    fn leave(&mut self, key: Key, instance: InstanceId) -> Option<(Spec, InstanceId)> {
        self.keys.remove(&key.2);
        self.line.remove(&key).map(|spec| (spec, instance))
    }
}
