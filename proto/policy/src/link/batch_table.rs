//! The batches and requests of a port, from hints and from the flows themselves.
//!
//! Hints come from other processes, so the state that they can create is bounded: [`BATCHES_MAX`]
//! batches, [`REQUESTS_MAX`] requests (or fewer, by the configuration), and [`FOLLOWERS_MAX`]
//! batches queued directly behind one. At a bound, an old entry without waiting flows is removed.
//! If the oldest entries all have waiting flows ([`IdTable::oldest_idle`]), the new one stays
//! unknown, and its flows wait like flows without a batch or request. An entry that only a flow
//! names exists only while that flow waits.

use std::collections::{BTreeMap, BTreeSet};

use laxity_types::{BatchId, Layer, RequestId};

use super::flows::{NONE, SlotId};
use super::named::IdTable;
use crate::config::{BATCH_MEMBERS_MAX, BATCHES_MAX, REQUESTS_MAX};
use crate::event::BatchSpec;
use crate::rli;
use crate::time::{Span, Time};

/// Maximum number of batches queued directly behind one. Further hints are ignored.
pub const FOLLOWERS_MAX: usize = 64;
/// Maximum number of batches ahead that count for a queued batch.
const CHAIN_MAX: usize = 16;
/// Maximum number of batches that one layer boundary updates.
const AFFECTED_MAX: usize = 1024;

/// Layer times without a boundary after which promotion becomes periodic.
const PATIENCE_LAYERS: u64 = 16;
/// Promotion periods with the same effect, if they are longer than [`PATIENCE_LAYERS`].
const PATIENCE_PERIODS: u64 = 64;

/// Slot of the batch that stands for all flows without a known batch.
pub(crate) const NULL_BATCH: SlotId = 0;

#[derive(Clone, Debug, Default)]
pub(crate) struct Batch {
    pub(crate) id: BatchId,
    /// Whether a hint announced the batch, so that it stays in the table without waiting flows.
    announced: bool,
    layers: u16,
    pub(crate) layer_time: Span,
    layer: Layer,
    /// Whether the batch's first layer has begun.
    pub(crate) started: bool,
    /// Whether the batch's last layer has been computed.
    pub(crate) finished: bool,
    /// The progress that RLI counts from, see [`rli::progress`].
    pub(crate) progress: i64,
    /// Expected time until the batch has computed, including the batches ahead of it.
    pub(crate) compute_left: Span,
    /// Position in `σ`, `u32::MAX` if the batch is not in `σ`.
    pub(crate) sigma: u32,
    ahead: SlotId,
    followers: Vec<SlotId>,
    /// The batch's requests that have a deadline, by deadline.
    pub(crate) members: BTreeSet<(Time, RequestId)>,
    /// Deadlines of waiting flows that no member has, with the flow's arrival number.
    pub(crate) flow_deadlines: BTreeSet<(Time, u64)>,
    /// Number of the batch's waiting flows.
    pub(crate) waiting: u32,
    /// Number of the batch's waiting flows whose level follows its progress.
    pub(crate) promotable: u32,
    /// The batch's groups in the queue.
    pub(crate) groups: Vec<SlotId>,
    /// The next checks of the batch's waiting flows: time, arrival number, slot.
    pub(crate) checks: BTreeSet<(Time, u64, SlotId)>,
    /// When the batch's first check is due, as registered with the port.
    pub(crate) due: Time,
    /// When the batch's current layer began.
    pub(crate) boundary: Time,
}

impl Batch {
    fn new(id: BatchId, sigma: u32) -> Self {
        Self { id, sigma, ahead: NONE, due: Time::NEVER, ..Self::default() }
    }

    /// Returns the number of layers that are not computed yet, including the current one.
    pub(crate) fn layers_left(&self) -> u64 {
        if self.finished { 0 } else { u64::from(self.layers.saturating_sub(self.layer.0)) }
    }

    /// Returns the `RLI` of a flow for `layer`.
    pub(crate) fn rli(&self, layer: Layer) -> u32 {
        rli::rli(layer, self.progress)
    }

    /// Reports whether a hint announced the batch.
    pub(crate) const fn is_announced(&self) -> bool {
        self.announced
    }

    /// Reports whether the batch may have started. Without hints its state is unknown, so it may.
    pub(crate) fn may_run(&self) -> bool {
        self.started || !self.announced
    }

    /// Returns when promotion of the batch's flows becomes periodic. This is at once unless the
    /// batch computes. In that case it is a bounded time after the last layer boundary.
    pub(crate) fn periodic_from(&self, period: Span) -> Time {
        if !self.started || self.finished {
            return Time::ZERO;
        }
        let by_layers = self.layer_time.times(PATIENCE_LAYERS);
        self.boundary + by_layers.max(period.times(PATIENCE_PERIODS))
    }

    /// Reports whether a member or a waiting flow has a deadline.
    pub(crate) fn has_deadlines(&self) -> bool {
        !self.members.is_empty() || !self.flow_deadlines.is_empty()
    }

    /// Returns the earliest deadline that can still be met, if the rest of the computation takes
    /// the expected time, or `None` if there is none.
    pub(crate) fn tightest_viable(&self, now: Time) -> Option<Time> {
        let earliest = now + self.compute_left;
        let members = self.members.range((earliest, RequestId(0))..).next();
        let flows = self.flow_deadlines.range((earliest, 0)..).next();
        let members = members.map(|&(deadline, _)| deadline);
        members.into_iter().chain(flows.map(|&(deadline, _)| deadline)).min()
    }
}

#[derive(Clone, Debug)]
pub(crate) struct RequestState {
    pub(crate) id: RequestId,
    /// The batch of which the request is a member, or [`NONE`].
    pub(crate) batch: SlotId,
    pub(crate) deadline: Time,
    /// Whether a hint named the request, so that it stays in the table without waiting flows.
    pub(crate) joined: bool,
    /// Whether the request cannot meet its deadline on this port.
    pub(crate) lost: bool,
    /// The first of the request's waiting flows, or [`NONE`].
    pub(crate) first: SlotId,
}

/// The batches and requests of a port.
#[derive(Clone, Debug)]
pub(crate) struct BatchTable {
    batches: IdTable<BatchId, Batch>,
    requests: IdTable<RequestId, RequestState>,
    sigma: BTreeMap<BatchId, u32>,
}

impl BatchTable {
    pub(crate) fn new() -> Self {
        Self {
            batches: IdTable::new(BATCHES_MAX, Some(Batch::new(BatchId(0), u32::MAX))),
            requests: IdTable::new(REQUESTS_MAX, None),
            sigma: BTreeMap::new(),
        }
    }

    /// Sets the bounds. Entries beyond them stay until they end.
    pub(crate) fn set_max(&mut self, batches: usize, requests: usize) {
        self.batches.max = batches.min(BATCHES_MAX);
        self.requests.max = requests.min(REQUESTS_MAX);
    }

    pub(crate) fn batch(&self, slot: SlotId) -> &Batch {
        self.batches.get(slot)
    }

    pub(crate) fn batch_mut(&mut self, slot: SlotId) -> &mut Batch {
        self.batches.get_mut(slot)
    }

    pub(crate) fn request(&self, slot: SlotId) -> &RequestState {
        self.requests.get(slot)
    }

    pub(crate) fn request_mut(&mut self, slot: SlotId) -> &mut RequestState {
        self.requests.get_mut(slot)
    }

    pub(crate) fn batches_known(&self) -> usize {
        self.batches.len()
    }

    pub(crate) fn requests_known(&self) -> usize {
        self.requests.len()
    }

    /// Returns the slot of a batch. The id 0 gives [`NULL_BATCH`].
    pub(crate) fn find_batch(&self, id: BatchId) -> Option<SlotId> {
        if id == BatchId(0) { Some(NULL_BATCH) } else { self.batches.find(id) }
    }

    pub(crate) fn find_request(&self, id: RequestId) -> Option<SlotId> {
        self.requests.find(id)
    }

    /// Returns the slot of a batch, which is new if need be, or [`NULL_BATCH`] if there is no room.
    pub(crate) fn enter_batch(&mut self, id: BatchId) -> SlotId {
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

    /// Returns the slot of a request, which is new if need be, or [`NONE`] if there is no room.
    pub(crate) fn enter_request(&mut self, id: RequestId) -> SlotId {
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
        let request = RequestState {
            id,
            batch: NONE,
            deadline: Time::NEVER,
            joined: false,
            lost: false,
            first: NONE,
        };
        self.requests.insert(id, request)
    }

    /// Reports whether a hint announced the batch, with the same layers.
    pub(crate) fn is_announced_as(&self, spec: &BatchSpec) -> bool {
        self.find_batch(spec.batch).is_some_and(|slot| {
            let batch = self.batch(slot);
            batch.announced && (batch.layers, batch.layer_time) == (spec.layers, spec.layer_time)
        })
    }

    /// Records that a hint announced the batch. Returns [`NULL_BATCH`] if there is no room for it.
    pub(crate) fn announce(&mut self, spec: &BatchSpec) -> SlotId {
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

    /// Makes `request` a member of `batch` with `deadline`. `hinted` says whether a hint said so.
    pub(crate) fn join(&mut self, batch: SlotId, request: SlotId, deadline: Time, hinted: bool) {
        self.leave(request);
        let known = self.request_mut(request);
        known.joined |= hinted;
        if known.deadline != deadline {
            known.lost = false;
        }
        known.deadline = deadline;
        let id = known.id;
        if batch == NULL_BATCH || self.batch(batch).members.len() >= BATCH_MEMBERS_MAX {
            return;
        }
        self.request_mut(request).batch = batch;
        if deadline != Time::NEVER {
            self.batch_mut(batch).members.insert((deadline, id));
        }
    }

    /// Reports whether `request` is a member of `batch` whose deadline is no later than `deadline`.
    pub(crate) fn speaks_for(&self, request: SlotId, batch: SlotId, deadline: Time) -> bool {
        request != NONE && {
            let known = self.request(request);
            known.batch == batch && known.deadline <= deadline
        }
    }

    pub(crate) fn leave(&mut self, request: SlotId) {
        let known = self.request_mut(request);
        let (batch, member) = (known.batch, (known.deadline, known.id));
        known.batch = NONE;
        if batch != NONE {
            self.batch_mut(batch).members.remove(&member);
        }
    }

    /// Ends the request, which stays in the table while its flows wait. Returns its batch.
    pub(crate) fn end_request(&mut self, request: SlotId) -> SlotId {
        let batch = self.request(request).batch;
        self.leave(request);
        self.request_mut(request).joined = false;
        self.tidy_request(request);
        batch
    }

    /// Removes a request that no hint and no waiting flow names.
    pub(crate) fn tidy_request(&mut self, request: SlotId) {
        let known = self.request(request);
        if !known.joined && known.first == NONE {
            self.leave(request);
            self.drop_request(request);
        }
    }

    fn drop_request(&mut self, request: SlotId) {
        let id = self.request(request).id;
        self.requests.remove(id, request);
    }

    /// Ends the batch, which stays in the table while its flows wait. Returns the batches directly
    /// behind it, which no longer wait for it.
    pub(crate) fn end_batch(&mut self, slot: SlotId) -> Vec<SlotId> {
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

    /// Removes a batch that no hint and no waiting flow names.
    pub(crate) fn tidy_batch(&mut self, slot: SlotId) {
        let batch = self.batch(slot);
        if slot != NULL_BATCH && !batch.announced && batch.waiting == 0 {
            self.drop_batch(slot);
        }
    }

    fn drop_batch(&mut self, slot: SlotId) {
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

    /// Queues `batch` behind `ahead`. Returns false if that is impossible, as for a running batch.
    pub(crate) fn follow(&mut self, batch: SlotId, ahead: SlotId) -> bool {
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
    fn detach(&mut self, batch: SlotId) {
        let ahead = core::mem::replace(&mut self.batch_mut(batch).ahead, NONE);
        if ahead != NONE {
            self.batch_mut(ahead).followers.retain(|&follower| follower != batch);
        }
    }

    /// Records that `layer` of the batch has begun. Returns false if it had begun before.
    pub(crate) fn advance(&mut self, slot: SlotId, layer: Layer, now: Time) -> bool {
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

    /// Updates progress and remaining computation of `slot` and of batches queued behind it.
    /// Returns each with its old progress. While levels of waiting flows follow the progress, it
    /// never falls (architecture §4.3: promotion is monotonic).
    pub(crate) fn refresh(&mut self, slot: SlotId) -> Vec<(SlotId, i64)> {
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
            batch.progress = if batch.promotable > 0 { was.max(is) } else { is };
            batch.compute_left = batch.layer_time.times(batch.layers_left()) + time_ahead;
            changed.push((slot, was));
            let room = AFFECTED_MAX.saturating_sub(affected.len());
            affected.extend(self.batch(slot).followers.iter().take(room));
        }
        changed
    }

    fn ahead_of(&self, slot: SlotId) -> (u64, Span) {
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

    /// Replaces `σ`. Returns the batches of the table whose position changed.
    pub(crate) fn set_sigma(&mut self, sigma: &[BatchId]) -> Vec<SlotId> {
        let old = core::mem::take(&mut self.sigma);
        for (&id, position) in sigma.iter().zip(0..u32::MAX) {
            self.sigma.entry(id).or_insert(position);
        }
        let mut moved = Vec::new();
        for &id in old.keys().chain(self.sigma.keys()) {
            let Some(slot) = self.batches.find(id) else { continue };
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
