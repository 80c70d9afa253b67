//! Changes by hints and orders: membership, progress, `σ` and the pruned set.
//!
//! Progress implements MFS §4.4.1. The order and the pruned set implement §4.4.2 and App. B step 3.

use laxity_types::{BatchId, Layer, RequestId, Stage};

use super::Link;
use super::batch_table::NULL_BATCH;
use super::flows::{NONE, SlotId};
use super::queue::SCAVENGER;
use crate::discipline::QueuePosition;
use crate::event::{BatchSpec, Order};
use crate::rli;
use crate::time::Time;

/// Maximum number of flows that one hint or one part of an order moves while other trust domains
/// use the port. The move of this many takes a millisecond or two, for which the others wait.
const MOVED_MAX: usize = 4096;

impl Link {
    pub(super) fn batch_began(&mut self, now: Time, spec: &BatchSpec) {
        if spec.batch != BatchId(0) {
            let known = self.port.batches.is_announced_as(spec);
            let slot = self.port.batches.announce(spec);
            if slot != NULL_BATCH && !known {
                self.progressed(now, slot);
            }
        }
    }

    pub(super) fn request_joined(
        &mut self,
        now: Time,
        batch: BatchId,
        request: RequestId,
        deadline: Time,
    ) {
        if request == RequestId(0) {
            return;
        }
        let batch = self.port.batches.find_batch(batch).unwrap_or(NULL_BATCH);
        let request = self.port.batches.enter_request(request);
        if request == NONE {
            return;
        }
        self.port.batches.join(batch, request, deadline, true);
        let (mut batches, mut redated) = (vec![batch], 0);
        // The first ones are served first. Beyond the bound, flows keep the deadline that they had
        // until the hint is repeated.
        for slot in self.flows_of(request).into_iter().rev() {
            let flow = self.port.flows.get(slot);
            if flow.spec.deadline == Time::NEVER && flow.deadline != deadline {
                redated += 1;
                if redated > MOVED_MAX && !self.is_alone {
                    break;
                }
                self.forget_deadline(slot);
                self.port.flows.get_mut(slot).deadline = deadline;
                batches.extend(self.list_deadline(slot));
                let flow = self.port.flows.get(slot);
                if self.port.queues.get(flow.group).queue != SCAVENGER {
                    let position =
                        self.discipline.place(&self.port, now, self.port.flows.get(slot));
                    let moved = self.relocate(now, slot, position);
                    self.moved.extend(moved);
                }
            }
        }
        // Once for all flows, of which each group can have many.
        batches.sort_unstable();
        batches.dedup();
        for batch in batches {
            self.rerank_batch(now, batch);
        }
    }

    pub(super) fn request_ended(&mut self, now: Time, request: RequestId) {
        let Some(slot) = self.port.batches.find_request(request) else { return };
        let batch = self.port.batches.end_request(slot);
        if batch != NONE {
            self.rerank_batch(now, batch);
        }
    }

    pub(super) fn batch_queued(&mut self, now: Time, batch: BatchId, ahead: BatchId) {
        let batches = &mut self.port.batches;
        let (Some(batch), Some(ahead)) = (batches.find_batch(batch), batches.find_batch(ahead))
        else {
            return;
        };
        if batches.follow(batch, ahead) {
            self.progressed(now, batch);
        }
    }

    pub(super) fn layer_began(&mut self, now: Time, batch: BatchId, layer: Layer) {
        let Some(slot) = self.port.batches.find_batch(batch) else { return };
        let ran = self.port.batches.batch(slot).may_run();
        if !self.port.batches.advance(slot, layer, now) {
            return;
        }
        self.port.held_up.layer_began(self.port.batches.batch(slot).layer_time);
        if !ran && !self.port.pruned.is_empty() {
            self.rescue(now, slot);
        }
        self.schedule(slot);
        self.progressed(now, slot);
    }

    pub(super) fn compute_finished(&mut self, now: Time, batch: BatchId) {
        let Some(slot) = self.port.batches.find_batch(batch) else { return };
        if slot != NULL_BATCH && !self.port.batches.batch(slot).finished {
            self.port.batches.batch_mut(slot).finished = true;
            self.schedule(slot);
            self.progressed(now, slot);
        }
    }

    pub(super) fn batch_ended(&mut self, now: Time, batch: BatchId) {
        let Some(slot) = self.port.batches.find_batch(batch) else { return };
        let known = self.port.batches.batch(slot);
        if slot == NULL_BATCH || known.finished && !known.is_announced() {
            return;
        }
        for follower in self.port.batches.end_batch(slot) {
            self.progressed(now, follower);
        }
        if self.port.batches.find_batch(batch) == Some(slot) {
            self.schedule(slot);
            self.progressed(now, slot);
        }
    }

    /// Applies an order, unless a newer one was applied before.
    pub(super) fn order_changed(&mut self, now: Time, order: &Order) {
        if self.order_epoch.is_some_and(|epoch| order.epoch < epoch) {
            return;
        }
        self.order_epoch = Some(order.epoch);
        let mut pruned = order.pruned.clone();
        pruned.sort_unstable();
        let before = core::mem::replace(&mut self.port.pruned, pruned);
        for batch in self.port.batches.set_sigma(&order.sigma) {
            self.rerank_batch(now, batch);
        }
        // Flows that arrive later are scavenged on their arrival.
        let is_new = |id: &RequestId| before.binary_search(id).is_err();
        self.to_scavenge.extend(self.port.pruned.iter().copied().filter(is_new));
        self.scavenge_pruned(now);
    }

    /// Moves flows of newly pruned requests to the scavenger, [`MOVED_MAX`] at a time.
    pub(super) fn scavenge_pruned(&mut self, now: Time) {
        let mut moves = 0;
        while let Some(&id) = self.to_scavenge.front() {
            let request = self.port.batches.find_request(id).filter(|_| self.port.is_pruned(id));
            for slot in request.map_or_else(Vec::new, |request| self.flows_of(request)) {
                let flow = self.port.flows.get(slot);
                if self.port.queues.get(flow.group).queue == SCAVENGER
                    || !self.discipline.prunes(&self.port, flow)
                {
                    continue;
                }
                if moves == MOVED_MAX {
                    return;
                }
                moves += 1;
                let moved = self.relocate(now, slot, QueuePosition::scavenger());
                self.moved.extend(moved);
            }
            self.to_scavenge.pop_front();
        }
    }

    /// Moves KV reuse of pruned requests out of the scavenger when their batch starts, because the
    /// batch would stall on it. The move is a promotion, so promotion stays monotonic.
    fn rescue(&mut self, now: Time, batch: SlotId) {
        if self.port.queues.scavenger().is_none() {
            return;
        }
        let members = self.port.batches.batch(batch).members.iter().map(|&(_, id)| id);
        let pruned: Vec<RequestId> = members.filter(|&id| self.port.is_pruned(id)).collect();
        for id in pruned {
            let Some(request) = self.port.batches.find_request(id) else { continue };
            for slot in self.flows_of(request) {
                let flow = self.port.flows.get(slot);
                if flow.spec.stage == Stage::KvReuse
                    && self.port.queues.get(flow.group).queue == SCAVENGER
                {
                    let position = self.discipline.place(&self.port, now, flow);
                    let moved = self.relocate(now, slot, position);
                    self.moved.extend(moved);
                }
            }
        }
    }

    /// Updates the ranks of the batch, and of batches queued behind it, after progress.
    fn progressed(&mut self, now: Time, batch: SlotId) {
        for (slot, was) in self.port.batches.refresh(batch) {
            let batch = self.port.batches.batch(slot);
            if batch.promotable > 0 && batch.progress != was {
                for &group in &batch.groups {
                    for (&layer, tally) in &self.port.queues.get(group).layers {
                        let before =
                            self.discipline.level_by_rli(&self.port, rli::rli(Layer(layer), was));
                        let after =
                            self.discipline.level_by_rli(&self.port, batch.rli(Layer(layer)));
                        if after < before {
                            self.promotions += tally.flows;
                        }
                    }
                }
            }
            self.rerank_batch(now, slot);
        }
    }

    fn flows_of(&self, request: SlotId) -> Vec<SlotId> {
        let mut flows = Vec::new();
        let mut next = self.port.batches.request(request).first;
        while next != NONE {
            flows.push(next);
            next = self.port.flows.get(next).siblings.0;
        }
        flows
    }
}
