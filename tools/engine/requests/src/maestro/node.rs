//! The state of one node: resident models, permitted KV bytes, and running and waiting stages
//! (Maestro §III-C).
//!
//! Memory is safe if `M_kv + M_res ≤ M_total`. [`Node::is_safe`] checks it after every step. `M_kv`
//! counts the KV that running and placed stages *may* use. A stage that needs more asks before it
//! writes ([`Node::grow`]). No KV is kept between two stages of a job. The paper turns prefix
//! caching off where models share memory (§III-C), so a job that loses its turn has nothing to
//! restore.
//!
//! A model that sleeps to free memory for KV takes time to leave ([`super::transition`]). Stages
//! that may use its memory wait for that, or stop the transition (level 3 of Algorithm 2). If
//! weights leave for other weights, the activation includes the time.

mod room;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::memory::{self, Action, MemoryPlan};
use super::residency::{Activation, Move, Residency};
use super::transition::Leaving;
use crate::workflow::{Class, ModelId, ModelSpec, NodeSpec, Readiness, StageId};
use crate::{Span, Time};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ask {
    pub stage: StageId,
    pub model: ModelId,
    pub class: Class,
    /// Bytes of KV that the stage may use: `R_need`.
    pub kv: u64,
    pub execution: Span,
    /// Highest level of actions that may be used to free memory for the stage.
    pub highest: Action,
    /// Cost of an interruption, `c_int` of eq. 4, in ns.
    pub interrupt: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeEstimate {
    /// Time until a slot is free, `T_q`.
    pub queue: Span,
    /// Time until the model is on the GPU, `T_act`.
    pub activation: Span,
    /// Cost of the actions that free memory, `C_deg`, in ns.
    pub degradation: u64,
    /// Bytes of KV that no stage may use yet, `R_head`.
    pub headroom: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Held {
    ask: Ask,
    started: Time,
    ends: Time,
}

#[derive(Clone, Debug, Default)]
struct Prepared {
    plan: MemoryPlan,
    activation: Activation,
    after: Option<Residency>,
    moves: Vec<Move>,
}

/// The effects of an operation on a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Done {
    pub swapped: Vec<StageId>,
    pub aborted: Vec<StageId>,
    pub moves: Vec<Move>,
    /// Models whose weights leave the GPU, with the time from now until their memory is free.
    pub leaving: Vec<(ModelId, Span)>,
    /// Models whose transition was stopped and whose weights were dropped.
    pub stopped: Vec<ModelId>,
    /// A model that is being loaded, and the time from now.
    pub activate: Option<(ModelId, Span)>,
    /// Whether the stage itself was swapped out or aborted, because the request failed.
    pub refused: bool,
    /// Whether the stage gets its memory only after weights have left ([`Node::slept`]).
    pub later: bool,
}

pub struct Node {
    pub spec: NodeSpec,
    table: Arc<[ModelSpec]>,
    residency: Residency,
    /// Models that are being loaded, and until when.
    loading: BTreeMap<ModelId, Time>,
    link_free: Time,
    leaving: Leaving,
    running: BTreeMap<StageId, Held>,
    ends: BTreeSet<(Time, StageId)>,
    queue: VecDeque<Ask>,
    swapped: BTreeMap<StageId, Ask>,
    kv: u64,
    /// Smoothed `T_q`, ns.
    delay: f64,
}

impl Node {
    pub fn new(spec: NodeSpec, table: Arc<[ModelSpec]>) -> Self {
        Self {
            residency: Residency::new(spec, Arc::clone(&table)),
            spec,
            table,
            loading: BTreeMap::new(),
            link_free: Time::ZERO,
            leaving: Leaving::default(),
            running: BTreeMap::new(),
            ends: BTreeSet::new(),
            queue: VecDeque::new(),
            swapped: BTreeMap::new(),
            kv: 0,
            delay: 0.0,
        }
    }

    pub fn at(&self, model: ModelId) -> Readiness {
        self.residency.at(model)
    }

    /// Reports whether a model is on the GPU and completely loaded.
    pub fn is_warm(&self, model: ModelId) -> bool {
        self.at(model) == Readiness::Running && !self.loading.contains_key(&model)
    }

    pub fn load(&self) -> usize {
        self.running.len() + self.queue.len()
    }

    pub fn swapped(&self) -> impl Iterator<Item = Ask> + '_ {
        self.swapped.values().copied()
    }

    /// Returns when all running stages should be done, plus the time of the waiting ones.
    pub fn empty_at(&self, now: Time) -> Time {
        let last = self.ends.last().map_or(now, |(end, _)| *end).max(now);
        let queued: u64 = self.queue.iter().map(|ask| ask.execution.0).sum();
        last + Span(queued / u64::from(self.spec.slots.max(1)))
    }

    /// Returns the bytes of KV that no stage may use yet, `R_head`. Weights that are leaving don't
    /// count as free.
    pub fn headroom(&self) -> u64 {
        self.promisable().saturating_sub(self.leaving.bytes(&self.table))
    }

    /// Returns the free bytes once all leaving weights are gone.
    fn promisable(&self) -> u64 {
        let used = self.residency.on_gpu() + self.kv + self.spec.other;
        self.spec.gpu.saturating_sub(used)
    }

    /// Reports whether running stages could use `more` bytes at this moment, while weights are
    /// still leaving.
    fn is_there(&self, more: u64) -> bool {
        if self.leaving.is_empty() {
            return true;
        }
        let promised: u64 = self.running.values().map(|held| held.ask.kv).sum();
        let fixed = self.residency.on_gpu() + self.leaving.bytes(&self.table) + self.spec.other;
        let fixed = fixed.saturating_sub(self.leaving.to_come());
        fixed + promised.saturating_sub(self.leaving.owed()) + more <= self.spec.gpu
    }

    /// Returns the most KV that a stage of a model can ever use on this node.
    pub fn most(&self, model: &ModelSpec) -> u64 {
        let fixed = self.spec.other + model.weights + model.context;
        self.spec.gpu.saturating_sub(fixed)
    }

    /// Reports whether permitted memory fits on the node and all sums agree.
    pub fn is_safe(&self) -> bool {
        let promised: u64 = self.running.values().map(|held| held.ask.kv).sum::<u64>()
            + self.queue.iter().map(|ask| ask.kv).sum::<u64>();
        let used = self.residency.on_gpu() + self.kv + self.spec.other;
        promised == self.kv
            && used <= self.spec.gpu
            && self.is_there(0)
            && self.residency.in_host() <= self.spec.host
            && self.residency.on_disk() <= self.spec.disk
            && self.running.len() <= self.spec.slots as usize
            && self.running.len() == self.ends.len()
            && self.running.values().all(|held| self.is_warm(held.ask.model))
    }

    /// Returns the present `T_q`, not smoothed: the time until enough stages have ended.
    fn queue_now(&self, now: Time) -> Span {
        let ahead = self.load();
        let Some(over) = ahead.checked_sub(self.spec.slots as usize) else { return Span::ZERO };
        let end = self.ends.iter().nth(over).or(self.ends.last());
        end.map_or(Span::ZERO, |(end, _)| end.since(now))
    }

    fn queue_estimate(&self, now: Time) -> Span {
        let present = self.queue_now(now);
        if present == Span::ZERO {
            // The mean is only updated when a stage is placed. A node that is avoided for its old
            // queue would keep that queue in its mean for good.
            return present;
        }
        Span(f64::midpoint(self.delay, present.0 as f64) as u64)
    }

    /// Returns the estimate for a stage, or `None` if the node can't take it now.
    pub fn estimate(&self, ask: &Ask, now: Time) -> Option<NodeEstimate> {
        let prepared = self.prepare(ask, now)?;
        let takes = prepared.activation.takes;
        let leaves = self.leaves(&prepared.plan);
        // All transfers share one link and go one after another. Leaving weights go behind all
        // earlier transfers, which may include this model's own.
        let activation = match self.loading.get(&ask.model) {
            Some(until) if leaves == Span::ZERO => until.since(now),
            _ if takes + leaves > Span::ZERO => self.link_free.since(now) + takes + leaves,
            _ => Span::ZERO,
        };
        Some(NodeEstimate {
            queue: self.queue_estimate(now),
            activation,
            degradation: prepared.plan.cost,
            headroom: self.headroom(),
        })
    }

    /// Places a stage in the node's queue. Returns `None` if the node can't take it.
    pub fn place(&mut self, ask: &Ask, now: Time) -> Option<Done> {
        let prepared = self.prepare(ask, now)?;
        let mut done = Done::default();
        if let Some(after) = prepared.after {
            self.residency = after;
        }
        self.transit(&prepared.plan, now, &mut done);
        self.interrupt(&prepared.plan, &mut done);
        done.moves = prepared.moves;
        done.moves.extend(prepared.activation.moves);
        if let Some(from) = prepared.activation.from {
            // If the model was leaving, its remaining bytes count only once.
            self.leaving.end(ask.model);
            // Transfers go one after another on the link.
            let from_then = now.max(self.link_free);
            let of = &self.table[usize::from(ask.model.0)];
            let context = if from == Readiness::Sleeping { 0 } else { of.context };
            self.leaving.load_behind(ask.model, from_then, of.weights + context);
            let until = from_then + prepared.activation.takes;
            self.link_free = until;
            // The model counts as used until it is loaded. A model that is being loaded can't make
            // room, and a second transfer would end with the first one's event.
            if self.loading.insert(ask.model, until).is_none() {
                self.residency.acquire(ask.model);
            }
            done.activate = Some((ask.model, until.since(now)));
        }
        self.delay = self.queue_estimate(now).0 as f64;
        let mut ask = *ask;
        if self.swapped.remove(&ask.stage).is_some() {
            self.count_host();
            let back = Span::transfer(ask.kv, self.spec.host_rate);
            ask.execution = ask.execution + back;
        }
        self.residency.acquire(ask.model);
        self.kv += ask.kv;
        self.queue.push_back(ask);
        Some(done)
    }

    pub fn activated(&mut self, model: ModelId) {
        self.leaving.loaded(model);
        if self.loading.remove(&model).is_some() {
            self.residency.release(model);
        }
    }

    /// Starts the first queued stage whose model is loaded, if a slot is free. Returns the stage
    /// and the KV that it may use.
    pub fn start(&mut self, now: Time) -> Option<(StageId, u64)> {
        if self.running.len() >= self.spec.slots as usize {
            return None;
        }
        let ready = |ask: &Ask| !self.loading.contains_key(&ask.model) && self.is_there(ask.kv);
        let at = self.queue.iter().position(ready)?;
        let ask = self.queue.remove(at)?;
        let ends = now + ask.execution;
        let held = Held { ask, started: now, ends };
        self.running.insert(ask.stage, held);
        self.ends.insert((ends, ask.stage));
        Some((ask.stage, ask.kv))
    }

    /// Raises the KV of a running stage to at least `bytes` and at most `wished`. Returns the new
    /// limit.
    pub fn grow(
        &mut self,
        stage: StageId,
        (bytes, wished): (u64, u64),
        interrupt: u64,
        now: Time,
    ) -> (u64, Done) {
        let mut done = Done::default();
        let Some(held) = self.running.get(&stage).copied() else { return (0, done) };
        let more = bytes.saturating_sub(held.ask.kv);
        let headroom = self.headroom();
        if more > headroom {
            let ask = Ask { highest: Action::Abort, interrupt, ..held.ask };
            let offers = self.offers(&ask, now);
            match memory::plan(more - headroom, offers, Action::Abort, interrupt) {
                Some(plan) => {
                    let (after, moves) = self.demoted(&plan);
                    self.residency = after;
                    done.moves = moves;
                    self.transit(&plan, now, &mut done);
                    self.interrupt(&plan, &mut done);
                }
                None => self.give_way(stage, bytes, &mut done),
            }
        }
        let headroom = self.headroom();
        let Some(had) = self.running.get(&stage).map(|held| held.ask.kv) else { return (0, done) };
        let granted = had + wished.saturating_sub(had).min(headroom).max(more);
        if !self.is_there(granted - had) {
            self.leaving.grows(stage, granted - had);
            done.later = true;
        }
        self.kv += granted - had;
        if let Some(held) = self.running.get_mut(&stage) {
            held.ask.kv = granted;
        }
        (granted, done)
    }

    /// Swaps the stage itself out until there is room for `bytes`, or aborts it if host memory is
    /// full. Used if no other action frees enough.
    fn give_way(&mut self, stage: StageId, bytes: u64, done: &mut Done) {
        done.refused = true;
        let room = self.spec.host.saturating_sub(self.residency.in_host());
        if bytes <= room {
            self.swap_out(stage);
            if let Some(ask) = self.swapped.get_mut(&stage) {
                ask.kv = bytes;
            }
            self.count_host();
            done.swapped.push(stage);
        } else if self.remove(stage).is_some() {
            done.aborted.push(stage);
        }
    }

    /// Removes a stage that ended or was cancelled, and frees its memory.
    pub fn remove(&mut self, stage: StageId) -> Option<Ask> {
        let ask = if let Some(held) = self.running.remove(&stage) {
            self.leaving.forget(stage);
            self.ends.remove(&(held.ends, stage));
            held.ask
        } else if let Some(at) = self.queue.iter().position(|ask| ask.stage == stage) {
            self.queue.remove(at)?
        } else {
            let ask = self.swapped.remove(&stage)?;
            self.count_host();
            return Some(ask);
        };
        self.kv -= ask.kv;
        self.residency.release(ask.model);
        Some(ask)
    }
}
