//! The loop of Maestro (§III-A): a stage becomes ready, its cost is predicted, it waits in the global queue, gets a place on the
//! fittest node that can admit it, starts there when a slot and its weights are there, and what it was corrects what is
//! predicted of others.
//!
//! What the paper leaves open:
//! * *Nodes and their own queues.* A node is given at most `backlog` stages more than it has slots; all others wait in the global queue,
//!   where their order can still change. The paper does not say how long node-local queues are; with none, only stages that wait for weights are in them (the
//!   fit of eq. 5 otherwise queues stages at full nodes while others are free).
//! * *The first stage fits nowhere.* The next ones are tried (`lookahead`), as their models may be resident where its own can't be. So that it does not
//!   starve while others keep a node's memory: once it has been overtaken for `patience`, the node that should be empty first takes
//!   nobody else until it has it.
//! * *What may be done to others at admission* (Algorithm 2's levels): for a batch stage, models that nobody uses; for an interactive one also
//!   batch stages, which are swapped out. Nobody is aborted for somebody who only wants to start. Stages that were swapped out come back before others start.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::estimate::Estimator;
use super::fitness::{Candidate, Fitness, Margin, Mode};
use super::memory::Action;
use super::node::{Ask, Done, Node};
use super::predict::Forecast;
use super::queue::{Boundary, Order, Queue, Rank};
use crate::workflow::{
    Class, Decision, Event, Job, JobId, ModelSpec, NodeId, NodeSpec, Outcome, Stage, StageId,
    Workflow,
};
use crate::{Span, Time};

/// How it decides.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// How it is called on tables.
    pub name: String,
    /// Who is first.
    pub order: Order,
    /// What becomes of turns between stages.
    pub boundary: Boundary,
    /// Which node.
    pub mode: Mode,
    /// Stages that wait at a node at most, beyond its slots.
    pub backlog: usize,
    /// Stages of the queue that are tried at a time.
    pub lookahead: usize,
    /// How long a stage is overtaken before a node is kept for it.
    pub patience: Span,
    /// `c_int` of eq. 4.
    pub interrupt: Span,
    /// Round trips: from a job's source (row) to a node's cluster (column). What is missing is zero.
    pub rtt: Vec<Vec<Span>>,
}

impl Options {
    /// Maestro, as its paper has it where it says so.
    #[must_use]
    pub fn maestro() -> Self {
        Self {
            name: "maestro".to_owned(),
            order: Order::Remaining {
                aging: 0.1,
                aging_interactive: 0.1,
            },
            boundary: Boundary::MAESTRO,
            mode: Mode::MAESTRO,
            backlog: 0,
            lookahead: 16,
            patience: Span::from_millis(5_000),
            interrupt: Span::from_millis(10_000),
            rtt: Vec::new(),
        }
    }

    /// The same with another order, which every boundary obeys.
    #[must_use]
    pub fn ordered(name: &str, order: Order) -> Self {
        Self {
            name: name.to_owned(),
            order,
            boundary: Boundary::Requeue,
            ..Self::maestro()
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In the queue, or in line with a turn it kept.
    Waits,
    /// On a node: running, or to start there.
    On(usize),
    /// Its KV is in a node's host memory.
    Swapped(usize),
}

#[derive(Clone, Debug)]
struct Entry {
    stage: Stage,
    forecast: Forecast,
    execution: Span,
    remaining: Span,
    predicted: u64,
    /// Bytes of KV that it is known to need: it asked for them.
    least: u64,
    place: Place,
    started: bool,
    /// When it was queued, if it was.
    queued: Option<Time>,
    overtaken: Option<Time>,
}

#[derive(Clone, Debug)]
struct JobEntry {
    job: Job,
    begun: bool,
    attained: Span,
    keeps_until: Time,
    stages: Vec<StageId>,
}

/// The scheduler.
pub struct Scheduler<E> {
    options: Options,
    estimator: E,
    models: Vec<ModelSpec>,
    nodes: Vec<Node>,
    up: Vec<bool>,
    jobs: HashMap<JobId, JobEntry>,
    entries: HashMap<StageId, Entry>,
    queue: Queue,
    turns: VecDeque<StageId>,
    /// Nodes that take nobody but a stage.
    kept: BTreeMap<usize, StageId>,
    fitness: Fitness,
    margin: Margin,
    decisions: VecDeque<Decision>,
    changed: bool,
    candidates: Vec<Candidate>,
    tried: Vec<StageId>,
}

impl<E: Estimator> Scheduler<E> {
    /// Over such nodes and models, all nodes up and empty.
    #[must_use]
    pub fn new(options: Options, estimator: E, models: Vec<ModelSpec>, nodes: &[NodeSpec]) -> Self {
        Self {
            queue: Queue::new(options.order),
            fitness: Fitness::new(options.mode),
            options,
            estimator,
            nodes: nodes.iter().map(|node| Node::new(*node, &models)).collect(),
            up: vec![true; nodes.len()],
            models,
            jobs: HashMap::new(),
            entries: HashMap::new(),
            turns: VecDeque::new(),
            kept: BTreeMap::new(),
            margin: Margin::default(),
            decisions: VecDeque::new(),
            changed: false,
            candidates: Vec::new(),
            tried: Vec::new(),
        }
    }

    /// Its nodes' books. For drivers that draw them and tests that check them.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The models it knows.
    #[must_use]
    pub fn models(&self) -> &[ModelSpec] {
        &self.models
    }

    /// `ρ` as it is now.
    #[must_use]
    pub fn margin(&self) -> f64 {
        self.margin.share()
    }

    /// Every stage is where it is said to be, once, and no node promised more than it has.
    #[must_use]
    pub fn is_balanced(&self) -> bool {
        let waits = self
            .entries
            .values()
            .filter(|e| e.place == Place::Waits)
            .count();
        let on = self
            .entries
            .values()
            .filter(|e| matches!(e.place, Place::On(_)))
            .count();
        let load: usize = self.nodes.iter().map(Node::load).sum();
        let swapped: usize = self.nodes.iter().map(|node| node.swapped().count()).sum();
        waits == self.queue.len() + self.turns.len()
            && on == load
            && self.entries.len() == waits + on + swapped
            && self.nodes.iter().all(|node| node.is_safe(&self.models))
    }

    fn model(&self, stage: &Stage) -> Option<&ModelSpec> {
        self.models.get(usize::from(stage.model.0))
    }

    fn ready(&mut self, stage: &Stage, now: Time) {
        let Some(entry) = self.jobs.get(&stage.job) else {
            return;
        };
        let job = entry.job;
        if !self.could_hold(&job, stage) {
            self.decisions.push_back(Decision::Refuse(stage.id));
            return;
        }
        let forecast = self.estimator.ready(&job, stage);
        let future = self.estimator.future(&job, stage, &forecast);
        let Some(model) = self.model(stage) else {
            return;
        };
        let execution = model.execution(stage.prompt, forecast.output);
        let predicted = model.kv(stage.prompt, forecast.output);
        let entry = Entry {
            stage: *stage,
            forecast,
            execution,
            remaining: execution + future,
            predicted,
            least: 0,
            place: Place::Waits,
            started: false,
            queued: None,
            overtaken: None,
        };
        let remaining = entry.remaining;
        self.entries.insert(stage.id, entry);
        let keeps = self.keeps_turn(&job, remaining, now);
        if let Some(job) = self.jobs.get_mut(&stage.job) {
            job.stages.push(stage.id);
        }
        if keeps {
            self.turns.push_back(stage.id);
        } else {
            self.enqueue(stage.id, now);
        }
    }

    /// Some node could hold it, were it empty and the stage as long as it may be.
    fn could_hold(&self, job: &Job, stage: &Stage) -> bool {
        let Some(model) = self.model(stage) else {
            return false;
        };
        let most = model.kv(stage.prompt, f64::from(stage.output_max));
        self.nodes
            .iter()
            .any(|node| may_run(job, node) && node.most(model) >= most)
    }

    /// The job goes on at once with its next stage: see [`Boundary`].
    fn keeps_turn(&mut self, job: &Job, remaining: Span, now: Time) -> bool {
        let Some(entry) = self.jobs.get(&job.id) else {
            return false;
        };
        if !entry.begun {
            return false;
        }
        let (cooldown, interactive_only) = match self.options.boundary {
            Boundary::Hold => return true,
            Boundary::Requeue => return false,
            Boundary::Preempt {
                cooldown,
                interactive_only,
                ..
            } => (cooldown, interactive_only),
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
        let gains = waiter
            .and_then(|waiter| self.entries.get(&waiter))
            .is_some_and(|waiter| {
                // Aging counts: the first in the queue may be there by it alone, and would never gain a turn otherwise.
                let waited = waiter.queued.map_or(Span::ZERO, |since| now.since(since));
                let aged = self
                    .queue
                    .aged(job_class(&self.jobs, waiter), Time(waited.0));
                let waits = Span(waiter.remaining.0.saturating_sub(aged));
                self.options.boundary.is_preempted(remaining, waits)
            });
        if gains {
            if let Some(entry) = self.jobs.get_mut(&job.id) {
                entry.keeps_until = now + Span(cooldown);
            }
            self.decisions.push_back(Decision::Preempted(job.id));
        }
        !gains
    }

    fn enqueue(&mut self, stage: StageId, now: Time) {
        let Some(entry) = self.entries.get_mut(&stage) else {
            return;
        };
        entry.place = Place::Waits;
        entry.started = false;
        entry.queued = Some(now);
        let Some(job) = self.jobs.get(&entry.stage.job) else {
            return;
        };
        let rank = Rank {
            class: job.job.class,
            arrival: job.job.arrival,
            deadline: job.job.deadline,
            remaining: entry.remaining,
            attained: job.attained,
        };
        self.queue.push(stage, &rank, now);
    }

    fn finished(&mut self, stage: StageId, outcome: &Outcome) {
        let Some(entry) = self.forget(stage) else {
            return;
        };
        let Some(job) = self.jobs.get_mut(&entry.stage.job) else {
            return;
        };
        job.attained = job.attained + outcome.took;
        let job = job.job;
        if let Some(model) = self.model(&entry.stage) {
            let needed = model.kv(entry.stage.prompt, f64::from(outcome.output));
            self.margin.observe(needed, entry.predicted);
        }
        // In the time of eq. 2, as all that it is added to: on a shared GPU stages take several times as long, and what follows a
        // stage would weigh so much more than the stage itself.
        let took = self.model(&entry.stage).map_or(outcome.took, |model| {
            model.execution(entry.stage.prompt, f64::from(outcome.output))
        });
        let outcome = Outcome { took, ..*outcome };
        self.estimator
            .finished(&job, &entry.stage, &entry.forecast, &outcome);
    }

    /// A stage is nowhere any more.
    fn forget(&mut self, stage: StageId) -> Option<Entry> {
        let entry = self.entries.remove(&stage)?;
        match entry.place {
            Place::Waits => {
                self.queue.remove(stage);
                self.turns.retain(|other| *other != stage);
            }
            Place::On(node) | Place::Swapped(node) => {
                self.nodes[node].remove(stage);
            }
        }
        self.kept.retain(|_, other| *other != stage);
        if let Some(job) = self.jobs.get_mut(&entry.stage.job) {
            job.stages.retain(|other| *other != stage);
        }
        Some(entry)
    }

    fn outgrew(&mut self, stage: StageId, bytes: u64, now: Time) {
        let Some(entry) = self.entries.get_mut(&stage) else {
            return;
        };
        let Place::On(node) = entry.place else { return };
        // Were it aborted, it would only come to the same point with less.
        entry.least = entry.least.max(bytes);
        // A quarter of what was predicted at a time, so that a stage does not ask for every page.
        let wished = bytes.saturating_add(entry.predicted / 4);
        let interrupt = self.options.interrupt.0;
        let (kv, done) =
            self.nodes[node].grow(stage, (bytes, wished), interrupt, &self.models, now);
        let (refused, later) = (done.refused, done.later);
        self.apply(node, done, now);
        if !refused && !later {
            self.decisions.push_back(Decision::Grow { stage, kv });
        }
    }

    /// Says what a node did.
    fn apply(&mut self, node: usize, done: Done, now: Time) {
        for stage in done.swapped {
            if let Some(entry) = self.entries.get_mut(&stage) {
                entry.place = Place::Swapped(node);
            }
            self.decisions.push_back(Decision::SwapOut(stage));
        }
        for stage in done.aborted {
            self.decisions.push_back(Decision::Abort(stage));
            self.enqueue(stage, now);
        }
        let id = NodeId(node as u32);
        let mut leaving = done.leaving;
        for (model, to) in done.moves {
            // Of several moves of a model, the first is the one that takes time.
            let at = leaving.iter().position(|(other, _)| *other == model);
            let takes = at.map_or(Span::ZERO, |at| leaving.swap_remove(at).1);
            self.decisions.push_back(Decision::Demote {
                node: id,
                model,
                to,
                takes,
            });
        }
        for model in done.stopped {
            self.decisions
                .push_back(Decision::StopTransition { node: id, model });
        }
        if let Some((model, from, takes)) = done.activate {
            self.decisions.push_back(Decision::Activate {
                node: id,
                model,
                from,
                takes,
            });
        }
        self.changed = true;
    }

    fn start(&mut self, node: usize, now: Time) {
        self.grown(node);
        while let Some((stage, kv)) = self.nodes[node].start(&self.models, now) {
            if let Some(entry) = self.entries.get_mut(&stage) {
                entry.started = true;
                if let Some(job) = self.jobs.get_mut(&entry.stage.job) {
                    job.begun = true;
                }
            }
            self.decisions.push_back(Decision::Start {
                stage,
                node: NodeId(node as u32),
                kv,
            });
        }
    }

    /// Stages that waited for weights to leave go on.
    fn grown(&mut self, node: usize) {
        for (stage, kv) in self.nodes[node].grown(&self.models) {
            self.decisions.push_back(Decision::Grow { stage, kv });
        }
    }

    fn is_open(&self, node: usize) -> bool {
        let spec = self.nodes[node].spec();
        self.up[node] && self.nodes[node].load() < spec.slots as usize + self.options.backlog
    }

    fn ask(&self, entry: &Entry, class: Class) -> Ask {
        let most = self.model(&entry.stage).map_or(0, |model| {
            model.kv(entry.stage.prompt, f64::from(entry.stage.output_max))
        });
        Ask {
            stage: entry.stage.id,
            model: entry.stage.model,
            class,
            // No stage is promised more than it can ever use.
            kv: self.margin.need(entry.predicted).max(entry.least).min(most),
            execution: entry.execution,
            highest: match class {
                Class::Interactive => Action::SwapOut,
                Class::Batch => Action::Evict,
            },
            interrupt: self.options.interrupt.0,
        }
    }

    /// Algorithm 3. Whether the stage has a place now.
    fn try_place(&mut self, stage: StageId, only: Option<usize>, now: Time) -> bool {
        let Some(entry) = self.entries.get(&stage) else {
            return false;
        };
        let Some(job) = self.jobs.get(&entry.stage.job).map(|entry| entry.job) else {
            return false;
        };
        let ask = self.ask(entry, job.class);
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.clear();
        for (index, node) in self.nodes.iter().enumerate() {
            let elsewhere = only.is_some_and(|only| only != index);
            let kept = self.kept.get(&index).is_some_and(|other| *other != stage);
            if elsewhere || kept || !self.is_open(index) || !may_run(&job, node) {
                continue;
            }
            if let Some(estimate) = node.estimate(&ask, &self.models, now) {
                candidates.push(Candidate {
                    node: index,
                    estimate,
                    rtt: self.rtt(&job, node),
                    load: node.load(),
                    warm: node.is_warm(ask.model),
                });
            }
        }
        let chosen = self.fitness.choose(&candidates, ask.kv, job.class);
        self.candidates = candidates;
        chosen.is_some_and(|node| self.place(&ask, node, now))
    }

    fn rtt(&self, job: &Job, node: &Node) -> Span {
        self.options
            .rtt
            .get(usize::from(job.source.0))
            .and_then(|row| row.get(usize::from(node.spec().cluster.0)))
            .copied()
            .unwrap_or_default()
    }

    fn place(&mut self, ask: &Ask, node: usize, now: Time) -> bool {
        let Some(done) = self.nodes[node].place(ask, &self.models, now) else {
            return false;
        };
        self.queue.remove(ask.stage);
        self.turns.retain(|other| *other != ask.stage);
        self.kept.retain(|_, other| *other != ask.stage);
        if let Some(entry) = self.entries.get_mut(&ask.stage) {
            entry.place = Place::On(node);
            entry.overtaken = None;
        }
        self.apply(node, done, now);
        self.start(node, now);
        true
    }

    fn dispatch(&mut self, now: Time) {
        for node in 0..self.nodes.len() {
            self.start(node, now);
            self.resume(node, now);
        }
        for (node, stage) in self.kept.clone() {
            self.try_place(stage, Some(node), now);
        }
        while self.pass(now) {}
    }

    /// Stages that were swapped out come back, the oldest first, and nothing else is harmed for it.
    fn resume(&mut self, node: usize, now: Time) {
        if self.kept.contains_key(&node) {
            return;
        }
        let slots = self.nodes[node].spec().slots as usize;
        while self.nodes[node].load() < slots {
            let Some(ask) = self.nodes[node].swapped().next() else {
                return;
            };
            let ask = Ask {
                highest: Action::Evict,
                ..ask
            };
            if !self.place(&ask, node, now) {
                return;
            }
        }
    }

    /// Tries the first that wait. Whether somebody got a place and more are to be tried.
    fn pass(&mut self, now: Time) -> bool {
        if !(0..self.nodes.len()).any(|node| self.is_open(node)) {
            return false;
        }
        let mut waiting = Vec::new();
        self.queue.first(self.options.lookahead, now, &mut waiting);
        let turns: Vec<StageId> = self.turns.iter().copied().collect();
        let mut failed = Vec::new();
        let mut placed = false;
        for stage in turns.into_iter().chain(waiting) {
            if self.try_place(stage, None, now) {
                placed = true;
                self.overtaken(&failed, now);
            } else {
                failed.push(stage);
            }
        }
        placed
    }

    /// Somebody behind these got a place.
    fn overtaken(&mut self, failed: &[StageId], now: Time) {
        for stage in failed {
            let Some(entry) = self.entries.get_mut(stage) else {
                continue;
            };
            let since = *entry.overtaken.get_or_insert(now);
            if now.since(since) > self.options.patience {
                self.keep(*stage, now);
            }
        }
    }

    /// Keeps the node for it that should be empty first.
    fn keep(&mut self, stage: StageId, now: Time) {
        if self.kept.values().any(|other| *other == stage) {
            return;
        }
        let Some(entry) = self.entries.get(&stage) else {
            return;
        };
        let Some(job) = self.jobs.get(&entry.stage.job) else {
            return;
        };
        let Some(model) = self.model(&entry.stage) else {
            return;
        };
        let most = model.kv(entry.stage.prompt, f64::from(entry.stage.output_max));
        let first = (0..self.nodes.len())
            .filter(|node| self.up[*node] && !self.kept.contains_key(node))
            .filter(|node| may_run(&job.job, &self.nodes[*node]))
            .filter(|node| self.nodes[*node].most(model) >= most)
            .min_by_key(|node| self.nodes[*node].empty_at(now));
        if let Some(node) = first {
            self.kept.insert(node, stage);
        }
    }

    fn cancelled(&mut self, job: JobId) {
        let stages = self.jobs.get(&job).map(|entry| entry.stages.clone());
        for stage in stages.unwrap_or_default() {
            self.forget(stage);
        }
        self.jobs.remove(&job);
        self.estimator.ended(job, false);
    }

    fn node_down(&mut self, node: usize, now: Time) {
        let Some(of) = self.nodes.get_mut(node) else {
            return;
        };
        self.up[node] = false;
        self.kept.remove(&node);
        for stage in of.down(&self.models) {
            self.enqueue(stage, now);
        }
    }
}

fn job_class(jobs: &HashMap<JobId, JobEntry>, entry: &Entry) -> Class {
    jobs.get(&entry.stage.job)
        .map_or(Class::Batch, |job| job.job.class)
}

/// A job that may not leave its cluster runs nowhere else.
fn may_run(job: &Job, node: &Node) -> bool {
    !job.confined || node.spec().cluster == job.source
}

impl<E: Estimator> Workflow for Scheduler<E> {
    fn name(&self) -> String {
        self.options.name.clone()
    }

    fn handle(&mut self, now: Time, event: &Event) {
        self.changed = true;
        match event {
            Event::Submitted(job) => {
                let entry = JobEntry {
                    job: *job,
                    begun: false,
                    attained: Span::ZERO,
                    keeps_until: Time::ZERO,
                    stages: Vec::new(),
                };
                self.jobs.insert(job.id, entry);
            }
            Event::Ready(stage) => self.ready(stage, now),
            Event::Activated { node, model } => {
                if let Some(node) = self.nodes.get_mut(node.0 as usize) {
                    node.activated(*model);
                }
            }
            Event::Slept { node, model } => {
                if let Some(node) = self.nodes.get_mut(node.0 as usize) {
                    node.slept(*model, now);
                }
            }
            Event::Finished { stage, outcome } => self.finished(*stage, outcome),
            Event::Outgrew { stage, bytes } => self.outgrew(*stage, *bytes, now),
            Event::Ended(job) => {
                self.jobs.remove(job);
                self.estimator.ended(*job, true);
            }
            Event::Cancelled(job) => self.cancelled(*job),
            Event::NodeDown(node) => self.node_down(node.0 as usize, now),
            Event::NodeUp(node) => {
                if let Some(up) = self.up.get_mut(node.0 as usize) {
                    *up = true;
                }
            }
        }
    }

    fn poll_decision(&mut self, now: Time) -> Option<Decision> {
        if self.decisions.is_empty() && std::mem::take(&mut self.changed) {
            self.dispatch(now);
        }
        self.decisions.pop_front()
    }

    fn next_deadline(&self) -> Option<Time> {
        None
    }

    fn waiting(&self) -> usize {
        let started = self.entries.values().filter(|entry| entry.started).count();
        self.entries.len() - started
    }
}
