//! The driver of Maestro's figures: workflows on nodes in virtual time, under a
//! [`Scheduler`].
//!
//! The driver accounts for GPU memory itself (weights and written KV cache), so that it detects
//! overflows independently of the scheduler.

use std::collections::{BTreeMap, HashMap};

use laxity_requests::maestro::Scheduler;
use laxity_requests::workflow::{
    Class, JobId, ModelId, NodeId, NodeSpec, Outcome, Readiness, StageId, WorkflowDecision,
    WorkflowEvent,
};
use laxity_requests::{Span, Time};

use super::apps::{PlannedJob, STAGES};
use super::catalogue::ServedModel;
use super::machine::{Came, NodeState, Running};
use crate::agenda::Agenda;

#[derive(Clone, Copy, Debug)]
pub(super) struct JobResult {
    pub(super) class: Class,
    pub(super) template: u16,
    pub(super) arrival: f64,
    /// Time from submission to the end, in seconds.
    pub(super) took: f64,
    /// Sum of the waits of its stages in queues, for weights and on the network, in seconds.
    pub(super) waited: f64,
    pub(super) stages: usize,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Ran {
    pub(super) jobs: Vec<JobResult>,
    pub(super) lost: usize,
    pub(super) overflows: u64,
    /// Highest memory use, as a share of the capacity.
    pub(super) fullest: f64,
    pub(super) grown: u64,
    pub(super) swapped: u64,
    pub(super) aborted: u64,
    pub(super) stopped: u64,
    pub(super) preempted: u64,
    pub(super) activated: u64,
    /// Share of the nodes' time in which they were busy.
    pub(super) busy: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum DueEvent {
    Arrives(usize),
    Ready(StageId),
    Activated(NodeId, ModelId),
    Slept(NodeId, ModelId),
    /// A node's predicted next event. It is void if the node's epoch has changed.
    Changes(usize, u64),
}

struct Open {
    index: usize,
    left: usize,
    blocked: Vec<usize>,
    waited: f64,
}

#[derive(Default)]
pub(super) struct MaestroWorld<'a> {
    models: &'a [ServedModel],
    specs: &'a [NodeSpec],
    workload: &'a [PlannedJob],
    rtt: &'a [Vec<Span>],
    due: Agenda<DueEvent>,
    machines: Vec<NodeState>,
    resident: Vec<BTreeMap<ModelId, Readiness>>,
    /// Weights on their way to host memory by node, with the time of arrival.
    leaving: Vec<BTreeMap<ModelId, u64>>,
    /// Weights whose load begins when those of `leaving` are gone, by node, with that time.
    behind: Vec<BTreeMap<ModelId, u64>>,
    open: HashMap<JobId, Open>,
    by_id: HashMap<JobId, usize>,
    on: HashMap<StageId, usize>,
    since: HashMap<StageId, u64>,
    started: HashMap<StageId, u64>,
    parked: HashMap<StageId, Running>,
    ran: Ran,
}

impl<'a> MaestroWorld<'a> {
    pub(super) fn new(
        models: &'a [ServedModel],
        specs: &'a [NodeSpec],
        workload: &'a [PlannedJob],
        rtt: &'a [Vec<Span>],
    ) -> Self {
        let mut world = Self {
            models,
            specs,
            workload,
            rtt,
            machines: vec![NodeState::default(); specs.len()],
            resident: vec![BTreeMap::new(); specs.len()],
            leaving: vec![BTreeMap::new(); specs.len()],
            behind: vec![BTreeMap::new(); specs.len()],
            ..Self::default()
        };
        for (index, job) in workload.iter().enumerate() {
            world.by_id.insert(job.job.id, index);
            world.due.push(job.job.arrival, DueEvent::Arrives(index));
        }
        world
    }

    pub(super) fn run(mut self, scheduler: &mut Scheduler) -> Ran {
        let mut last = 0;
        while let Some(Time(now)) = self.due.next() {
            last = now;
            // All events of this time are handled before the scheduler decides.
            while let Some(due) = self.due.pop(Time(now)) {
                self.happens(now, due, scheduler);
            }
            while let Some(decision) = scheduler.poll_decision(Time(now)) {
                self.does(now, &decision);
            }
            self.check(now);
        }
        self.ran.lost = self.open.len();
        let busy: f64 = self.machines.iter().map(|machine| machine.busy).sum();
        self.ran.busy = busy / (last as f64 * self.machines.len() as f64).max(1.0);
        self.ran
    }

    fn happens(&mut self, now: u64, due: DueEvent, scheduler: &mut Scheduler) {
        match due {
            DueEvent::Arrives(index) => self.arrives(now, index, scheduler),
            DueEvent::Ready(stage) => self.ready(now, stage, scheduler),
            DueEvent::Activated(node, model) => {
                scheduler.handle(Time(now), &WorkflowEvent::Activated { node, model });
            }
            DueEvent::Slept(node, model) => {
                let leaving = &mut self.leaving[node.0 as usize];
                leaving.retain(|other, until| *other != model || *until > now);
                scheduler.handle(Time(now), &WorkflowEvent::Slept { node, model });
            }
            DueEvent::Changes(node, epoch) if self.machines[node].epoch == epoch => {
                self.machines[node].advance(now as f64, self.models);
                for came in self.machines[node].came(self.models) {
                    match came {
                        Came::Finished(stage) => self.finished(now, node, stage, scheduler),
                        Came::Outgrew(stage, bytes) => {
                            scheduler.handle(Time(now), &WorkflowEvent::Outgrew { stage, bytes });
                        }
                    }
                }
                self.foresee(now, node);
            }
            DueEvent::Changes(..) => {}
        }
    }

    fn arrives(&mut self, now: u64, index: usize, scheduler: &mut Scheduler) {
        let of = &self.workload[index];
        scheduler.handle(Time(now), &WorkflowEvent::Submitted(of.job));
        let blocked: Vec<usize> = of.stages.iter().map(|stage| stage.after.len()).collect();
        let free: Vec<StageId> = of
            .stages
            .iter()
            .filter(|stage| stage.after.is_empty())
            .map(|stage| stage.stage.id)
            .collect();
        let open = Open { index, left: of.stages.len(), blocked, waited: 0.0 };
        self.open.insert(of.job.id, open);
        for stage in free {
            self.ready(now, stage, scheduler);
        }
    }

    fn planned(&self, stage: StageId) -> &'a super::apps::Planned {
        let index = self.by_id[&JobId(stage.0 / STAGES)];
        &self.workload[index].stages[(stage.0 % STAGES) as usize]
    }

    fn ready(&mut self, now: u64, stage: StageId, scheduler: &mut Scheduler) {
        self.since.insert(stage, now);
        let planned = self.planned(stage);
        scheduler.handle(Time(now), &WorkflowEvent::Ready(planned.stage));
    }

    fn finished(&mut self, now: u64, node: usize, stage: StageId, scheduler: &mut Scheduler) {
        self.machines[node].running.remove(&stage);
        self.on.remove(&stage);
        let planned = self.planned(stage);
        let started = self.started.remove(&stage).unwrap_or(now);
        let outcome = Outcome { output: planned.output, took: Span(now - started) };
        scheduler.handle(Time(now), &WorkflowEvent::Finished { stage, outcome });
        let job = planned.stage.job;
        let at = (stage.0 % STAGES) as usize;
        let Some(open) = self.open.get_mut(&job) else { return };
        open.left -= 1;
        let of = &self.workload[open.index];
        let mut next = Vec::new();
        for (index, other) in of.stages.iter().enumerate() {
            if other.after.contains(&at) {
                open.blocked[index] -= 1;
                if open.blocked[index] == 0 {
                    next.push((other.stage.id, other.delay));
                }
            }
        }
        if open.left == 0 {
            let arrival = of.job.arrival.0;
            self.ran.jobs.push(JobResult {
                class: of.job.class,
                template: of.job.template.0,
                arrival: arrival as f64 / 1e9,
                took: (now - arrival) as f64 / 1e9,
                waited: open.waited,
                stages: of.stages.len(),
            });
            self.open.remove(&job);
            scheduler.handle(Time(now), &WorkflowEvent::Ended(job));
        }
        for (stage, delay) in next {
            if delay == 0 {
                self.ready(now, stage, scheduler);
            } else {
                self.due.push(Time(now + delay), DueEvent::Ready(stage));
            }
        }
    }

    fn does(&mut self, now: u64, decision: &WorkflowDecision) {
        match decision {
            WorkflowDecision::Demote { node, model, to, takes } => {
                let index = node.0 as usize;
                self.resident[index].insert(*model, *to);
                if *takes > Span::ZERO {
                    self.leaving[index].insert(*model, now + takes.0);
                    self.due.push(Time(now + takes.0), DueEvent::Slept(*node, *model));
                }
            }
            WorkflowDecision::StopTransition { node, model } => {
                self.ran.stopped += 1;
                self.leaving[node.0 as usize].remove(model);
            }
            WorkflowDecision::Activate { node, model, takes, .. } => {
                self.ran.activated += 1;
                let index = node.0 as usize;
                self.leaving[index].remove(model);
                // Both directions share a link, so the load starts after the weights have left.
                if let Some(from) = self.leaving[index].values().max() {
                    self.behind[index].insert(*model, *from);
                }
                self.resident[node.0 as usize].insert(*model, Readiness::Running);
                self.due.push(Time(now + takes.0), DueEvent::Activated(*node, *model));
            }
            WorkflowDecision::Start { stage, node, kv } => self.start(now, *stage, *node, *kv),
            WorkflowDecision::Grow { stage, kv } => {
                self.ran.grown += 1;
                self.change(now, *stage, |running| {
                    running.promised = *kv;
                    running.stopped = false;
                });
            }
            WorkflowDecision::SwapOut(stage) => {
                self.ran.swapped += 1;
                if let Some(mut running) = self.stop(now, *stage) {
                    running.stopped = false;
                    self.parked.insert(*stage, running);
                }
            }
            WorkflowDecision::Abort(stage) => {
                self.ran.aborted += 1;
                // The stage must repeat the lost work.
                let lost = self.started.remove(stage).map_or(0, |started| now - started);
                self.wait(*stage, lost);
                self.stop(now, *stage);
            }
            WorkflowDecision::Preempted(_) => self.ran.preempted += 1,
        }
    }

    fn wait(&mut self, stage: StageId, ns: u64) {
        if let Some(open) = self.open.get_mut(&JobId(stage.0 / STAGES)) {
            open.waited += ns as f64 / 1e9;
        }
    }

    fn start(&mut self, now: u64, stage: StageId, node: NodeId, kv: u64) {
        let index = node.0 as usize;
        let planned = self.planned(stage);
        let job = &self.workload[self.by_id[&planned.stage.job]].job;
        let cluster = self.specs[index].cluster;
        let rtt = self
            .rtt
            .get(usize::from(job.source.0))
            .and_then(|row| row.get(usize::from(cluster.0)))
            .map_or(0, |rtt| rtt.0);
        let since = self.since.remove(&stage).unwrap_or(now);
        self.wait(stage, now - since + rtt);
        let model = &self.models[usize::from(planned.stage.model.0)];
        let running = if let Some(parked) = self.parked.remove(&stage) {
            let bytes = parked.promised;
            let back = Span::transfer(bytes, self.specs[index].host_rate).0;
            Running { promised: kv, delay: back as f64, ..parked }
        } else {
            self.started.insert(stage, now);
            Running {
                model: planned.stage.model,
                prompt: planned.stage.prompt,
                output: planned.output,
                promised: kv,
                delay: rtt as f64,
                prefill: model.prefill(planned.stage.prompt),
                generated: 0.0,
                stopped: false,
            }
        };
        self.machines[index].advance(now as f64, self.models);
        self.machines[index].running.insert(stage, running);
        self.on.insert(stage, index);
        self.foresee(now, index);
    }

    fn change(&mut self, now: u64, stage: StageId, with: impl FnOnce(&mut Running)) {
        let Some(node) = self.on.get(&stage).copied() else { return };
        self.machines[node].advance(now as f64, self.models);
        if let Some(running) = self.machines[node].running.get_mut(&stage) {
            with(running);
        }
        self.foresee(now, node);
    }

    /// Removes a stage from its node, so that it waits again.
    fn stop(&mut self, now: u64, stage: StageId) -> Option<Running> {
        let node = self.on.remove(&stage)?;
        self.machines[node].advance(now as f64, self.models);
        let running = self.machines[node].running.remove(&stage);
        self.since.insert(stage, now);
        self.foresee(now, node);
        running
    }

    fn foresee(&mut self, now: u64, node: usize) {
        self.machines[node].epoch += 1;
        let epoch = self.machines[node].epoch;
        if let Some(next) = self.machines[node].next(self.models) {
            // Rounding up makes the event due at that time.
            let at = (next.ceil() as u64).max(now);
            self.due.push(Time(at), DueEvent::Changes(node, epoch));
        }
    }

    fn check(&mut self, now: u64) {
        for (node, spec) in self.specs.iter().enumerate() {
            let weights: u64 = self.resident[node]
                .iter()
                .filter(|(model, _)| {
                    self.behind[node]
                        .get(*model)
                        .is_none_or(|from| *from <= now || self.leaving[node].is_empty())
                })
                .map(|(model, at)| {
                    let spec = &self.models[usize::from(model.0)].spec;
                    match at {
                        Readiness::Running => spec.weights + spec.context,
                        Readiness::Sleeping => spec.context,
                        _ => 0,
                    }
                })
                .sum();
            let leaving: u64 = self.leaving[node]
                .keys()
                .map(|model| self.models[usize::from(model.0)].spec.weights)
                .sum();
            let used = weights + leaving + spec.other + self.machines[node].kv(self.models);
            self.ran.overflows += u64::from(used > spec.gpu);
            self.ran.fullest = self.ran.fullest.max(used as f64 / spec.gpu as f64);
        }
    }
}
