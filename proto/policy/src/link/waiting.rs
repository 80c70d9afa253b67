//! Arrival, waiting and departure of flows.
//!
//! Promotion implements MFS §4.3 and §4.5: at layer boundaries while the batch computes, then
//! periodically. Layer boundaries can stop (the process hangs, or sends no hints), but deadlines do
//! not. If no boundary comes for the time that `Batch::periodic_from` allows, promotion of the
//! batch's flows is therefore periodic.

use laxity_types::{FlowId, Layer, Level, RequestId, Stage};

use super::Link;
use super::batch_table::NULL_BATCH;
use super::flows::{Flow, FlowPhase, NONE, SlotId, Tie};
use super::queue::{Group, GroupBy, Rank, SCAVENGER};
use crate::discipline::QueuePosition;
use crate::event::{Action, FlowSpec};
use crate::rmlq::promoted;
use crate::time::Time;

impl Link {
    /// Adds a flow and queues it. Returns `None` if its id is in use.
    pub(super) fn arrive(&mut self, now: Time, spec: FlowSpec) -> Option<SlotId> {
        if self.port.flows.life(spec.flow).is_some() {
            return None;
        }
        let batches = &mut self.port.batches;
        let batch = batches.enter_batch(spec.batch);
        let request =
            if spec.request == RequestId(0) { NONE } else { batches.enter_request(spec.request) };
        let deadline = self.deadline(&spec, request);
        let mut flow = Flow::new(spec, deadline, batch, request);
        self.arrivals += 1;
        (flow.seq, flow.arrived) = (self.arrivals, now);
        let slot = self.port.flows.insert(flow)?;
        self.join(now, slot);
        let position = self.discipline.place(&self.port, now, self.port.flows.get(slot));
        self.enqueue(now, slot, position);
        Some(slot)
    }

    /// Adds the flow to the batch and the request that its record names.
    fn join(&mut self, now: Time, slot: SlotId) {
        let flow = self.port.flows.get(slot);
        let (batch, request, deadline) = (flow.batch, flow.request, flow.deadline);
        self.port.batches.batch_mut(batch).waiting += 1;
        if request == NONE {
            self.note_deadline(now, slot);
            return;
        }
        let batches = &mut self.port.batches;
        let known = batches.request(request);
        let next = known.first;
        if !known.joined && deadline != Time::NEVER && batch != NULL_BATCH {
            // Such a flow has the same information as a hint.
            batches.join(batch, request, deadline, false);
            self.rerank_batch(now, batch);
        }
        self.port.flows.get_mut(slot).siblings = (next, NONE);
        if next != NONE {
            self.port.flows.get_mut(next).siblings.1 = slot;
        }
        self.port.batches.request_mut(request).first = slot;
        self.note_deadline(now, slot);
    }

    /// Adds the deadline of a flow to its batch, and updates the batch's ranks.
    pub(super) fn note_deadline(&mut self, now: Time, slot: SlotId) {
        if let Some(batch) = self.list_deadline(slot) {
            self.rerank_batch(now, batch);
        }
    }

    /// Adds the deadline of a flow to its batch, unless a member has one that is no later. Returns
    /// the batch if its ranks may have changed.
    pub(super) fn list_deadline(&mut self, slot: SlotId) -> Option<SlotId> {
        let flow = self.port.flows.get(slot);
        let (batch, deadline, seq) = (flow.batch, flow.deadline, flow.seq);
        let spoken_for = self.port.batches.speaks_for(flow.request, batch, deadline);
        if batch == NULL_BATCH || deadline == Time::NEVER || spoken_for {
            return None;
        }
        self.port.batches.batch_mut(batch).flow_deadlines.insert((deadline, seq));
        Some(batch)
    }

    /// Removes the deadline of a flow from its batch.
    pub(super) fn forget_deadline(&mut self, slot: SlotId) {
        let flow = self.port.flows.get(slot);
        let (batch, noted) = (flow.batch, (flow.deadline, flow.seq));
        self.port.batches.batch_mut(batch).flow_deadlines.remove(&noted);
    }

    /// Holds a waiting flow: takes it out of its queue and keeps its record.
    pub(super) fn hold(&mut self, now: Time, id: FlowId) {
        let Some(FlowPhase::Waits(slot)) = self.port.flows.life(id) else { return };
        if self.port.flows.get(slot).is_held() {
            return;
        }
        self.dequeue(now, slot);
        self.depart(slot);
        let flow = self.port.flows.get_mut(slot);
        // Its neighbours may leave before the flow is released.
        flow.siblings = (NONE, NONE);
        self.held.add(flow.remaining);
    }

    /// Ends the hold of a flow, which keeps its level and its position among equals.
    pub(super) fn release(&mut self, now: Time, id: FlowId) {
        let Some(FlowPhase::Waits(slot)) = self.port.flows.life(id) else { return };
        let flow = self.port.flows.get(slot);
        if !flow.is_held() {
            return;
        }
        let spec = flow.spec;
        self.held.remove(flow.remaining);
        // The batch and the request may have appeared or ended during the hold.
        let batches = &mut self.port.batches;
        let batch = batches.enter_batch(spec.batch);
        let request =
            if spec.request == RequestId(0) { NONE } else { batches.enter_request(spec.request) };
        let deadline = self.deadline(&spec, request);
        // A batch that began meanwhile stalls on its KV reuse, pruned or not (see `hints::rescue`).
        let rescued = spec.stage == Stage::KvReuse
            && self.port.is_pruned(spec.request)
            && self.port.batches.batch(batch).may_run();
        let flow = self.port.flows.get_mut(slot);
        (flow.batch, flow.request, flow.deadline) = (batch, request, deadline);
        if rescued {
            flow.level = Level(Level::COUNT_MAX);
        }
        self.join(now, slot);
        self.enqueue_again(now, slot);
    }

    /// Queues a flow that was queued before. The flow keeps its level.
    pub(super) fn enqueue_again(&mut self, now: Time, slot: SlotId) {
        let flow = self.port.flows.get(slot);
        let floor = flow.level;
        let mut position = QueuePosition::scavenger();
        if floor != Level::SCAVENGER {
            position = self.discipline.place(&self.port, now, flow);
            if position.queue != SCAVENGER {
                position.level = promoted(floor, position.level);
            }
        }
        self.enqueue(now, slot, position);
    }

    /// Removes all references to the record of a flow that waits no more.
    pub(super) fn depart(&mut self, slot: SlotId) {
        self.starved.leave(&mut self.port.flows, slot);
        self.forget_deadline(slot);
        let flow = self.port.flows.get(slot);
        let (batch, request, (next, previous)) = (flow.batch, flow.request, flow.siblings);
        if next != NONE {
            self.port.flows.get_mut(next).siblings.1 = previous;
        }
        if previous != NONE {
            self.port.flows.get_mut(previous).siblings.0 = next;
        } else if request != NONE {
            self.port.batches.request_mut(request).first = next;
        }
        if request != NONE {
            self.port.batches.tidy_request(request);
        }
        self.port.batches.batch_mut(batch).waiting -= 1;
        self.port.batches.tidy_batch(batch);
    }

    pub(super) fn enqueue(&mut self, now: Time, slot: SlotId, position: QueuePosition) {
        let flow = self.port.flows.get(slot);
        let name = match position.scope {
            GroupBy::Port => 0,
            GroupBy::Batch => u64::from(flow.batch),
            GroupBy::Request => u64::from(flow.request),
            GroupBy::Coflow => {
                let stage = flow.spec.stage.index() as u64;
                u64::from(flow.batch) | u64::from(flow.spec.layer.0) << 32 | stage << 48
            }
        };
        let peer = self.queue_peer(position.queue, &flow.spec);
        let (group, made) = self.port.queues.group(position.queue, position.scope, name, peer);
        let batch = self.port.flows.get(slot).batch;
        if made && position.scope == GroupBy::Batch {
            self.port.queues.get_mut(group).batch = batch;
            self.port.batches.batch_mut(batch).groups.push(group);
        }
        let entry = self.port.queues.get_mut(group);
        let flow = self.port.flows.get_mut(slot);
        flow.group = group;
        flow.level = if position.queue == SCAVENGER { Level::SCAVENGER } else { position.level };
        flow.share = flow.share.max(entry.virtual_time);
        flow.tie = position.tie;
        flow.order = (position.order, tie_order(flow));
        flow.check_at = position.check_at;
        let (remaining, layer, stage) = (flow.remaining, flow.spec.layer, flow.spec.stage);
        entry.members.insert((flow.order.0, flow.order.1, flow.seq, slot));
        entry.bytes = entry.bytes.saturating_add(remaining);
        if position.promotable {
            entry.layers.entry(layer.0).or_default().add(remaining);
        } else {
            self.by_level[flow.level.row()].add(remaining);
        }
        let (check_at, seq) = (flow.check_at, flow.seq);
        let known = self.port.batches.batch_mut(batch);
        known.promotable += u32::from(position.promotable);
        if check_at != Time::NEVER {
            known.checks.insert((check_at, seq, slot));
            self.schedule(batch);
        }
        self.by_stage[stage.index()].add(remaining);
        self.waiting += 1;
        if position.queue == SCAVENGER {
            self.starved.leave(&mut self.port.flows, slot);
        } else if self.discipline.relieves_starved() {
            self.starved.enter(&mut self.port.flows, slot, now);
        }
        self.rerank(now, group);
    }

    pub(super) fn dequeue(&mut self, now: Time, slot: SlotId) {
        let flow = self.port.flows.get(slot);
        let (batch, group, remaining) = (flow.batch, flow.group, flow.remaining);
        let (layer, stage, level) = (flow.spec.layer, flow.spec.stage, flow.level);
        let check = (flow.check_at, flow.seq, slot);
        let member = (flow.order.0, flow.order.1, flow.seq, slot);
        self.port.flows.get_mut(slot).group = NONE;
        let entry = self.port.queues.get_mut(group);
        entry.members.remove(&member);
        entry.bytes = entry.bytes.saturating_sub(remaining);
        let promotable = take_layer(entry, layer, remaining);
        if !promotable {
            self.by_level[level.row()].remove(remaining);
        }
        let known = self.port.batches.batch_mut(batch);
        known.promotable -= u32::from(promotable);
        if check.0 != Time::NEVER {
            known.checks.remove(&check);
            self.schedule(batch);
        }
        self.by_stage[stage.index()].remove(remaining);
        self.waiting -= 1;
        self.rerank(now, group);
    }

    /// Updates the rank of a group, or removes the group if it is empty.
    pub(super) fn rerank(&mut self, now: Time, group: SlotId) {
        let entry = self.port.queues.get(group);
        if entry.members.is_empty() {
            if entry.scope == GroupBy::Batch {
                let groups = &mut self.port.batches.batch_mut(entry.batch).groups;
                if let Some(at) = groups.iter().position(|&other| other == group) {
                    groups.swap_remove(at);
                }
            }
            self.port.queues.drop_group(group);
            return;
        }
        let rank = self.rank(now, entry);
        self.port.queues.set_rank(group, rank);
    }

    pub(super) fn rank(&self, now: Time, group: &Group) -> Option<Rank> {
        if group.queue == SCAVENGER {
            return Some(Rank::SCAVENGER);
        }
        self.discipline.rank(&self.port, now, group)
    }

    /// Moves a waiting flow to `position` and returns an action if its level changed.
    pub(super) fn relocate(
        &mut self,
        now: Time,
        slot: SlotId,
        mut position: QueuePosition,
    ) -> Option<Action> {
        let flow = self.port.flows.get(slot);
        let (id, mut from) = (flow.spec.flow, flow.level);
        if self.port.queues.get(flow.group).layers.contains_key(&flow.spec.layer.0) {
            let rli = self.port.rli(flow.batch, flow.spec.layer);
            from = promoted(from, self.discipline.level_by_rli(&self.port, rli));
        }
        if position.queue != SCAVENGER && from != Level::SCAVENGER {
            position.level = promoted(from, position.level);
        }
        self.dequeue(now, slot);
        self.enqueue(now, slot, position);
        let flow = self.port.flows.get_mut(slot);
        let to = flow.level;
        if to == from {
            return None;
        }
        flow.moved = Some((now, from));
        if to == Level::SCAVENGER {
            self.demotions += 1;
        } else {
            self.promotions += 1;
        }
        Some(Action::Moved { flow: id, from, to })
    }

    /// Registers when the first check of `batch` is due.
    pub(super) fn schedule(&mut self, batch: SlotId) {
        let gated = self.discipline.checks_at_boundaries();
        let known = self.port.batches.batch_mut(batch);
        let due = match known.checks.first() {
            None => Time::NEVER,
            Some(&(first, ..)) => {
                if gated && first > known.boundary {
                    first.max(known.periodic_from(self.port.config.promotion_period))
                } else {
                    first
                }
            }
        };
        if due != known.due {
            self.due.remove(&(known.due, batch));
            if due != Time::NEVER {
                self.due.insert((due, batch));
            }
            known.due = due;
        }
    }

    /// Updates the ranks of all groups of the batch.
    pub(super) fn rerank_batch(&mut self, now: Time, batch: SlotId) {
        for i in 0..self.port.batches.batch(batch).groups.len() {
            let group = self.port.batches.batch(batch).groups[i];
            self.rerank(now, group);
        }
    }
}

pub(super) fn tie_order(flow: &Flow) -> u64 {
    match flow.tie {
        Tie::Arrival => 0,
        Tie::Share => flow.share,
    }
}

/// Removes a flow from the tallies by layer. Returns false if the group keeps none.
fn take_layer(group: &mut Group, layer: Layer, bytes: u64) -> bool {
    let Some(tally) = group.layers.get_mut(&layer.0) else { return false };
    tally.remove(bytes);
    if tally.flows == 0 {
        group.layers.remove(&layer.0);
    }
    true
}
