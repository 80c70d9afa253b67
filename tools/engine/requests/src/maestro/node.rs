//! The runtime of one node: what is resident, which KV bytes are promised to whom, who runs and who
//! waits (Maestro §III-C).
//!
//! Memory is safe if `M_kv + M_res ≤ M_total`: [`Node::is_safe`], after every step. `M_kv` is what
//! is *promised* to stages that run and to those that were placed and wait for a slot or for
//! weights; stages that turn out longer ask for more before they write it ([`Node::grow`]). Between
//! two stages of a job no KV is kept: an invocation is over, and the paper turns prefix caching off
//! where models share memory (§III-C), so that a job that loses its turn has nothing to restore.
//!
//! A model that is put to sleep for KV takes time to leave ([`super::transition`]): who was
//! promised its memory waits for that, and who can't wait stops it (level 3 of Algorithm 2).
//! Weights that leave for other weights are charged to the activation that they leave for.

mod room;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::memory::{self, Action, Plan};
use super::residency::{Activation, Move, Residency};
use super::transition::Leaving;
use crate::workflow::{Class, ModelId, ModelSpec, NodeSpec, Readiness, StageId};
use crate::{Span, Time};

/// A stage that asks for a place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ask {
    /// Which.
    pub stage: StageId,
    /// Its model.
    pub model: ModelId,
    /// Its class.
    pub class: Class,
    /// Bytes of KV that it is promised: `R_need`.
    pub kv: u64,
    /// How long it should run.
    pub execution: Span,
    /// What may be done to others for it.
    pub highest: Action,
    /// `c_int` of eq. 4, ns.
    pub interrupt: u64,
}

/// What a node says of a stage that asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Estimate {
    /// `T_q`.
    pub queue: Span,
    /// `T_act`.
    pub activation: Span,
    /// `C_deg`, ns.
    pub degradation: u64,
    /// `R_head`: bytes of KV that nobody has.
    pub headroom: u64,
}

/// A stage on a node.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Held {
    ask: Ask,
    started: Time,
    ends: Time,
}

/// How a place is made: what [`Node::place`] does.
#[derive(Clone, Debug, Default)]
struct Prepared {
    plan: Plan,
    activation: Activation,
    after: Option<Residency>,
    moves: Vec<Move>,
}

/// What was done for somebody.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Done {
    /// Stages whose KV went to host memory.
    pub swapped: Vec<StageId>,
    /// Stages that lost what they did.
    pub aborted: Vec<StageId>,
    /// Models that moved down.
    pub moves: Vec<Move>,
    /// Of those, which take how long from now until their memory is free.
    pub leaving: Vec<(ModelId, Span)>,
    /// Models that were leaving and are dropped instead.
    pub stopped: Vec<ModelId>,
    /// Weights that are on their way: from where, and for how long.
    pub activate: Option<(ModelId, Readiness, Span)>,
    /// It did not work: the stage itself was swapped out or aborted, and is among those.
    pub refused: bool,
    /// It worked, and the stage has what it asked for when weights have left ([`Node::slept`]).
    pub later: bool,
}

/// A node.
#[derive(Clone, Debug)]
pub struct Node {
    spec: NodeSpec,
    residency: Residency,
    /// Models whose weights are on their way, until when.
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
    /// An empty one.
    #[must_use]
    pub fn new(spec: NodeSpec, table: &[ModelSpec]) -> Self {
        Self {
            residency: Residency::new(&spec, table),
            spec,
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

    /// What it is.
    #[must_use]
    pub const fn spec(&self) -> &NodeSpec {
        &self.spec
    }

    /// Where a model is.
    #[must_use]
    pub fn at(&self, model: ModelId) -> Readiness {
        self.residency.at(model)
    }

    /// The model is on the GPU and not on its way.
    #[must_use]
    pub fn is_warm(&self, model: ModelId) -> bool {
        self.at(model) == Readiness::Running && !self.loading.contains_key(&model)
    }

    /// Stages that run or are placed.
    #[must_use]
    pub fn load(&self) -> usize {
        self.running.len() + self.queue.len()
    }

    /// Stages that are placed and wait.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Stages whose KV is in host memory.
    pub fn swapped(&self) -> impl Iterator<Item = Ask> + '_ {
        self.swapped.values().copied()
    }

    /// When the last of those that run should be done, and those that wait after them.
    #[must_use]
    pub fn empty_at(&self, now: Time) -> Time {
        let last = self.ends.last().map_or(now, |(end, _)| *end).max(now);
        let queued: u64 = self.queue.iter().map(|ask| ask.execution.0).sum();
        last + Span(queued / u64::from(self.spec.slots.max(1)))
    }

    /// `R_head`: bytes of KV that nobody has, now: what weights still hold that leave is none.
    #[must_use]
    pub fn headroom(&self, table: &[ModelSpec]) -> u64 {
        self.promisable(table)
            .saturating_sub(self.leaving.bytes(table))
    }

    /// The same once all weights have left that do.
    fn promisable(&self, table: &[ModelSpec]) -> u64 {
        let used = self.residency.on_gpu(table) + self.kv + self.spec.other;
        self.spec.gpu.saturating_sub(used)
    }

    /// Running stages could have so many bytes more at this moment, weights that have not left
    /// counted.
    fn is_there(&self, more: u64, table: &[ModelSpec]) -> bool {
        if self.leaving.is_empty() {
            return true;
        }
        let promised: u64 = self.running.values().map(|held| held.ask.kv).sum();
        let fixed = self.residency.on_gpu(table) + self.leaving.bytes(table) + self.spec.other;
        let fixed = fixed.saturating_sub(self.leaving.to_come());
        fixed + promised.saturating_sub(self.leaving.owed()) + more <= self.spec.gpu
    }

    /// The most KV that a stage of a model can ever have here.
    #[must_use]
    pub fn most(&self, model: &ModelSpec) -> u64 {
        let fixed = self.spec.other + model.weights + model.context;
        self.spec.gpu.saturating_sub(fixed)
    }

    /// No more memory is promised than there is, and the books agree with each other.
    #[must_use]
    pub fn is_safe(&self, table: &[ModelSpec]) -> bool {
        let promised: u64 = self.running.values().map(|held| held.ask.kv).sum::<u64>()
            + self.queue.iter().map(|ask| ask.kv).sum::<u64>();
        let used = self.residency.on_gpu(table) + self.kv + self.spec.other;
        promised == self.kv
            && used <= self.spec.gpu
            && self.is_there(0, table)
            && self.residency.in_host(table) <= self.spec.host
            && self.residency.on_disk(table) <= self.spec.disk
            && self.running.len() <= self.spec.slots as usize
            && self.running.len() == self.ends.len()
            && self
                .running
                .values()
                .all(|held| self.is_warm(held.ask.model))
    }

    /// `T_q` as it is now (not smoothed): until so many have ended that a slot is left.
    fn queue_now(&self, now: Time) -> Span {
        let ahead = self.load();
        let Some(over) = ahead.checked_sub(self.spec.slots as usize) else {
            return Span::ZERO;
        };
        let end = self.ends.iter().nth(over).or(self.ends.last());
        end.map_or(Span::ZERO, |(end, _)| end.since(now))
    }

    fn queue_estimate(&self, now: Time) -> Span {
        Span(f64::midpoint(self.delay, self.queue_now(now).0 as f64) as u64)
    }

    /// What it says of a stage that asks; nothing if it can't have it now.
    #[must_use]
    pub fn estimate(&self, ask: &Ask, table: &[ModelSpec], now: Time) -> Option<Estimate> {
        let prepared = self.prepare(ask, table, now)?;
        let takes = prepared.activation.takes;
        let leaves = self.leaves(&prepared.plan, table);
        // Whatever has to go over the link waits for it once: what leaves goes behind all that is
        // on its way, weights that are on their way to here included.
        let activation = match self.loading.get(&ask.model) {
            Some(until) if leaves == Span::ZERO => until.since(now),
            _ if takes + leaves > Span::ZERO => self.link_free.since(now) + takes + leaves,
            _ => Span::ZERO,
        };
        Some(Estimate {
            queue: self.queue_estimate(now),
            activation,
            degradation: prepared.plan.cost,
            headroom: self.headroom(table),
        })
    }

    /// Gives a stage a place: it waits in the queue of the node from now on. Nothing if it can't
    /// have one.
    pub fn place(&mut self, ask: &Ask, table: &[ModelSpec], now: Time) -> Option<Done> {
        let prepared = self.prepare(ask, table, now)?;
        let mut done = Done::default();
        if let Some(after) = prepared.after {
            self.residency = after;
        }
        self.transit(&prepared.plan, table, now, &mut done);
        self.interrupt(&prepared.plan, table, &mut done);
        done.moves = prepared.moves;
        done.moves.extend(prepared.activation.moves);
        if let Some(from) = prepared.activation.from {
            // If it was about to leave, what is there of it is counted once.
            self.leaving.end(ask.model);
            // One transfer after the other on the link.
            let from_then = now.max(self.link_free);
            let of = &table[usize::from(ask.model.0)];
            let context = if from == Readiness::Sleeping {
                0
            } else {
                of.context
            };
            self.leaving
                .load_behind(ask.model, from_then, of.weights + context);
            let until = from_then + prepared.activation.takes;
            self.link_free = until;
            // It stays until it is there, whoever may still want it: what is on its way can't make
            // room, and a second transfer would be taken for there when the first is.
            if self.loading.insert(ask.model, until).is_none() {
                self.residency.acquire(ask.model);
            }
            done.activate = Some((ask.model, from, until.since(now)));
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

    /// Weights are there.
    pub fn activated(&mut self, model: ModelId) {
        self.leaving.loaded(model);
        if self.loading.remove(&model).is_some() {
            self.residency.release(model);
        }
    }

    /// The next stage that can start, with the KV that it may have: the first in the queue whose
    /// model is there, while slots last.
    pub fn start(&mut self, table: &[ModelSpec], now: Time) -> Option<(StageId, u64)> {
        if self.running.len() >= self.spec.slots as usize {
            return None;
        }
        let ready =
            |ask: &Ask| !self.loading.contains_key(&ask.model) && self.is_there(ask.kv, table);
        let at = self.queue.iter().position(ready)?;
        let ask = self.queue.remove(at)?;
        let ends = now + ask.execution;
        let held = Held {
            ask,
            started: now,
            ends,
        };
        self.running.insert(ask.stage, held);
        self.ends.insert((ends, ask.stage));
        Some((ask.stage, ask.kv))
    }

    /// A stage that runs needs `bytes` of KV in all, of which it takes up to `wished` if that is to
    /// be had.
    pub fn grow(
        &mut self,
        stage: StageId,
        (bytes, wished): (u64, u64),
        interrupt: u64,
        table: &[ModelSpec],
        now: Time,
    ) -> (u64, Done) {
        let mut done = Done::default();
        let Some(held) = self.running.get(&stage).copied() else {
            return (0, done);
        };
        let more = bytes.saturating_sub(held.ask.kv);
        let headroom = self.headroom(table);
        if more > headroom {
            let ask = Ask {
                highest: Action::Abort,
                interrupt,
                ..held.ask
            };
            let offers = self.offers(&ask, table, now);
            match memory::plan(more - headroom, offers, Action::Abort, interrupt) {
                Ok(plan) => {
                    let (after, moves) = self.demoted(&plan, table);
                    self.residency = after;
                    done.moves = moves;
                    self.transit(&plan, table, now, &mut done);
                    self.interrupt(&plan, table, &mut done);
                }
                Err(_) => self.give_way(stage, bytes, table, &mut done),
            }
        }
        let headroom = self.headroom(table);
        let Some(had) = self.running.get(&stage).map(|held| held.ask.kv) else {
            return (0, done);
        };
        let granted = had + wished.saturating_sub(had).min(headroom).max(more);
        if !self.is_there(granted - had, table) {
            self.leaving.grows(stage, granted - had);
            done.later = true;
        }
        self.kv += granted - had;
        if let Some(held) = self.running.get_mut(&stage) {
            held.ask.kv = granted;
        }
        (granted, done)
    }

    /// Nobody else can: the stage itself waits in host memory until there is room for what it
    /// needs.
    fn give_way(&mut self, stage: StageId, bytes: u64, table: &[ModelSpec], done: &mut Done) {
        done.refused = true;
        let room = self.spec.host.saturating_sub(self.residency.in_host(table));
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

    /// A stage is done here, or nobody wants it: what it had is free.
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

    /// All is lost but what is on disk. Who was here.
    pub fn down(&mut self, table: &[ModelSpec]) -> Vec<StageId> {
        let mut here: Vec<StageId> = self.running.keys().copied().collect();
        here.extend(self.queue.iter().map(|ask| ask.stage));
        here.extend(self.swapped.keys().copied());
        *self = Self::new(self.spec, table);
        here
    }
}
