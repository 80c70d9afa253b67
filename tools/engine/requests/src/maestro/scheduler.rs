//! The main loop of Maestro (§III-A). The cost of each ready stage is predicted, and the stage
//! waits in the global queue. The fittest node that admits it takes it, and it starts when a slot
//! and its weights are there. Its measured result improves later predictions.
//!
//! This module tracks stages and jobs. Module `placement` places stages.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::estimate::Estimator;
use super::fitness::{Candidate, Fitness, Margin, Mode};
use super::node::{Done, Node};
use super::queue::{Boundary, Queue, StageOrder, StageProperties};
use crate::workflow::{
    Class, JobId, ModelSpec, NodeId, NodeSpec, Outcome, Stage, StageId, WorkflowDecision,
    WorkflowEvent, WorkflowJob,
};
use crate::{Span, Time};

#[derive(Clone, Debug, PartialEq)]
pub struct MaestroOptions {
    pub name: String,
    pub order: StageOrder,
    /// Rule for turns between the stages of a job.
    pub boundary: Boundary,
    pub mode: Mode,
    /// Round-trip times from a job's source (row) to a node's cluster (column). A missing entry is
    /// zero.
    pub rtt: Vec<Vec<Span>>,
}

impl MaestroOptions {
    /// Returns Maestro's options, with the paper's values where it has some.
    pub fn maestro() -> Self {
        Self {
            name: "maestro".to_owned(),
            order: StageOrder::Remaining { aging: 0.01, aging_interactive: 0.0 },
            boundary: Boundary::MAESTRO,
            mode: Mode::MAESTRO,
            rtt: Vec::new(),
        }
    }

    /// Returns Maestro's options with another order, which also applies at every boundary.
    pub fn ordered(name: &str, order: StageOrder) -> Self {
        Self { name: name.to_owned(), order, boundary: Boundary::Requeue, ..Self::maestro() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StagePosition {
    /// The stage is in the queue, or waits with a turn that its job kept.
    Waits,
    /// The stage runs on a node or waits there.
    On(usize),
    /// The stage's KV is in a node's host memory.
    Swapped(usize),
}

pub(super) struct StageEntry {
    pub(super) stage: Stage,
    pub(super) expected: f64,
    pub(super) execution: Span,
    pub(super) remaining: Span,
    pub(super) predicted: u64,
    /// Bytes of KV that the stage has asked for.
    pub(super) least: u64,
    pub(super) place: StagePosition,
    pub(super) started: bool,
    /// When the stage was queued, if ever.
    pub(super) queued: Option<Time>,
    pub(super) overtaken: Option<Time>,
}

pub(super) struct JobEntry {
    pub(super) job: WorkflowJob,
    pub(super) begun: bool,
    pub(super) attained: Span,
    pub(super) keeps_until: Time,
}

/// Cost of an interruption, `c_int` of eq. 4.
pub(super) const INTERRUPT: Span = Span::from_millis(10_000);

pub struct Scheduler {
    pub(super) options: MaestroOptions,
    estimator: Box<dyn Estimator>,
    pub(super) models: Arc<[ModelSpec]>,
    pub(super) nodes: Vec<Node>,
    pub(super) jobs: FxHashMap<JobId, JobEntry>,
    pub(super) entries: FxHashMap<StageId, StageEntry>,
    pub(super) queue: Queue,
    pub(super) turns: VecDeque<StageId>,
    pub(super) kept: BTreeMap<usize, StageId>,
    pub(super) fitness: Fitness,
    pub(super) margin: Margin,
    decisions: VecDeque<WorkflowDecision>,
    changed: bool,
    pub(super) candidates: Vec<Candidate>,
    tried: Vec<StageId>,
}

impl Scheduler {
    pub fn new(
        options: MaestroOptions,
        estimator: impl Estimator + 'static,
        models: Vec<ModelSpec>,
        nodes: &[NodeSpec],
    ) -> Self {
        let models: Arc<[ModelSpec]> = models.into();
        let nodes = nodes.iter().map(|node| Node::new(*node, Arc::clone(&models))).collect();
        Self {
            queue: Queue::new(options.order),
            fitness: Fitness::new(options.mode),
            options,
            estimator: Box::new(estimator),
            nodes,
            models,
            jobs: FxHashMap::default(),
            entries: FxHashMap::default(),
            turns: VecDeque::new(),
            kept: BTreeMap::new(),
            margin: Margin::default(),
            decisions: VecDeque::new(),
            changed: false,
            candidates: Vec::new(),
            tried: Vec::new(),
        }
    }

    /// Reports whether no stage is here. For tests.
    pub fn is_idle(&self) -> bool {
        self.entries.is_empty() && self.nodes.iter().all(|node| node.load() == 0)
    }

    /// Reports whether each stage is in exactly one place and no node exceeds its memory. For
    /// tests.
    pub fn is_balanced(&self) -> bool {
        let waits = self.entries.values().filter(|e| e.place == StagePosition::Waits).count();
        let on = self.entries.values().filter(|e| matches!(e.place, StagePosition::On(_))).count();
        let load: usize = self.nodes.iter().map(Node::load).sum();
        let swapped: usize = self.nodes.iter().map(|node| node.swapped().count()).sum();
        waits == self.queue.len() + self.turns.len()
            && on == load
            && self.entries.len() == waits + on + swapped
            && self.nodes.iter().all(Node::is_safe)
    }

    pub(super) fn model(&self, stage: &Stage) -> Option<&ModelSpec> {
        self.models.get(usize::from(stage.model.0))
    }

    fn ready(&mut self, stage: &Stage, now: Time) {
        let Some(entry) = self.jobs.get(&stage.job) else { return };
        let job = entry.job;
        let expected = self.estimator.ready(&job, stage);
        let future = self.estimator.future(&job, stage);
        let Some(model) = self.model(stage) else { return };
        let execution = model.execution(stage.prompt, expected);
        let predicted = model.kv(stage.prompt, expected);
        let entry = StageEntry {
            stage: *stage,
            expected,
            execution,
            remaining: execution + future,
            predicted,
            least: 0,
            place: StagePosition::Waits,
            started: false,
            queued: None,
            overtaken: None,
        };
        let remaining = entry.remaining;
        self.entries.insert(stage.id, entry);
        let keeps = self.keeps_turn(&job, remaining, now);
        if keeps {
            self.turns.push_back(stage.id);
        } else {
            self.enqueue(stage.id, now);
        }
    }

    /// Reports whether the job continues at once with its next stage, by the [`Boundary`] rule.
    fn keeps_turn(&mut self, job: &WorkflowJob, remaining: Span, now: Time) -> bool {
        let Some(entry) = self.jobs.get(&job.id) else { return false };
        if !entry.begun {
            return false;
        }
        let interactive_only = match self.options.boundary {
            Boundary::Hold => return true,
            Boundary::Requeue => return false,
            Boundary::Preempt { interactive_only } => interactive_only,
        };
        if job.class == Class::Interactive || now < entry.keeps_until {
            return true;
        }
        let waiter = if interactive_only {
            self.queue.first_interactive()
        } else {
            self.queue.first(1, now, &mut self.tried);
            self.tried.first().copied()
        };
        let gains = waiter.and_then(|waiter| self.entries.get(&waiter)).is_some_and(|waiter| {
            // Aging counts. A stage may be first in the queue by aging alone, and would
            // otherwise never get a turn.
            let waited = waiter.queued.map_or(Span::ZERO, |since| now.since(since));
            let class = self.jobs.get(&waiter.stage.job).map(|job| job.job.class);
            let aged = self.queue.aged(class.unwrap_or(Class::Batch), Time(waited.0));
            let waits = Span(waiter.remaining.0.saturating_sub(aged));
            self.options.boundary.is_preempted(remaining, waits)
        });
        if gains {
            if let Some(entry) = self.jobs.get_mut(&job.id) {
                entry.keeps_until = now + Boundary::COOLDOWN;
            }
            self.decisions.push_back(WorkflowDecision::Preempted(job.id));
        }
        !gains
    }

    pub(super) fn enqueue(&mut self, stage: StageId, now: Time) {
        let Some(entry) = self.entries.get_mut(&stage) else { return };
        entry.place = StagePosition::Waits;
        entry.started = false;
        entry.queued = Some(now);
        let Some(job) = self.jobs.get(&entry.stage.job) else { return };
        let rank = StageProperties {
            class: job.job.class,
            arrival: job.job.arrival,
            deadline: job.job.deadline,
            remaining: entry.remaining,
            attained: job.attained,
        };
        self.queue.push(stage, &rank, now);
    }

    fn finished(&mut self, stage: StageId, outcome: &Outcome) {
        let Some(entry) = self.forget(stage) else { return };
        let Some(job) = self.jobs.get_mut(&entry.stage.job) else { return };
        job.attained = job.attained + outcome.took;
        if let Some(model) = self.model(&entry.stage) {
            let needed = model.kv(entry.stage.prompt, f64::from(outcome.output));
            self.margin.observe(needed, entry.predicted);
        }
        // The time is that of eq. 2, as for all times to which it is added. Measured times on a
        // shared GPU are several times longer.
        let took = self.model(&entry.stage).map_or(outcome.took, |model| {
            model.execution(entry.stage.prompt, f64::from(outcome.output))
        });
        let outcome = Outcome { took, ..*outcome };
        self.estimator.finished(&entry.stage, entry.expected, &outcome);
    }

    fn forget(&mut self, stage: StageId) -> Option<StageEntry> {
        let entry = self.entries.remove(&stage)?;
        match entry.place {
            StagePosition::Waits => {
                self.queue.remove(stage);
                self.turns.retain(|other| *other != stage);
            }
            StagePosition::On(node) | StagePosition::Swapped(node) => {
                self.nodes[node].remove(stage);
            }
        }
        self.kept.retain(|_, other| *other != stage);
        Some(entry)
    }

    fn outgrew(&mut self, stage: StageId, bytes: u64, now: Time) {
        let Some(entry) = self.entries.get_mut(&stage) else { return };
        let StagePosition::On(node) = entry.place else { return };
        // An aborted stage would need the same amount again, so later attempts get it at once.
        entry.least = entry.least.max(bytes);
        // The extra quarter of the prediction keeps the stage from asking for every page.
        let wished = bytes.saturating_add(entry.predicted / 4);
        let (kv, done) = self.nodes[node].grow(stage, (bytes, wished), INTERRUPT.0, now);
        let (refused, later) = (done.refused, done.later);
        self.apply(node, done, now);
        if !refused && !later {
            self.decisions.push_back(WorkflowDecision::Grow { stage, kv });
        }
    }

    pub(super) fn apply(&mut self, node: usize, done: Done, now: Time) {
        for stage in done.swapped {
            if let Some(entry) = self.entries.get_mut(&stage) {
                entry.place = StagePosition::Swapped(node);
            }
            self.decisions.push_back(WorkflowDecision::SwapOut(stage));
        }
        for stage in done.aborted {
            self.decisions.push_back(WorkflowDecision::Abort(stage));
            self.enqueue(stage, now);
        }
        let id = NodeId(node as u32);
        let mut leaving = done.leaving;
        for (model, to) in done.moves {
            // Of several moves of a model, the first one takes the time.
            let at = leaving.iter().position(|(other, _)| *other == model);
            let takes = at.map_or(Span::ZERO, |at| leaving.swap_remove(at).1);
            self.decisions.push_back(WorkflowDecision::Demote { node: id, model, to, takes });
        }
        for model in done.stopped {
            self.decisions.push_back(WorkflowDecision::StopTransition { node: id, model });
        }
        if let Some((model, takes)) = done.activate {
            self.decisions.push_back(WorkflowDecision::Activate { node: id, model, takes });
        }
        self.changed = true;
    }

    pub(super) fn start(&mut self, node: usize, now: Time) {
        self.grown(node);
        while let Some((stage, kv)) = self.nodes[node].start(now) {
            if let Some(entry) = self.entries.get_mut(&stage) {
                entry.started = true;
                if let Some(job) = self.jobs.get_mut(&entry.stage.job) {
                    job.begun = true;
                }
            }
            let node = NodeId(node as u32);
            self.decisions.push_back(WorkflowDecision::Start { stage, node, kv });
        }
    }

    fn grown(&mut self, node: usize) {
        for (stage, kv) in self.nodes[node].grown() {
            self.decisions.push_back(WorkflowDecision::Grow { stage, kv });
        }
    }

    pub(super) fn is_open(&self, node: usize) -> bool {
        let node = &self.nodes[node];
        node.load() < node.spec.slots as usize
    }

    pub fn handle(&mut self, now: Time, event: &WorkflowEvent) {
        self.changed = true;
        match event {
            WorkflowEvent::Submitted(job) => {
                let entry = JobEntry {
                    job: *job,
                    begun: false,
                    attained: Span::ZERO,
                    keeps_until: Time::ZERO,
                };
                self.jobs.insert(job.id, entry);
            }
            WorkflowEvent::Ready(stage) => self.ready(stage, now),
            WorkflowEvent::Activated { node, model } => {
                if let Some(node) = self.nodes.get_mut(node.0 as usize) {
                    node.activated(*model);
                }
            }
            WorkflowEvent::Slept { node, model } => {
                if let Some(node) = self.nodes.get_mut(node.0 as usize) {
                    node.slept(*model, now);
                }
            }
            WorkflowEvent::Finished { stage, outcome } => self.finished(*stage, outcome),
            WorkflowEvent::Outgrew { stage, bytes } => self.outgrew(*stage, *bytes, now),
            WorkflowEvent::Ended(job) => {
                self.jobs.remove(job);
                self.estimator.ended(*job);
            }
        }
    }

    pub fn poll_decision(&mut self, now: Time) -> Option<WorkflowDecision> {
        if self.decisions.is_empty() && std::mem::take(&mut self.changed) {
            self.dispatch(now);
        }
        self.decisions.pop_front()
    }
}
