//! The batches and requests that a port knows of: from hints, and from the flows themselves.
//!
//! Hints come from other processes, so what they can make the port remember is bounded:
//! [`BATCHES_MAX`] batches and [`REQUESTS_MAX`] requests, and [`FOLLOWERS_MAX`] batches queued
//! directly behind one. Beyond, an old one that nothing waits for is forgotten; if there is none
//! among the oldest ([`Named::oldest_idle`]), it is the newcomer that stays unknown, and its flows wait as
//! those do that name no batch or request. What is named by a flow alone is known only while that
//! flow waits.

use std::collections::{BTreeMap, BTreeSet};

use laxity_types::{BatchId, Layer, RequestId};

use super::flows::{NONE, Slot};
use super::named::Named;
use crate::event::BatchSpec;
use crate::rli;
use crate::time::{Span, Time};

/// Most batches that are remembered.
pub const BATCHES_MAX: usize = 65_536;
/// Most requests that are remembered.
pub const REQUESTS_MAX: usize = 262_144;
/// Most batches that may be queued directly behind one; a hint beyond is ignored.
pub const FOLLOWERS_MAX: usize = 64;
/// How far back a queue of batches is followed.
const CHAIN_MAX: usize = 16;
/// Most batches that one layer boundary updates.
const AFFECTED_MAX: usize = 1024;

/// Layer times without a boundary after which promotion becomes periodic.
const PATIENCE_LAYERS: u64 = 16;
/// Promotion periods without a boundary after which it does, if the layer time is shorter.
const PATIENCE_PERIODS: u64 = 64;

/// The batch of flows that name none.
pub(crate) const NULL_BATCH: Slot = 0;

#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) id: BatchId,
    /// Hints have told of it, so it stays known when nothing waits.
    announced: bool,
    layers: u16,
    pub(crate) layer_time: Span,
    layer: Layer,
    /// Its first layer has begun.
    pub(crate) started: bool,
    /// Its last layer has been computed.
    pub(crate) finished: bool,
    /// See [`rli::progress`].
    pub(crate) progress: i64,
    /// Expected time until it has computed its last layer, those ahead of it included.
    pub(crate) compute_left: Span,
    /// Position in `σ`, `u32::MAX` if it is in none.
    pub(crate) sigma: u32,
    ahead: Slot,
    followers: Vec<Slot>,
    /// Its requests by deadline.
    pub(crate) members: BTreeSet<(Time, RequestId)>,
    /// Deadlines of its waiting flows for which no member speaks, by arrival.
    pub(crate) flow_deadlines: BTreeSet<(Time, u64)>,
    /// Its flows that wait.
    pub(crate) waiting: u32,
    /// Those of them whose level follows its progress.
    pub(crate) climbing: u32,
    /// Its groups in the queue.
    pub(crate) groups: Vec<Slot>,
    /// Its waiting flows that are to be looked at: when, arrival, which.
    pub(crate) checks: BTreeSet<(Time, u64, Slot)>,
    /// When the first of them is due, as registered with the port.
    pub(crate) due: Time,
    /// When its current layer began.
    pub(crate) boundary: Time,
}

impl Batch {
    fn new(id: BatchId, sigma: u32) -> Self {
        Self {
            id,
            announced: false,
            layers: 0,
            layer_time: Span::ZERO,
            layer: Layer(0),
            started: false,
            finished: false,
            progress: 0,
            compute_left: Span::ZERO,
            sigma,
            ahead: NONE,
            followers: Vec::new(),
            members: BTreeSet::new(),
            flow_deadlines: BTreeSet::new(),
            waiting: 0,
            climbing: 0,
            groups: Vec::new(),
            checks: BTreeSet::new(),
            due: Time::NEVER,
            boundary: Time::ZERO,
        }
    }

    /// Layers that are not computed yet, the current one included.
    pub(crate) fn layers_left(&self) -> u64 {
        if self.finished {
            0
        } else {
            u64::from(self.layers.saturating_sub(self.layer.0))
        }
    }

    /// `RLI` of a flow for `layer`.
    pub(crate) fn rli(&self, layer: Layer) -> u32 {
        rli::rli(layer, self.progress)
    }

    /// Whether hints tell of its progress.
    pub(crate) const fn is_announced(&self) -> bool {
        self.announced
    }

    /// Whether its computation may have begun: nothing is known of one that no hint announced.
    pub(crate) fn may_run(&self) -> bool {
        self.started || !self.announced
    }

    /// From when on its flows are promoted by time: at once, unless it computes and its
    /// boundaries are to be waited for; even then not for ever.
    pub(crate) fn periodic_from(&self, period: Span) -> Time {
        if !self.started || self.finished {
            return Time::ZERO;
        }
        let by_layers = self.layer_time.times(PATIENCE_LAYERS);
        self.boundary + by_layers.max(period.times(PATIENCE_PERIODS))
    }

    /// Whether a member or a waiting flow has a deadline.
    pub(crate) fn has_deadlines(&self) -> bool {
        !self.members.is_empty() || !self.flow_deadlines.is_empty()
    }

    /// The tightest deadline that can still be met, if the rest of the computation goes as
    /// expected; `None` if none can.
    pub(crate) fn tightest_viable(&self, now: Time) -> Option<Time> {
        let earliest = now + self.compute_left;
        let members = self.members.range((earliest, RequestId(0))..).next();
        let flows = self.flow_deadlines.range((earliest, 0)..).next();
        let members = members.map(|&(deadline, _)| deadline);
        members
            .into_iter()
            .chain(flows.map(|&(deadline, _)| deadline))
            .min()
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) id: RequestId,
    /// The batch of which it is a member, [`NONE`] if of none.
    pub(crate) batch: Slot,
    pub(crate) deadline: Time,
    /// A hint told of it, so it stays known when nothing waits.
    pub(crate) joined: bool,
    /// Its deadline cannot be met on this port.
    pub(crate) lost: bool,
    /// First of its waiting flows, [`NONE`] if none waits.
    pub(crate) first: Slot,
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct BatchTable {
    batches: Named<BatchId, Batch>,
    requests: Named<RequestId, Request>,
    sigma: BTreeMap<BatchId, u32>,
}

impl BatchTable {
    pub(crate) fn new() -> Self {
        Self {
            batches: Named::new(BATCHES_MAX, Some(Batch::new(BatchId(0), u32::MAX))),
            requests: Named::new(REQUESTS_MAX, None),
            sigma: BTreeMap::new(),
        }
    }

    pub(crate) fn batch(&self, slot: Slot) -> &Batch {
        self.batches.get(slot)
    }

    pub(crate) fn batch_mut(&mut self, slot: Slot) -> &mut Batch {
        self.batches.get_mut(slot)
    }

    pub(crate) fn request(&self, slot: Slot) -> &Request {
        self.requests.get(slot)
    }

    pub(crate) fn request_mut(&mut self, slot: Slot) -> &mut Request {
        self.requests.get_mut(slot)
    }

    pub(crate) fn batches_known(&self) -> usize {
        self.batches.len()
    }

    pub(crate) fn requests_known(&self) -> usize {
        self.requests.len()
    }

    /// The batch of that name, [`NULL_BATCH`] for none.
    pub(crate) fn find_batch(&self, id: BatchId) -> Option<Slot> {
        if id == BatchId(0) {
            Some(NULL_BATCH)
        } else {
            self.batches.find(id)
        }
    }

    /// The request of that name.
    pub(crate) fn find_request(&self, id: RequestId) -> Option<Slot> {
        self.requests.find(id)
    }

    /// The batch of that name, made if it is new; [`NULL_BATCH`] if there is no room for it.
    pub(crate) fn enter_batch(&mut self, id: BatchId) -> Slot {
        if let Some(slot) = self.find_batch(id) {
            return slot;
        }
        if self.batches.is_full() {
            match self.batches.oldest_idle(|batch| batch.waiting == 0) {
                Some(old) => self.drop_batch(old),
                None => return NULL_BATCH,
            }
        }
        let sigma = self.sigma.get(&id).copied().unwrap_or(u32::MAX);
        self.batches.insert(id, Batch::new(id, sigma))
    }

    /// The request of that name, made if it is new; [`NONE`] if there is no room for it.
    pub(crate) fn enter_request(&mut self, id: RequestId) -> Slot {
        if let Some(slot) = self.find_request(id) {
            return slot;
        }
        if self.requests.is_full() {
            match self.requests.oldest_idle(|known| known.first == NONE) {
                Some(old) => {
                    self.leave(old);
                    self.drop_request(old);
                }
                None => return NONE,
            }
        }
        let request = Request {
            id,
            batch: NONE,
            deadline: Time::NEVER,
            joined: false,
            lost: false,
            first: NONE,
        };
        self.requests.insert(id, request)
    }

    /// A hint announced the batch. [`NULL_BATCH`] if there is no room for it.
    pub(crate) fn announce(&mut self, spec: &BatchSpec) -> Slot {
        let slot = self.enter_batch(spec.batch);
        if slot == NULL_BATCH {
            return slot;
        }
        let batch = self.batch_mut(slot);
        batch.announced = true;
        batch.layers = spec.layers;
        batch.layer_time = spec.layer_time;
        slot
    }

    /// Makes `request` a member of `batch` with `deadline`; `hinted` if a hint said so.
    pub(crate) fn join(&mut self, batch: Slot, request: Slot, deadline: Time, hinted: bool) {
        self.leave(request);
        let known = self.request_mut(request);
        known.joined |= hinted;
        if known.deadline != deadline {
            known.lost = false;
        }
        known.deadline = deadline;
        if batch == NULL_BATCH {
            return;
        }
        known.batch = batch;
        let id = known.id;
        if deadline != Time::NEVER {
            self.batch_mut(batch).members.insert((deadline, id));
        }
    }

    /// Whether `request` is a member of `batch` whose deadline is no later than `deadline`.
    pub(crate) fn speaks_for(&self, request: Slot, batch: Slot, deadline: Time) -> bool {
        request != NONE && {
            let known = self.request(request);
            known.batch == batch && known.deadline <= deadline
        }
    }

    /// The request is no member of its batch any more.
    pub(crate) fn leave(&mut self, request: Slot) {
        let known = self.request_mut(request);
        let (batch, member) = (known.batch, (known.deadline, known.id));
        known.batch = NONE;
        if batch != NONE {
            self.batch_mut(batch).members.remove(&member);
        }
    }

    /// The request has ended: it is forgotten once nothing of it waits. Returns its batch.
    pub(crate) fn end_request(&mut self, request: Slot) -> Slot {
        let batch = self.request(request).batch;
        self.leave(request);
        self.request_mut(request).joined = false;
        self.tidy_request(request);
        batch
    }

    /// Forgets a request that nothing refers to.
    pub(crate) fn tidy_request(&mut self, request: Slot) {
        let known = self.request(request);
        if !known.joined && known.first == NONE {
            self.leave(request);
            self.drop_request(request);
        }
    }

    fn drop_request(&mut self, request: Slot) {
        let id = self.request(request).id;
        self.requests.remove(id, request);
    }

    /// Nothing of the batch is left to compute; it is forgotten once nothing of it waits.
    /// Returns the batches behind it, whose turn has come.
    pub(crate) fn end_batch(&mut self, slot: Slot) -> Vec<Slot> {
        let batch = self.batch_mut(slot);
        batch.announced = false;
        batch.finished = true;
        let followers = core::mem::take(&mut batch.followers);
        for &follower in &followers {
            self.batch_mut(follower).ahead = NONE;
        }
        self.tidy_batch(slot);
        followers
    }

    /// Forgets a batch that nothing refers to.
    pub(crate) fn tidy_batch(&mut self, slot: Slot) {
        let batch = self.batch(slot);
        if slot != NULL_BATCH && !batch.announced && batch.waiting == 0 {
            self.drop_batch(slot);
        }
    }

    fn drop_batch(&mut self, slot: Slot) {
        self.detach(slot);
        let batch = self.batch_mut(slot);
        let id = batch.id;
        let members = core::mem::take(&mut batch.members);
        for follower in core::mem::take(&mut batch.followers) {
            self.batch_mut(follower).ahead = NONE;
        }
        for (_, member) in members {
            if let Some(request) = self.find_request(member) {
                let known = self.request_mut(request);
                known.batch = NONE;
                known.joined = false;
                self.tidy_request(request);
            }
        }
        self.batches.remove(id, slot);
    }

    /// Puts `batch` behind `ahead`; false if that cannot be (itself, a full queue, already runs).
    pub(crate) fn follow(&mut self, batch: Slot, ahead: Slot) -> bool {
        let runs = self.batch(batch).started;
        if batch == ahead || batch == NULL_BATCH || ahead == NULL_BATCH || runs {
            return false;
        }
        if self.batch(ahead).finished || self.batch(ahead).followers.len() >= FOLLOWERS_MAX {
            return false;
        }
        let mut before = ahead;
        for _ in 0..CHAIN_MAX {
            if before == batch {
                return false;
            }
            if before != NONE {
                before = self.batch(before).ahead;
            }
        }
        self.detach(batch);
        self.batch_mut(batch).ahead = ahead;
        self.batch_mut(ahead).followers.push(batch);
        true
    }

    /// Takes `batch` out of the queue in which it waits.
    fn detach(&mut self, batch: Slot) {
        let ahead = core::mem::replace(&mut self.batch_mut(batch).ahead, NONE);
        if ahead != NONE {
            self.batch_mut(ahead)
                .followers
                .retain(|&follower| follower != batch);
        }
    }

    /// Layer `layer` of the batch has begun. False if it had begun before.
    pub(crate) fn advance(&mut self, slot: Slot, layer: Layer, now: Time) -> bool {
        let batch = self.batch_mut(slot);
        if slot == NULL_BATCH || (batch.started && layer <= batch.layer) {
            return false;
        }
        batch.started = true;
        batch.layer = layer;
        batch.boundary = now;
        self.detach(slot);
        true
    }

    /// Brings progress and computation left up to date, for `slot` and those queued behind it.
    /// Returns each with the progress that it had. With flows whose levels follow it, progress
    /// never falls (architecture §4.3: promotion is monotonic).
    pub(crate) fn refresh(&mut self, slot: Slot) -> Vec<(Slot, i64)> {
        let mut affected = vec![slot];
        let mut changed = Vec::new();
        let mut next = 0;
        while next < affected.len() {
            let slot = affected[next];
            next += 1;
            let (layers_ahead, time_ahead) = self.ahead_of(slot);
            let batch = self.batch_mut(slot);
            let was = batch.progress;
            let is = rli::progress(batch.layer, layers_ahead);
            batch.progress = if batch.climbing > 0 { was.max(is) } else { is };
            batch.compute_left = batch.layer_time.times(batch.layers_left()) + time_ahead;
            changed.push((slot, was));
            let room = AFFECTED_MAX.saturating_sub(affected.len());
            affected.extend(self.batch(slot).followers.iter().take(room));
        }
        changed
    }

    fn ahead_of(&self, slot: Slot) -> (u64, Span) {
        let (mut layers, mut time) = (0, Span::ZERO);
        let mut ahead = self.batch(slot).ahead;
        for _ in 0..CHAIN_MAX {
            if ahead == NONE {
                break;
            }
            let batch = self.batch(ahead);
            layers += batch.layers_left();
            time = time + batch.layer_time.times(batch.layers_left());
            ahead = batch.ahead;
        }
        (layers, time)
    }

    /// Takes over `σ`. Returns the known batches whose position changed.
    pub(crate) fn set_sigma(&mut self, sigma: &[BatchId]) -> Vec<Slot> {
        let old = core::mem::take(&mut self.sigma);
        for (&id, position) in sigma.iter().zip(0..u32::MAX) {
            self.sigma.entry(id).or_insert(position);
        }
        let mut moved = Vec::new();
        for &id in old.keys().chain(self.sigma.keys()) {
            let Some(slot) = self.batches.find(id) else {
                continue;
            };
            let position = self.sigma.get(&id).copied().unwrap_or(u32::MAX);
            let batch = self.batches.get_mut(slot);
            if batch.sigma != position {
                batch.sigma = position;
                moved.push(slot);
            }
        }
        moved
    }
}

#[cfg(test)]
mod tests;
