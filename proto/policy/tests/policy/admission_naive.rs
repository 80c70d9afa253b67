//! The oracle of the admission tests: Algorithm 1 as the paper prints it, with the readings that
//! `prune` documents. Each run adds up dense vectors from zero. The oracle shares only the event
//! types with the code under test.

use std::collections::{BTreeMap, BTreeSet};

use laxity_policy::admission::{AdmissionEvent, RequestLoad};

pub(crate) const PORTS: usize = 5;

#[derive(Clone, Debug)]
struct Request {
    id: u64,
    deadline: u64,
    bytes: [u64; PORTS],
    started: bool,
}

#[derive(Clone, Debug, Default)]
struct Batch {
    compute: u64,
    started: Option<u64>,
    tenant: u16,
    requests: Vec<Request>,
}

/// The outcome of a run for one batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) batch: u64,
    pub(crate) finish: u64,
    pub(crate) bottleneck: Option<usize>,
    pub(crate) limit: u64,
    pub(crate) pruned: Vec<u64>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Naive {
    pub(crate) budget: usize,
    /// Budgets of tenants, the first of tenant 0.
    pub(crate) own_budgets: Vec<Option<usize>>,
    /// The tenant against whose budget a pruned request counts, `None` for the common one.
    paid_by: BTreeMap<u64, Option<u16>>,
    /// Whether doomed requests are pruned themselves: `Doomed::SetAside`.
    pub(crate) set_aside: bool,
    pub(crate) rates: [u64; PORTS],
    batches: BTreeMap<u64, Batch>,
    /// Queued batches as pairs `(batch, ahead)`, at most one for each batch.
    queued: BTreeSet<(u64, u64)>,
    pub(crate) pruned: BTreeSet<u64>,
}

impl Naive {
    pub(crate) fn new(budget: usize, set_aside: bool, rate: u64) -> Self {
        Self { budget, set_aside, rates: [rate; PORTS], ..Self::default() }
    }

    pub(crate) fn handle(&mut self, now: u64, event: &AdmissionEvent) {
        match event {
            AdmissionEvent::BatchArrived { batch, requests, compute } => {
                self.batches.entry(batch.0).or_default().compute = compute.0;
                for load in requests {
                    self.join(batch.0, load);
                }
            }
            AdmissionEvent::RequestJoined { batch, load } => {
                if self.batches.contains_key(&batch.0) {
                    self.join(batch.0, load);
                }
            }
            AdmissionEvent::RequestStarted { request } => {
                self.requests().filter(|r| r.id == request.0).for_each(|r| r.started = true);
            }
            AdmissionEvent::RequestEnded { request } => {
                self.remove(request.0);
                self.pruned.remove(&request.0);
            }
            AdmissionEvent::BytesCompleted { request, port, bytes } => {
                for r in self.requests().filter(|r| r.id == request.0) {
                    if let Some(left) = r.bytes.get_mut(port.0 as usize) {
                        *left = left.saturating_sub(*bytes);
                    }
                }
            }
            AdmissionEvent::BatchStarted { batch } => {
                if let Some(batch) = self.batches.get_mut(&batch.0) {
                    batch.started = batch.started.or(Some(now));
                    batch.requests.iter_mut().for_each(|r| r.started = true);
                }
                let started = batch.0;
                self.queued.retain(|&(waits, _)| waits != started);
            }
            AdmissionEvent::BatchQueued { batch, ahead } => {
                let known = |id| self.batches.contains_key(id);
                let may_wait = known(&batch.0)
                    && known(&ahead.0)
                    && self.batches[&batch.0].started.is_none()
                    && batch != ahead
                    && !self.all_before(ahead.0).contains(&batch.0);
                if may_wait {
                    self.queued.retain(|&(waits, _)| waits != batch.0);
                    self.queued.insert((batch.0, ahead.0));
                }
            }
            AdmissionEvent::BatchTenant { batch, tenant } => {
                self.batches.entry(batch.0).and_modify(|batch| batch.tenant = *tenant);
            }
            AdmissionEvent::BatchDeparted { batch } => {
                self.queued.retain(|pair| pair.0 != batch.0 && pair.1 != batch.0);
                for request in self.batches.remove(&batch.0).unwrap_or_default().requests {
                    self.pruned.remove(&request.id);
                }
            }
            AdmissionEvent::PortRate { port, bytes_per_second } => {
                self.rates[port.0 as usize] = *bytes_per_second;
            }
        }
    }

    /// Returns all batches that compute before `batch` on its unit. It builds the transitive
    /// closure by adding pairs until the set stops growing.
    fn all_before(&self, batch: u64) -> BTreeSet<u64> {
        let mut before = BTreeSet::new();
        loop {
            let more: BTreeSet<u64> = self
                .queued
                .iter()
                .filter(|(waits, _)| *waits == batch || before.contains(waits))
                .map(|&(_, ahead)| ahead)
                .collect();
            if more.is_subset(&before) {
                return before;
            }
            before.extend(more);
        }
    }

    /// Returns how long the batch itself has still to compute.
    fn compute_left(&self, now: u64, batch: u64) -> u64 {
        let batch = &self.batches[&batch];
        let end = batch.started.unwrap_or(now).saturating_add(batch.compute);
        end.saturating_sub(now)
    }

    fn requests(&mut self) -> impl Iterator<Item = &mut Request> {
        self.batches.values_mut().flat_map(|batch| &mut batch.requests)
    }

    fn remove(&mut self, request: u64) {
        for batch in self.batches.values_mut() {
            batch.requests.retain(|r| r.id != request);
        }
    }

    fn join(&mut self, batch: u64, load: &RequestLoad) {
        self.remove(load.request.0);
        let mut bytes = [0; PORTS];
        for (port, more) in &load.ports {
            bytes[port.0 as usize] += more;
        }
        let request =
            Request { id: load.request.0, deadline: load.deadline.0, bytes, started: load.started };
        self.batches.get_mut(&batch).expect("checked by the caller").requests.push(request);
    }

    /// Returns `(RED, D^Lo)` of a batch.
    fn red(&self, batch: &Batch) -> (u64, u64) {
        let counts = |r: &&Request| !(self.set_aside && self.pruned.contains(&r.id));
        let mut d: Vec<u64> = batch.requests.iter().filter(counts).map(|r| r.deadline).collect();
        d.retain(|&deadline| deadline != u64::MAX);
        d.sort_unstable();
        match d.len() {
            0 => (u64::MAX, u64::MAX),
            1 => (d[0], d[0]),
            n => {
                let widest = (1..n).map(|k| d[k] - d[k - 1]).max().expect("n > 1");
                let k = (1..n).find(|&k| d[k] - d[k - 1] == widest).expect("it was found");
                let weighed = k as u128 * u128::from(d[0]) + (n - k) as u128 * u128::from(d[k]);
                ((weighed / n as u128) as u64, d[k])
            }
        }
    }

    fn dense_load(&self, batch: &Batch) -> [u64; PORTS] {
        let mut load = [0; PORTS];
        for request in batch.requests.iter().filter(|r| !self.pruned.contains(&r.id)) {
            for (sum, bytes) in load.iter_mut().zip(request.bytes) {
                *sum += bytes;
            }
        }
        load
    }

    /// Returns `u*` and its time in nanoseconds.
    fn bottleneck(&self, before: &[u64; PORTS], own: &[u64; PORTS]) -> (Option<usize>, u64) {
        let takes = |u: usize| match (u128::from(before[u] + own[u]), u128::from(self.rates[u])) {
            (_, 0) => (u128::MAX, 1),
            (bytes, rate) => (bytes * 1_000_000_000, rate),
        };
        let longer = |a: (u128, u128), b: (u128, u128)| match (a.0, b.0) {
            (u128::MAX, other) => other != u128::MAX,
            (_, u128::MAX) => false,
            _ => a.0 * b.1 > b.0 * a.1,
        };
        let mut worst = None;
        for u in (0..PORTS).filter(|&u| own[u] > 0) {
            if worst.is_none_or(|kept| longer(takes(u), takes(kept))) {
                worst = Some(u);
            }
        }
        let ns = worst.map_or(0, |u| takes(u).0.div_ceil(takes(u).1));
        (worst, u64::try_from(ns).unwrap_or(u64::MAX))
    }

    /// Prunes a request for `batch`, or returns false if the budget is spent.
    fn prune(&mut self, batch: u64, request: u64) -> bool {
        let tenant = self.batches[&batch].tenant;
        let own = self.own_budgets.get(usize::from(tenant)).copied().flatten();
        let payer = own.map(|_| tenant);
        let spent = self.pruned.iter().filter(|id| self.paid_by[id] == payer).count();
        let has_room = spent < own.unwrap_or(self.budget);
        if has_room {
            self.pruned.insert(request);
            self.paid_by.insert(request, payer);
        }
        has_room
    }

    /// Runs lines 1 to 20 of the algorithm.
    pub(crate) fn run(&mut self, now: u64) -> Vec<Verdict> {
        let mut sigma: Vec<(u64, u64, u64)> = Vec::new();
        for (&id, batch) in &self.batches {
            let (red, loose) = self.red(batch);
            sigma.push((red, id, loose));
        }
        sigma.sort_unstable();
        let sorted: Vec<Batch> = sigma.iter().map(|(_, id, _)| self.batches[id].clone()).collect();
        let ready: Vec<u64> = sigma
            .iter()
            .map(|&(_, id, _)| {
                let before = self.all_before(id);
                let on_the_unit = before.iter().chain([&id]);
                on_the_unit.fold(now, |at, &b| at.saturating_add(self.compute_left(now, b)))
            })
            .collect();

        for i in 0..sigma.len() {
            let limit = sigma[i].2;
            if self.set_aside {
                let mut doomed: Vec<(u64, u64)> = sorted[i]
                    .requests
                    .iter()
                    .filter(|r| !self.pruned.contains(&r.id) && r.deadline < ready[i])
                    .map(|r| (r.deadline, r.id))
                    .collect();
                doomed.sort_unstable();
                for (_, id) in doomed {
                    self.prune(sigma[i].1, id);
                }
                if ready[i] > limit {
                    continue;
                }
            }
            loop {
                let (u, finish) = self.estimate(&sorted, &ready, i);
                if finish <= limit {
                    break;
                }
                let Some(u) = u else { break };
                let pool = sorted[..=i].iter().enumerate();
                let heaviest = pool
                    .flat_map(|(k, b)| b.requests.iter().map(move |r| (k, r)))
                    .filter(|(_, r)| !self.pruned.contains(&r.id) && r.bytes[u] > 0)
                    .max_by_key(|(k, r)| (r.bytes[u], !r.started, *k, r.id));
                let Some((_, r)) = heaviest else { break };
                if !self.prune(sigma[i].1, r.id) {
                    break;
                }
            }
        }

        (0..sigma.len())
            .map(|i| {
                let (bottleneck, finish) = self.estimate(&sorted, &ready, i);
                let mut pruned: Vec<u64> = sorted[i].requests.iter().map(|r| r.id).collect();
                pruned.retain(|id| self.pruned.contains(id));
                pruned.sort_unstable();
                Verdict { batch: sigma[i].1, finish, bottleneck, limit: sigma[i].2, pruned }
            })
            .collect()
    }

    /// Returns the bottleneck and `F̂_i` of batch `i` for the present `H`.
    fn estimate(&self, sorted: &[Batch], ready: &[u64], i: usize) -> (Option<usize>, u64) {
        let mut before = [0; PORTS];
        for batch in &sorted[..i] {
            for (sum, bytes) in before.iter_mut().zip(self.dense_load(batch)) {
                *sum += bytes;
            }
        }
        let (u, ns) = self.bottleneck(&before, &self.dense_load(&sorted[i]));
        (u, ready[i].saturating_add(ns))
    }
}
