//! Order and pruning between batches: MFS §4.4.2, Algorithm 1 (Appendix B), architecture §4.4.
//!
//! The coordinator drives it with the daemons' reports. A daemon without a coordinator drives it
//! with its own events, and the simulator drives it too. It keeps the active batches with their
//! deadlines and loads, orders them by ascending RED ([`red`](crate::red)), runs Algorithm 1 over
//! that order ([`prune`](crate::prune)) and issues an [`Order`] whenever the outcome changes.
//!
//! * *Trigger.* A batch arrives or departs, as in the paper. A request that joins and a repeated
//!   announcement of a batch also trigger, since hints deliver an arrival in pieces. Starts, ends,
//!   progress and rates only enter the next run: "we deliberately avoid fine-grained per-layer
//!   updates".
//! * *Debounce.* A run happens [`AdmissionConfig::debounce`] after the first trigger since the last
//!   run, regardless of the number of triggers.
//! * *Ties.* Of equal RED the smaller [`BatchId`] is first, so that the order of triggers does not
//!   affect the outcome.
//! * *Computing.* `compute_i` is the announced time less the time since the batch started. Up to
//!   [`QUEUE_MAX`] batches that it is queued behind ([`AdmissionEvent::BatchQueued`]) add theirs.
//!   That event is part of an arrival, so it triggers.
//! * *Trust.* Events come from other processes. Unknown ids are ignored and counted, and loads are
//!   clamped. At a cap the oldest batch is removed. A request is a member of one batch, the last
//!   that named it (chunked prefill moves requests to other batches).

mod config;
mod event;
mod outcome;
mod pace;
mod started;
mod unit_queue;

use std::collections::BTreeMap;

pub use config::AdmissionConfig;
pub use event::{
    AdmissionAction, AdmissionCounters, AdmissionEvent, Decision, PruneCause, RequestLoad,
};

use laxity_types::{BatchId, RequestId};

use crate::config::{BATCH_MEMBERS_MAX, InvalidConfig};
use crate::event::Order;
use crate::prune::{
    BatchSlot, Doomed, Member, MemberSlot, PACE_UNIT, PruneLimits, Pruner, TrafficTable, Turn,
};
use crate::red::Red;
use crate::time::{Span, Time};

/// Maximum number of batches ahead that count for a queued batch.
pub const QUEUE_MAX: usize = 32;

/// Rank of a batch that the last run did not see.
const UNRANKED: u32 = u32::MAX;

#[derive(Debug)]
struct AdmissionBatch {
    id: BatchId,
    arrival: u64,
    compute: Span,
    started: Option<Time>,
    /// Requests that joined after the batch had started. They count as started from the next hint
    /// that says so.
    joined_late: Vec<RequestId>,
    /// The batch directly before it on its unit: the slot, and the arrival number because slots are
    /// reused.
    ahead: Option<(BatchSlot, u64)>,
    red: Red,
    /// Whether members changed since `red` was computed.
    red_stale: bool,
    /// The tenant that the batch belongs to, see [`AdmissionEvent::BatchTenant`].
    tenant: u16,
    /// First estimate of when the batch has computed, and for how long it communicates.
    forecast: Option<(Time, Span)>,
}

impl AdmissionBatch {
    const fn new(id: BatchId, arrival: u64) -> Self {
        Self {
            id,
            arrival,
            compute: Span::ZERO,
            started: None,
            joined_late: Vec::new(),
            ahead: None,
            red: Red::NONE,
            red_stale: true,
            tenant: 0,
            forecast: None,
        }
    }
}

/// The state machine that orders and prunes batches. Call [`handle`](Admission::handle) for each
/// event. Then call [`poll_action`](Admission::poll_action) until it returns `None`, and again at
/// [`next_deadline`](Admission::next_deadline).
#[derive(Debug)]
pub struct Admission {
    config: AdmissionConfig,
    traffic: TrafficTable,
    pruner: Pruner,
    /// Active batches by slot of the traffic table.
    batches: Vec<Option<AdmissionBatch>>,
    /// Rank in the last run by slot, [`UNRANKED`] for a batch that the run did not see.
    ranks: Vec<u32>,
    /// Batches whose RED the last run computed anew.
    rescored: Vec<BatchSlot>,
    /// Batches that may have no forecast yet.
    unforecast: Vec<BatchSlot>,
    batch_slots: BTreeMap<BatchId, BatchSlot>,
    /// Active batches by arrival, the oldest first.
    arrivals: BTreeMap<u64, BatchSlot>,
    arrivals_seen: u64,
    requests: BTreeMap<RequestId, MemberSlot>,
    /// `H`: the pruned requests, each with its cause and the budget that it counts against.
    pruned: BTreeMap<RequestId, (PruneCause, u16)>,
    /// Correction of estimates, see [`PruneLimits::pace`].
    pace: u32,
    /// When the next run is due, if an event triggered one.
    due: Option<Time>,
    decided_at: Time,
    turns: Vec<Turn>,
    /// The turns of all slots, including empty ones, while a run sorts them.
    turns_by_slot: Vec<Turn>,
    order: Order,
    counters: AdmissionCounters,
}

impl Admission {
    /// Creates the state without batches.
    ///
    /// # Errors
    /// Returns the first field of `config` that is out of range.
    pub fn new(config: AdmissionConfig) -> Result<Self, InvalidConfig> {
        config.validate()?;
        Ok(Self {
            traffic: TrafficTable::new(config.default_rate, config.ports_max),
            config,
            pruner: Pruner::default(),
            batches: Vec::new(),
            ranks: Vec::new(),
            rescored: Vec::new(),
            unforecast: Vec::new(),
            batch_slots: BTreeMap::new(),
            arrivals: BTreeMap::new(),
            arrivals_seen: 0,
            requests: BTreeMap::new(),
            pruned: BTreeMap::new(),
            pace: PACE_UNIT,
            due: None,
            decided_at: Time::ZERO,
            turns: Vec::new(),
            turns_by_slot: Vec::new(),
            order: Order::default(),
            counters: AdmissionCounters::default(),
        })
    }

    /// Changes the configuration and triggers a run. Requests that were pruned under a larger
    /// budget stay pruned.
    ///
    /// # Errors
    /// Returns the first field that is out of range. The old configuration then stays.
    pub fn set_config(&mut self, now: Time, config: AdmissionConfig) -> Result<(), InvalidConfig> {
        config.validate()?;
        if config.correction_permille == 0 {
            self.pace = PACE_UNIT;
        }
        self.traffic.configure(config.default_rate, config.ports_max);
        self.config = config;
        self.unforecast.clear();
        for (slot, batch) in self.batches.iter_mut().enumerate() {
            if let Some(batch) = batch {
                batch.red_stale = true;
                self.unforecast.push(slot as BatchSlot);
            }
        }
        self.make_room(0, 0, None);
        self.trigger(now);
        Ok(())
    }

    /// Records an event. [`Admission::poll_action`] does the work.
    pub fn handle(&mut self, now: Time, event: AdmissionEvent) {
        let known = match event {
            AdmissionEvent::BatchArrived { batch, requests, compute } => {
                self.batch_arrived(now, batch, &requests, compute)
            }
            AdmissionEvent::RequestJoined { batch, load } => self.request_joined(now, batch, &load),
            AdmissionEvent::RequestStarted { request } => {
                self.with_request(request, |this, slot| this.traffic.started(slot))
            }
            AdmissionEvent::RequestEnded { request } => self.with_request(request, |this, slot| {
                this.pruned.remove(&request);
                this.leave(request, slot);
            }),
            AdmissionEvent::BytesCompleted { request, port, bytes } => {
                self.with_request(request, |this, slot| this.traffic.moved(slot, port, bytes))
            }
            AdmissionEvent::BatchStarted { batch } => self.batch_started(now, batch),
            AdmissionEvent::BatchQueued { batch, ahead } => self.batch_queued(now, batch, ahead),
            AdmissionEvent::BatchTenant { batch, tenant } => {
                let slot = self.batch_slots.get(&batch).copied();
                slot.map(|slot| self.batch_mut(slot).tenant = tenant).is_some()
            }
            AdmissionEvent::BatchDeparted { batch } => self.batch_departed(now, batch),
            AdmissionEvent::PortRate { port, bytes_per_second } => {
                let known = self.traffic.set_rate(port, bytes_per_second);
                self.counters.loads_refused += u64::from(!known);
                true
            }
        };
        self.counters.events_ignored += u64::from(!known);
    }

    /// Runs Algorithm 1 if a run is due, and returns the new order if it changed.
    pub fn poll_action(&mut self, now: Time) -> Option<AdmissionAction> {
        if self.due.is_none_or(|due| due > now) {
            return None;
        }
        self.due = None;
        self.run(now).then(|| AdmissionAction::OrderChanged(self.order.clone()))
    }

    /// Returns when to call [`Admission::poll_action`] if no event comes before.
    pub const fn next_deadline(&self) -> Option<Time> {
        self.due
    }

    /// Returns the last order that was issued, or one of epoch zero.
    pub const fn order(&self) -> &Order {
        &self.order
    }

    /// Returns the counts since the start.
    pub const fn counters(&self) -> &AdmissionCounters {
        &self.counters
    }

    /// Returns the number of active batches.
    pub fn active_batches(&self) -> usize {
        self.batch_slots.len()
    }

    fn trigger(&mut self, now: Time) {
        self.due = self.due.or(Some(now + self.config.debounce));
    }

    fn batch_arrived(
        &mut self,
        now: Time,
        id: BatchId,
        requests: &[RequestLoad],
        compute: Span,
    ) -> bool {
        if id == BatchId::default() {
            return false;
        }
        let slot = match self.batch_slots.get(&id) {
            Some(&slot) => slot,
            None => self.open(id),
        };
        self.batch_mut(slot).compute = compute;
        for load in requests {
            self.join(slot, load);
        }
        self.trigger(now);
        true
    }

    fn request_joined(&mut self, now: Time, batch: BatchId, load: &RequestLoad) -> bool {
        let Some(&slot) = self.batch_slots.get(&batch) else { return false };
        self.join(slot, load);
        self.trigger(now);
        true
    }

    fn batch_departed(&mut self, now: Time, batch: BatchId) -> bool {
        let Some(&slot) = self.batch_slots.get(&batch) else { return false };
        self.observe_pace(now, slot);
        self.close(slot);
        self.trigger(now);
        true
    }

    fn with_request(
        &mut self,
        request: RequestId,
        act: impl FnOnce(&mut Self, MemberSlot),
    ) -> bool {
        let Some(&slot) = self.requests.get(&request) else { return false };
        act(self, slot);
        true
    }

    fn batch_mut(&mut self, slot: BatchSlot) -> &mut AdmissionBatch {
        self.batches[slot as usize].as_mut().expect("slots in the maps are of active batches")
    }

    fn open(&mut self, id: BatchId) -> BatchSlot {
        while self.batch_slots.len() >= self.config.batches_max && self.forget_oldest(None) {}
        let slot = self.traffic.open_batch();
        self.arrivals_seen += 1;
        let batch = AdmissionBatch::new(id, self.arrivals_seen);
        if self.batches.len() <= slot as usize {
            self.batches.resize_with(slot as usize + 1, || None);
            self.ranks.resize(slot as usize + 1, UNRANKED);
        }
        self.ranks[slot as usize] = UNRANKED;
        self.unforecast.push(slot);
        self.arrivals.insert(batch.arrival, slot);
        self.batches[slot as usize] = Some(batch);
        self.batch_slots.insert(id, slot);
        slot
    }

    fn close(&mut self, slot: BatchSlot) {
        let Some(batch) = self.batches[slot as usize].take() else { return };
        self.batch_slots.remove(&batch.id);
        self.arrivals.remove(&batch.arrival);
        for &member in self.traffic.members_of(slot) {
            let request = self.traffic.member(member).request;
            self.requests.remove(&request);
            self.pruned.remove(&request);
        }
        self.traffic.close_batch(slot);
    }

    /// Makes `load` a member of the batch and discards earlier data about the request.
    fn join(&mut self, batch: BatchSlot, load: &RequestLoad) {
        if load.request == RequestId::default() {
            self.counters.events_ignored += 1;
            return;
        }
        if let Some(&known) = self.requests.get(&load.request) {
            self.leave(load.request, known);
        }
        let is_full = self.traffic.members_of(batch).len() >= BATCH_MEMBERS_MAX;
        if is_full || !self.make_room(1, load.ports.len(), Some(batch)) {
            self.pruned.remove(&load.request);
            self.counters.loads_refused += 1;
            return;
        }
        let member = Member {
            request: load.request,
            deadline: load.deadline,
            started: load.started,
            pruned: self.pruned.contains_key(&load.request),
        };
        let (slot, refused) = self.traffic.join(batch, member, &load.ports);
        self.counters.loads_refused += refused as u64;
        self.requests.insert(load.request, slot);
        self.batch_mut(batch).red_stale = true;
        if !load.started {
            self.joined_unstarted(batch, load.request);
        }
    }

    fn leave(&mut self, request: RequestId, slot: MemberSlot) {
        let batch = self.traffic.batch_of(slot);
        self.traffic.leave(slot);
        self.requests.remove(&request);
        self.batch_mut(batch).red_stale = true;
    }

    /// Removes old batches, but not `keep`, until this many more fit. Returns false if that is
    /// impossible.
    fn make_room(&mut self, requests: usize, loads: usize, keep: Option<BatchSlot>) -> bool {
        while self.batch_slots.len() > self.config.batches_max
            || self.requests.len() + requests > self.config.requests_max
            || self.traffic.load_count() + loads > self.config.loads_max
        {
            if loads > self.config.loads_max || !self.forget_oldest(keep) {
                return false;
            }
        }
        true
    }

    fn forget_oldest(&mut self, keep: Option<BatchSlot>) -> bool {
        let Some(&slot) = self.arrivals.values().find(|&&slot| Some(slot) != keep) else {
            return false;
        };
        self.close(slot);
        self.counters.batches_forgotten += 1;
        true
    }

    /// Runs Algorithm 1. Returns whether the order changed.
    fn run(&mut self, now: Time) -> bool {
        self.counters.runs += 1;
        self.decided_at = now;
        let sigma = self.sort_by_red(now);
        for (rank, &(_, _, slot)) in sigma.iter().enumerate() {
            self.ranks[slot as usize] = rank as u32;
        }
        let drops = self.config.drops_left(self.pruned.values().map(|&(_, budget)| budget));
        let limits = PruneLimits { drops: &drops, doomed: self.config.doomed, pace: self.pace };
        self.pruner.run(&mut self.traffic, &self.turns, &limits);
        for pruning in self.pruner.pruned() {
            let (batch, port) = (sigma[pruning.turn].1, pruning.port);
            let cause = PruneCause { batch, port };
            let budget = self.turns[pruning.turn].budget;
            self.pruned.insert(pruning.request, (cause, budget));
            let loser = self.traffic.batch_of(pruning.member) as usize;
            if let Some(batch) = self.batches[loser].as_mut() {
                batch.red_stale = true;
            }
        }
        self.counters.pruned += self.pruner.pruned().len() as u64;
        self.note_forecasts();

        let ids = || sigma.iter().map(|(_, id, _)| id);
        if self.order.sigma.iter().eq(ids()) && self.order.pruned.iter().eq(self.pruned.keys()) {
            return false;
        }
        self.order.epoch += 1;
        self.order.sigma.clear();
        self.order.sigma.extend(ids());
        self.order.pruned.clear();
        self.order.pruned.extend(self.pruned.keys());
        self.counters.orders += 1;
        true
    }

    /// Step 1: returns the active batches by ascending RED, and fills `turns` in that order.
    ///
    /// One pass over the slots reads all values of the turns in memory order. The sorted loop
    /// afterwards accesses only a small array at random.
    fn sort_by_red(&mut self, now: Time) -> Vec<(Time, BatchId, BatchSlot)> {
        let set_aside = self.config.doomed == Doomed::SetAside;
        let mut deadlines = Vec::new();
        let mut sigma = Vec::with_capacity(self.batch_slots.len());
        self.rescored.clear();
        let mut by_slot = core::mem::take(&mut self.turns_by_slot);
        by_slot.clear();
        for slot in 0..self.batches.len() as BatchSlot {
            let mut turn = Turn { batch: slot, ..Turn::default() };
            if let Some(batch) = &mut self.batches[slot as usize] {
                if batch.red_stale {
                    let members = self.traffic.members_of(slot).iter();
                    let members = members.map(|&member| self.traffic.member(member));
                    deadlines.clear();
                    deadlines.extend(
                        members.filter(|m| !(set_aside && m.pruned)).map(|member| member.deadline),
                    );
                    deadlines.sort_unstable();
                    batch.red = Red::of_sorted(&deadlines);
                    batch.red_stale = false;
                    self.rescored.push(slot);
                }
                sigma.push((batch.red.score, batch.id, slot));
                (turn.limit, turn.first_due) = (batch.red.loose, batch.red.tight);
                turn.budget = self.config.budget_of(batch.tenant);
                turn.ready = now + self.compute_left(now, slot);
                for before in self.ahead_of(slot) {
                    turn.ready = turn.ready + self.compute_left(now, before);
                }
            }
            by_slot.push(turn);
        }
        sigma.sort_unstable();
        self.turns.clear();
        let turn = |&(_, _, slot): &(Time, BatchId, BatchSlot)| by_slot[slot as usize];
        self.turns.extend(sigma.iter().map(turn));
        self.turns_by_slot = by_slot;
        sigma
    }
}
