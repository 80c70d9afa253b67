//! The driver of a cluster in virtual time: instances, the dispatcher, and transfers between
//! instances.
//!
//! The caller passes all decision makers: a [`Replica`] for each instance, a [`Dispatch`] and a
//! [`Scaling`]. A run ends when there are no more events, or at [`Config::ends`]. Requests that are
//! incomplete then are late.

mod elastic;

use std::collections::{BTreeMap, HashMap, VecDeque};

use laxity_requests::baseline::RoundRobin;
use laxity_requests::dispatch::{Dispatch, DispatchDecision, DispatchEvent, Role};
use laxity_requests::iteration::{Event, Plan};
use laxity_requests::latency::Latency;
use laxity_requests::replica::Replica;
use laxity_requests::request::{InstanceId, RequestId, Spec};
use laxity_requests::scaling::{Scaling, ScalingWindow};
use laxity_requests::{Span, Time};

use super::link::Link;
use super::outcome::{ClusterOutcome, Record};
use super::workload::Asked;
use crate::agenda::Agenda;

pub type Make<'a> = dyn Fn(InstanceId, Role) -> Replica + 'a;

pub type Clock<'a> = dyn Latency + 'a;

#[derive(Clone, Copy, Debug)]
pub struct Startup {
    pub weights: u64,
    /// Rate of the disk, in bytes per second.
    pub disk: u64,
    /// Time for the other steps of a start (process, graphs, memory), in addition to loading
    /// weights.
    pub boot: Span,
}

pub struct Scaler<'a> {
    pub decides: Box<dyn Scaling + 'a>,
    pub window: Span,
    pub startup: Startup,
    /// Largest number of instances that the policy may run.
    pub most: u32,
}

pub struct Config<'a> {
    pub roles: Vec<Role>,
    pub make: &'a Make<'a>,
    pub clock: &'a Clock<'a>,
    pub dispatch: Box<dyn Dispatch + 'a>,
    pub scaler: Option<Scaler<'a>>,
    pub link: Link,
    pub kv_bytes_per_token: u64,
    pub ends: Time,
}

impl<'a> Config<'a> {
    /// Returns a cluster of one instance, without a scaler.
    pub fn single(make: &'a Make<'a>, clock: &'a Clock<'a>, kv_bytes_per_token: u64) -> Self {
        Self {
            roles: vec![Role::Whole],
            make,
            clock,
            dispatch: Box::new(RoundRobin::default()),
            scaler: None,
            link: Link::new(12_500_000_000, Span::from_micros(20)),
            kv_bytes_per_token,
            ends: Time::NEVER,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happens {
    Arrives(usize),
    Computed(InstanceId),
    Landed(RequestId),
    Ready(InstanceId),
    Looks,
    Wakes,
}

struct Instance {
    replica: Replica,
    role: Role,
    plan: Option<(Plan, Time)>,
    up: Time,
    ready: bool,
    /// Set when the instance accepts no more requests. Once it is empty it stops, or changes to the
    /// given role.
    leaves: Option<Option<Role>>,
    busy: Span,
    incoming: VecDeque<RequestId>,
}

#[derive(Clone, Copy, Debug)]
struct Move {
    spec: Spec,
    from: InstanceId,
    to: Option<InstanceId>,
}

struct ClusterRun<'a> {
    config: Config<'a>,
    asked: &'a [Asked],
    now: Time,
    events: Agenda<Happens>,
    instances: BTreeMap<InstanceId, Instance>,
    next_instance: u32,
    records: Vec<Record>,
    index: HashMap<RequestId, usize>,
    places: HashMap<RequestId, InstanceId>,
    moves: HashMap<RequestId, Move>,
    unplaced: HashMap<RequestId, Spec>,
    window: ScalingWindow,
    wakes: Option<Time>,
    outcome: ClusterOutcome,
}

/// Runs requests, given in order of arrival, through a cluster.
///
/// # Panics
/// Panics if two requests have the same id, or a policy decides something invalid, such as an
/// unknown instance. Policies are the code under test.
pub fn run(config: Config<'_>, asked: &[Asked]) -> ClusterOutcome {
    let mut run = ClusterRun {
        config,
        asked,
        now: Time::ZERO,
        events: Agenda::default(),
        instances: BTreeMap::new(),
        next_instance: 0,
        records: asked.iter().map(|a| Record::new(a.spec, a.output)).collect(),
        index: HashMap::new(),
        places: HashMap::new(),
        moves: HashMap::new(),
        unplaced: HashMap::new(),
        window: ScalingWindow::default(),
        wakes: None,
        outcome: ClusterOutcome::default(),
    };
    for (index, asked) in asked.iter().enumerate() {
        let before = run.index.insert(asked.spec.id, index);
        assert!(before.is_none(), "{:?} twice", asked.spec.id);
    }
    run.all()
}

impl ClusterRun<'_> {
    fn all(mut self) -> ClusterOutcome {
        for role in std::mem::take(&mut self.config.roles) {
            let instance = self.add(role);
            self.ready(instance);
        }
        if !self.asked.is_empty() {
            self.events.push(self.asked[0].spec.arrival, Happens::Arrives(0));
        }
        if let Some(scaler) = &self.config.scaler {
            let first = Time::ZERO + scaler.window;
            self.events.push(first, Happens::Looks);
        }
        while let Some(time) = self.events.next() {
            self.now = time.min(self.config.ends);
            let Some(happens) = self.events.pop(self.now) else { break };
            self.happens(happens);
            self.decide();
        }
        let now = self.now;
        for instance in self.instances.values() {
            self.outcome.instance_time = self.outcome.instance_time + now.since(instance.up);
        }
        self.outcome.ended = now;
        self.outcome.records = self.records;
        self.outcome
    }

    fn happens(&mut self, happens: Happens) {
        match happens {
            Happens::Arrives(index) => {
                let spec = self.asked[index].spec;
                if let Some(next) = self.asked.get(index + 1) {
                    self.events.push(next.spec.arrival, Happens::Arrives(index + 1));
                }
                self.window.arrived += 1;
                self.unplaced.insert(spec.id, spec);
                self.tell(&DispatchEvent::Arrived(spec));
            }
            Happens::Computed(instance) => self.computed(instance),
            Happens::Landed(request) => self.landed(request),
            Happens::Ready(instance) => self.ready(instance),
            Happens::Looks => self.look(),
            Happens::Wakes => self.wakes = None,
        }
    }

    fn tell(&mut self, event: &DispatchEvent) {
        self.config.dispatch.handle(self.now, event);
    }

    fn add(&mut self, role: Role) -> InstanceId {
        let id = InstanceId(self.next_instance);
        self.next_instance += 1;
        let instance = Instance {
            replica: (self.config.make)(id, role),
            role,
            plan: None,
            up: self.now,
            ready: false,
            leaves: None,
            busy: Span::ZERO,
            incoming: VecDeque::new(),
        };
        self.instances.insert(id, instance);
        id
    }

    fn ready(&mut self, id: InstanceId) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        instance.ready = true;
        let role = instance.role;
        self.tell(&DispatchEvent::Up { instance: id, role });
    }

    fn decide(&mut self) {
        while let Some(decision) = self.config.dispatch.poll_decision(self.now) {
            match decision {
                DispatchDecision::Place { request, instance } => self.place(request, instance),
                DispatchDecision::Refuse(request) => {
                    self.unplaced.remove(&request);
                    self.refuse(request);
                    if let Some(moved) = self.moves.remove(&request) {
                        self.cancel_at(moved.from, request);
                    }
                }
            }
        }
        let ids: Vec<InstanceId> = self.instances.keys().copied().collect();
        for id in ids {
            self.start(id);
        }
        if let Some(next) = self.config.dispatch.next_deadline() {
            let next = next.max(Time(self.now.0 + 1));
            if self.wakes.is_none_or(|wakes| next < wakes) {
                self.wakes = Some(next);
                self.events.push(next, Happens::Wakes);
            }
        }
    }

    fn refuse(&mut self, request: RequestId) {
        let index = self.index[&request];
        self.records[index].refused = true;
    }

    fn cancel_at(&mut self, id: InstanceId, request: RequestId) {
        if let Some(instance) = self.instances.get_mut(&id) {
            instance.replica.handle(self.now, &Event::Cancelled(request));
        }
    }

    fn place(&mut self, request: RequestId, to: InstanceId) {
        let spec = self.unplaced.remove(&request).expect("only what waits is placed");
        let instance = self.instances.get_mut(&to).expect("a place at an instance that is there");
        assert!(instance.ready && instance.leaves.is_none(), "{to:?} takes none");
        self.places.insert(request, to);
        if let Some(moved) = self.moves.get_mut(&request) {
            moved.to = Some(to);
            instance.incoming.push_back(request);
            self.admit(to);
            return;
        }
        instance.replica.handle(self.now, &Event::Arrived(spec));
        self.refusals(to);
    }

    fn admit(&mut self, to: InstanceId) {
        while let Some(instance) = self.instances.get_mut(&to) {
            let Some(request) = instance.incoming.front().copied() else { return };
            let Some(moved) = self.moves.get(&request).copied() else {
                instance.incoming.pop_front();
                continue;
            };
            let tokens = moved.spec.ready + 1;
            let pool = instance.replica.pool();
            if pool.blocks(moved.spec.tokens_max()) > pool.capacity() {
                instance.incoming.pop_front();
                self.moves.remove(&request);
                self.refuse(request);
                self.cancel_at(moved.from, request);
                continue;
            }
            if !instance.replica.reserve(request, tokens) {
                return;
            }
            instance.incoming.pop_front();
            let bytes = u64::from(moved.spec.ready) * self.config.kv_bytes_per_token;
            let lands = self.config.link.transfer(self.now, moved.from, to, bytes);
            self.events.push(lands, Happens::Landed(request));
        }
    }

    fn landed(&mut self, request: RequestId) {
        let Some(moved) = self.moves.remove(&request) else { return };
        self.cancel_at(moved.from, request);
        if let Some(to) = moved.to
            && let Some(instance) = self.instances.get_mut(&to)
        {
            instance.replica.handle(self.now, &Event::Arrived(moved.spec));
            self.refusals(to);
        }
    }

    fn refusals(&mut self, id: InstanceId) {
        let mut refused = Vec::new();
        if let Some(instance) = self.instances.get_mut(&id) {
            while let Some(refusal) = instance.replica.poll_refusal() {
                refused.push(refusal.request);
            }
        }
        for request in refused {
            self.places.remove(&request);
            self.refuse(request);
            self.tell(&DispatchEvent::Cancelled(request));
        }
    }

    fn start(&mut self, id: InstanceId) {
        let now = self.now;
        let Some(instance) = self.instances.get_mut(&id) else { return };
        if instance.plan.is_some() || !instance.ready {
            return;
        }
        if let Some(plan) = instance.replica.plan(now) {
            let took = self.config.clock.iteration(&plan.composition());
            self.outcome.drops += plan.drops.len() as u64;
            instance.busy = instance.busy + took;
            instance.plan = Some((plan, now));
            self.events.push(now + took, Happens::Computed(id));
            self.refusals(id);
        } else {
            self.leave(id);
        }
    }

    fn computed(&mut self, id: InstanceId) {
        let now = self.now;
        let Some(instance) = self.instances.get_mut(&id) else { return };
        let Some((plan, since)) = instance.plan.take() else { return };
        self.outcome.iterations += 1;
        let chunks = plan.chunks.iter().filter(|chunk| chunk.last);
        let gave: Vec<RequestId> = chunks
            .map(|chunk| chunk.request)
            .chain(plan.steps.iter().map(|step| step.request))
            .filter(|request| instance.replica.job(*request).is_some())
            .collect();
        let mut finished = Vec::new();
        let mut moving = Vec::new();
        for request in gave {
            let record = &mut self.records[self.index[&request]];
            record.token(now, id.0);
            if record.complete() {
                finished.push(request);
                self.window.finished += 1;
                self.window.met += u32::from(record.met());
            } else if instance.role == Role::Prefill {
                finished.push(request);
                moving.push(request);
            }
        }
        let took = now.since(since);
        let done = Event::Done { took, finished: finished.clone() };
        instance.replica.handle(now, &done);
        let mut events = Vec::new();
        for request in moving {
            let record = &self.records[self.index[&request]];
            let spec = Spec {
                ready: record.spec.prompt + record.generated - 1,
                generated: record.generated,
                ..record.spec
            };
            // The blocks stay reserved until the KV cache has arrived elsewhere.
            let held = instance.replica.reserve(request, spec.ready);
            debug_assert!(held, "just given back");
            let moved = Move { spec, from: id, to: None };
            self.moves.insert(request, moved);
            self.places.remove(&request);
            self.unplaced.insert(request, spec);
            finished.retain(|other| *other != request);
            events.push(DispatchEvent::Prefilled { spec, instance: id });
        }
        for request in finished {
            self.places.remove(&request);
            let record = &self.records[self.index[&request]];
            events.push(DispatchEvent::Finished {
                request,
                instance: id,
                class: record.spec.class,
                ttft: record.ttft().unwrap_or_default().0,
                tpot: record.tpot().unwrap_or_default().0,
                generated: record.generated,
            });
        }
        events.push(DispatchEvent::Load {
            instance: id,
            load: instance.replica.load(),
            took: took.0,
        });
        for event in events {
            self.tell(&event);
        }
        self.admit(id);
    }
}

#[cfg(test)]
#[path = "cluster_tests.rs"]
mod tests;
