//! The migrator (§5.1, disaggregated pools), which chooses a decode instance when a prompt is
//! computed and not on arrival.
//!
//! It is Algorithm 1 for the second stage. Computed prompts wait ordered by (TPOT, arrival).
//! Instances are asked in the order in which their next step ends, since "in the D stage, workers
//! can be interrupted at each decode iteration". An instance takes a request if it has room and its
//! step stays below the tightest TPOT (the second half of eq. 7).
//!
//! Departures from the paper: there is no admission probability, because the first token has
//! already come. An idle instance takes the first request even if its step is too long, because no
//! instance is better. KV that is on its way counts as present.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::budget::InstanceLoad;
use super::latency::Linear;
use crate::Time;
use crate::ledger::{InstanceTable, Targets};
use crate::request::{InstanceId, RequestId, Spec};

type MigrationKey = (u64, Time, RequestId);

#[derive(Clone, Debug, Default)]
pub struct Migrator {
    line: BTreeMap<MigrationKey, Spec>,
    keys: BTreeMap<RequestId, MigrationKey>,
    /// Requests that arrived after all instances were asked.
    fresh: VecDeque<MigrationKey>,
    /// Instances to ask, by the end of their next step.
    open: BTreeSet<(Time, InstanceId)>,
    /// Instances that take none of the waiting requests until something changes there. They weren't
    /// asked about those in `fresh` yet.
    full: BTreeSet<(Time, InstanceId)>,
    ends: BTreeMap<InstanceId, Time>,
}

#[derive(Clone, Copy)]
pub(super) struct Judge<'a> {
    pub ledger: &'a InstanceTable,
    pub model: &'a Linear,
    pub block_tokens: u32,
    pub headroom: f64,
}

impl Judge<'_> {
    fn takes(&self, instance: InstanceId, tpot: u64, spec: &Spec) -> bool {
        let Some(row) = self.ledger.row(instance) else { return false };
        let tokens = spec.prompt.saturating_add(spec.generated);
        let with = InstanceLoad::of(row).with_decode(tokens, tpot);
        let room = row.room(self.block_tokens, self.headroom) >= f64::from(tokens);
        row.is_idle() || room && with.relax_ns(self.model) > 0.0
    }
}

impl Migrator {
    pub fn push(&mut self, spec: &Spec, targets: Targets) {
        let key = (targets.tpot, spec.arrival, spec.id);
        self.keys.insert(spec.id, key);
        self.line.insert(key, *spec);
        self.fresh.push_back(key);
    }

    pub fn remove(&mut self, request: RequestId) {
        if let Some(key) = self.keys.remove(&request) {
            self.line.remove(&key);
        }
    }

    /// Lets an instance be asked again. `end` is when its next step ends.
    pub fn open(&mut self, instance: InstanceId, end: Time) {
        self.close(instance);
        self.ends.insert(instance, end);
        self.open.insert((end, instance));
    }

    pub fn close(&mut self, instance: InstanceId) {
        if let Some(end) = self.ends.remove(&instance) {
            self.open.remove(&(end, instance));
            self.full.remove(&(end, instance));
        }
    }

    pub(super) fn len(&self) -> usize {
        self.line.len()
    }

    /// Returns the next request that can move and its instance. Considers the first `scan_max`
    /// requests.
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

    fn leave(&mut self, key: MigrationKey, instance: InstanceId) -> Option<(Spec, InstanceId)> {
        self.keys.remove(&key.2);
        self.line.remove(&key).map(|spec| (spec, instance))
    }
}
