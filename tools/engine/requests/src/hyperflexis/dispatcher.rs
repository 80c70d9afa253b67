//! The dispatcher (§5.1, Algorithm 1) over all instances that compute prompts, together with the
//! migrator.
//!
//! Requests wait ordered by (TPOT, arrival), instances by maturity time ([`super::budget`]). The
//! instance that is mature longest takes requests in order. It takes a request if its token budget
//! holds and a first token in time is probable enough. Then its next maturity time is computed.
//! With prefill and decode instances, the same code runs over the former, without terms for
//! decodes.
//!
//! The paper leaves these points open:
//! * *An instance that takes no request*: the paper's loop would ask again at once. Here it is
//!   asked again after its report, after an end of one of its requests, and for each new request.
//!   Time alone only lowers probabilities.
//! * *Deadlock*: an idle instance takes the first request even above its budget.
//! * *Below θ*: a request that is too late on every instance moves to a best-effort queue by
//!   arrival. That queue gets free budget when no other request waits.
//! * *Tightest targets*: the TPOT is that of the instance's requests and of candidates. The TTFT is
//!   the shortest of recent arrivals, because eq. 7 is about an unknown request that arrives right
//!   after a dispatch.
//! * *Corrections by the monitor*: a report moves the maturity time to the remaining time of the
//!   prompts plus the time that recovers the pause. A dispatch waits for the end of a running step.
//! * *Rare reports* ([`DispatcherOptions::monitor`]): a mature instance counts as having computed
//!   its prompts.
//! * *The whole TTFT* in eq. 5 makes a request late that arrives right after a full dispatch.
//!   [`DispatcherOptions::ttft_share`] reduces it.
//! * *Resource utilization* in `calculate_p` is the larger of KV occupancy and `E_d / TPOT`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rustc_hash::FxHashMap;

use super::budget::InstanceLoad;
use super::latency::Linear;
use super::migrator::{Judge, Migrator};
use super::priority::{Mapping, Record};
use super::scan::{Scan, Taken, Waiting};
use crate::dispatch::{Dispatch, DispatchDecision, DispatchEvent, Role};
use crate::iteration::Load;
use crate::ledger::{InstanceTable, Row, Targets};
use crate::request::{InstanceId, RequestId, Spec};
use crate::window::Window;
use crate::{Span, Time};

/// Number of requests of which the shortest TTFT counts.
const LATELY: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DispatcherOptions {
    pub model: Linear,
    /// Least time between two reports of an instance that are used (§9.3). Zero uses each report.
    pub monitor: Span,
    /// Share of the tightest TTFT within which an instance has to be mature again. Eq. 7 omits the
    /// waiting request's own prompt and other waiting requests. With the whole TTFT, a request
    /// right after a full dispatch is late.
    pub ttft_share: f64,
    /// Whether decoding requests pause while an instance computes prompts (eq. 7). With chunked
    /// prefill they don't. The instance is then mature when its prompts are computed.
    pub pauses: bool,
    /// Share of KV blocks that is reserved for decodes.
    pub headroom: f64,
    pub block_tokens: u32,
    /// Maximum number of waiting requests that are considered for an instance.
    pub scan_max: usize,
}

impl DispatcherOptions {
    pub const fn new(model: Linear, block_tokens: u32) -> Self {
        Self {
            model,
            monitor: Span::ZERO,
            ttft_share: 0.5,
            pauses: true,
            headroom: 0.05,
            block_tokens,
            scan_max: 256,
        }
    }
}

type Key = (u64, Time, RequestId);

struct Worker {
    mature: Time,
    begun: Option<Time>,
    synced: Time,
}

pub struct HyperFlexis {
    options: DispatcherOptions,
    ledger: InstanceTable,
    line: BTreeMap<Key, Waiting>,
    tail: BTreeMap<(Time, RequestId), Waiting>,
    keys: FxHashMap<RequestId, Key>,
    fresh: VecDeque<Key>,
    workers: BTreeMap<InstanceId, Worker>,
    askable: BTreeSet<(Time, InstanceId)>,
    /// Mature instances that take none of the waiting requests. They weren't asked about those in
    /// `fresh` yet.
    full: BTreeSet<(Time, InstanceId)>,
    /// The TTFTs of the last requests.
    lately: Window<u64>,
    migrator: Migrator,
    mapping: Option<Mapping>,
    /// With a mapping: the assigned targets of requests, and how long they waited for an instance
    /// in ns.
    assigned: FxHashMap<RequestId, (Targets, u64)>,
    /// With a mapping: number of waiting requests, by priority.
    pending: BTreeMap<usize, usize>,
    decisions: VecDeque<DispatchDecision>,
}

impl HyperFlexis {
    pub fn new(options: DispatcherOptions) -> Self {
        Self {
            options,
            ledger: InstanceTable::default(),
            line: BTreeMap::new(),
            tail: BTreeMap::new(),
            keys: FxHashMap::default(),
            fresh: VecDeque::new(),
            workers: BTreeMap::new(),
            askable: BTreeSet::new(),
            full: BTreeSet::new(),
            lately: Window::default(),
            migrator: Migrator::default(),
            mapping: None,
            assigned: FxHashMap::default(),
            pending: BTreeMap::new(),
            decisions: VecDeque::new(),
        }
    }

    /// Creates a dispatcher for requests whose class is a priority, with 0 the highest. `mapping`
    /// assigns the objectives (§5.2).
    pub fn with_priorities(options: DispatcherOptions, mapping: Mapping) -> Self {
        Self { mapping: Some(mapping), ..Self::new(options) }
    }

    fn enqueue(&mut self, spec: &Spec) {
        let mut targets = Targets::of(spec);
        if let Some(mapping) = &self.mapping {
            let priority = usize::from(spec.class.0);
            let contended = self.pending.range(..priority).next().is_some();
            targets = mapping.assign(priority, contended);
            self.assigned.insert(spec.id, (targets, 0));
            *self.pending.entry(priority).or_default() += 1;
        }
        self.lately.push(targets.ttft, LATELY);
        let key = (targets.tpot, spec.arrival, spec.id);
        let waiting = Waiting { spec: *spec, targets };
        self.line.insert(key, waiting);
        self.keys.insert(spec.id, key);
        self.fresh.push_back(key);
    }

    /// Removes a request from the queue or from the best-effort queue.
    fn dequeue(&mut self, request: RequestId) -> Option<Waiting> {
        let key = self.keys.remove(&request)?;
        let waiting = self.line.remove(&key).or_else(|| self.tail.remove(&(key.1, request)))?;
        let priority = usize::from(waiting.spec.class.0);
        if let Some(count) = self.pending.get_mut(&priority) {
            *count -= 1;
            if *count == 0 {
                self.pending.remove(&priority);
            }
        }
        Some(waiting)
    }

    /// Sets the time when an instance is asked next, even if it was asked before.
    fn mature_at(&mut self, instance: InstanceId, mature: Time) {
        if let Some(worker) = self.workers.get_mut(&instance) {
            let before = (worker.mature, instance);
            self.askable.remove(&before);
            self.full.remove(&before);
            worker.mature = mature;
            self.askable.insert((mature, instance));
        }
    }

    fn up(&mut self, now: Time, instance: InstanceId, role: Role) {
        self.gone(instance);
        self.ledger.up(now, instance, role);
        if role == Role::Decode {
            self.migrator.open(instance, now);
            return;
        }
        let worker = Worker { mature: now, begun: None, synced: now };
        self.workers.insert(instance, worker);
        self.askable.insert((now, instance));
    }

    fn gone(&mut self, instance: InstanceId) {
        self.migrator.close(instance);
        if let Some(worker) = self.workers.remove(&instance) {
            self.askable.remove(&(worker.mature, instance));
            self.full.remove(&(worker.mature, instance));
        }
    }

    fn report(&mut self, now: Time, instance: InstanceId, load: Load) {
        let Some(worker) = self.workers.get_mut(&instance) else {
            if self.ledger.row(instance).is_some() {
                self.ledger.report(now, instance, load);
                let step = InstanceLoad::of_now(&self.ledger, instance, &self.options.model);
                self.migrator.open(instance, now + Span(step as u64));
            }
            return;
        };
        if now.since(worker.synced) < self.options.monitor {
            return;
        }
        worker.synced = now;
        let (before, begun) = (worker.mature, worker.begun);
        self.ledger.report(now, instance, load);
        let Some(row) = self.ledger.row(instance) else { return };
        let standing = InstanceLoad { pauses: self.options.pauses, ..InstanceLoad::of(row) };
        let mut mature = before;
        let mut under_way = begun;
        if row.is_idle() {
            (mature, under_way) = (before.min(now), None);
        } else if let Some(since) = begun {
            let stood = now.since(since).0 as f64;
            let left = standing.maturity_after_ns(&self.options.model, stood);
            mature = now + Span(left as u64);
            if standing.prompts.tokens <= 0.0 {
                under_way = None;
            }
        }
        if let Some(worker) = self.workers.get_mut(&instance) {
            worker.begun = under_way;
        }
        self.mature_at(instance, mature);
    }

    fn targets(&self, spec: &Spec) -> Targets {
        self.assigned.get(&spec.id).map_or_else(|| Targets::of(spec), |(targets, _)| *targets)
    }

    fn left(&mut self, now: Time, request: RequestId) {
        if let Some(instance) = self.ledger.leave(request) {
            self.freed(now, instance);
        }
    }

    /// Updates an instance after one of its requests ended or left.
    fn freed(&mut self, now: Time, instance: InstanceId) {
        if let Some(worker) = self.workers.get(&instance) {
            let idle = self.ledger.row(instance).is_some_and(Row::is_idle);
            let mature = if idle { worker.mature.min(now) } else { worker.mature };
            self.mature_at(instance, mature);
        } else if self.ledger.row(instance).is_some() {
            self.migrator.open(instance, now);
        }
    }

    /// Asks all mature instances, in the order of their maturity.
    fn round(&mut self, now: Time) {
        while let Some((mature, instance)) = self.askable.first().copied() {
            if self.line.is_empty() && self.tail.is_empty() || mature > now {
                break;
            }
            if !self.ask(now, instance, None) {
                self.askable.remove(&(mature, instance));
                self.full.insert((mature, instance));
            }
        }
        while let Some(key) = self.fresh.pop_front() {
            let Some(waiting) = self.line.get(&key).copied() else { continue };
            let full: Vec<InstanceId> = self.full.iter().map(|(_, at)| *at).collect();
            for instance in full {
                if self.ask(now, instance, Some(&waiting)) {
                    break;
                }
            }
        }
    }

    /// Lets an instance take requests, of all or only one. Returns whether it took any.
    fn ask(&mut self, now: Time, instance: InstanceId, only: Option<&Waiting>) -> bool {
        if self.options.monitor > Span::ZERO {
            // The instance is mature, so its prompts are computed even if no report shows it.
            self.ledger.computed(instance);
        }
        let Some(row) = self.ledger.row(instance) else { return false };
        let scan = Scan::new(&self.options, self.lately.sorted(), now, row);
        let mut taken = Taken::new(scan.standing);
        let mut hopeless = Vec::new();
        match only {
            Some(waiting) => scan.offer(&mut taken, waiting),
            None => {
                for (key, waiting) in self.line.iter().take(self.options.scan_max) {
                    if scan.is_hopeless(waiting) {
                        hopeless.push(*key);
                    } else if scan.is_spent(&taken) {
                        break;
                    } else {
                        scan.offer(&mut taken, waiting);
                    }
                }
            }
        }
        for key in hopeless {
            if let Some(waiting) = self.line.remove(&key) {
                self.tail.insert((key.1, key.2), waiting);
            }
        }
        if only.is_none() && taken.requests.is_empty() {
            if self.line.is_empty() {
                for waiting in self.tail.values().take(self.options.scan_max) {
                    if !scan.take_late(&mut taken, waiting) {
                        break;
                    }
                }
            }
            let first = self.line.values().next().or(self.tail.values().next());
            if let Some(first) = first
                && scan.idle
                && taken.requests.is_empty()
            {
                taken.push(first);
            }
        }
        let residual = scan.residual;
        self.dispatch(now, instance, residual, &taken)
    }

    fn dispatch(&mut self, now: Time, instance: InstanceId, residual: f64, taken: &Taken) -> bool {
        if taken.requests.is_empty() {
            return false;
        }
        let model = self.options.model;
        for request in &taken.requests {
            let Some(waiting) = self.dequeue(*request) else { continue };
            if let Some(assigned) = self.assigned.get_mut(request) {
                assigned.1 = now.since(waiting.spec.arrival).0;
            }
            self.ledger.place(&waiting.spec, waiting.targets.tpot, instance);
            let request = *request;
            self.decisions.push_back(DispatchDecision::Place { request, instance });
        }
        let after = residual + taken.standing.maturity_ns(&model);
        let mature = now + Span(after as u64);
        self.mature_at(instance, mature);
        if let Some(worker) = self.workers.get_mut(&instance) {
            worker.begun = worker.begun.or(Some(now));
        }
        true
    }
}

impl Dispatch for HyperFlexis {
    fn handle(&mut self, now: Time, event: &DispatchEvent) {
        match event {
            DispatchEvent::Arrived(spec) => self.enqueue(spec),
            DispatchEvent::Up { instance, role } => self.up(now, *instance, *role),
            DispatchEvent::Down { instance, lost } => {
                self.gone(*instance);
                self.ledger.down(*instance, lost);
                for spec in lost {
                    self.migrator.remove(spec.id);
                    self.enqueue(spec);
                }
            }
            DispatchEvent::Load { instance, load, .. } => self.report(now, *instance, *load),
            DispatchEvent::Prefilled { spec, instance } => {
                self.ledger.leave(spec.id);
                self.freed(now, *instance);
                self.migrator.push(spec, self.targets(spec));
            }
            DispatchEvent::Finished { request, class, ttft, tpot, .. } => {
                self.left(now, *request);
                if let Some((_, queued)) = self.assigned.remove(request)
                    && let Some(mapping) = &mut self.mapping
                {
                    mapping.record(Record {
                        priority: usize::from(class.0),
                        ttft: *ttft,
                        tpot: *tpot,
                        queued,
                    });
                }
            }
            DispatchEvent::Cancelled(request) => {
                self.assigned.remove(request);
                self.migrator.remove(*request);
                self.dequeue(*request);
                self.left(now, *request);
            }
        }
    }

    fn poll_decision(&mut self, now: Time) -> Option<DispatchDecision> {
        if self.decisions.is_empty() {
            self.round(now);
        }
        if self.decisions.is_empty() {
            let judge = Judge {
                ledger: &self.ledger,
                model: &self.options.model,
                block_tokens: self.options.block_tokens,
                headroom: self.options.headroom,
            };
            if let Some((spec, instance)) = self.migrator.next(judge, self.options.scan_max) {
                self.ledger.place(&spec, self.targets(&spec).tpot, instance);
                let step = InstanceLoad::of_now(&self.ledger, instance, &self.options.model);
                self.migrator.open(instance, now + Span(step as u64));
                let request = spec.id;
                self.decisions.push_back(DispatchDecision::Place { request, instance });
            }
        }
        self.decisions.pop_front()
    }

    fn next_deadline(&self) -> Option<Time> {
        if self.line.is_empty() && self.tail.is_empty() {
            return None;
        }
        self.askable.first().map(|(mature, _)| *mature)
    }

    fn waiting(&self) -> usize {
        self.line.len() + self.tail.len() + self.migrator.len()
    }
}
