//! Checks of waiting flows, and the choice of the next permit.

use laxity_types::{Level, Stage};

use super::Link;
use super::flows::{Flow, NONE, SlotId};
use super::queue::{Group, SCAVENGER};
use super::waiting::tie_order;
use crate::discipline::{Check, Feasibility, QueuePosition};
use crate::event::Action;
use crate::rmlq::promoted;
use crate::time::{Span, Time};

/// Maximum number of due flows that are checked before each pick, which bounds the time until the
/// next permit.
const CHECKS_PER_PICK: usize = 8;

impl Link {
    /// Checks the first due flow. Returns `None` if none is due, else the move if there was one.
    fn look(&mut self, now: Time) -> Option<Option<Action>> {
        let &(due, batch) = self.due.first()?;
        if due > now {
            return None;
        }
        let &(_, _, slot) = self.port.batches.batch(batch).checks.first()?;
        Some(match self.discipline.check(&self.port, now, self.port.flows.get(slot)) {
            Check::Move(position) => self.relocate(now, slot, position),
            Check::Later(at) => {
                self.recheck(slot, at.max(now + Span(1)));
                None
            }
        })
    }

    fn recheck(&mut self, slot: SlotId, at: Time) {
        let flow = self.port.flows.get_mut(slot);
        let (batch, old, seq) = (flow.batch, flow.check_at, flow.seq);
        flow.check_at = at;
        let checks = &mut self.port.batches.batch_mut(batch).checks;
        checks.remove(&(old, seq, slot));
        if at != Time::NEVER {
            checks.insert((at, seq, slot));
        }
        self.schedule(batch);
    }

    /// Checks due flows, then serves the best-ranked flow.
    pub(super) fn look_and_pick(&mut self, now: Time) -> Option<Action> {
        loop {
            let mut looked = 0;
            while looked < CHECKS_PER_PICK {
                let Some(outcome) = self.look(now) else { break };
                if outcome.is_some() {
                    return outcome;
                }
                looked += 1;
            }
            let action = self.pick(now);
            if action.is_some() || looked < CHECKS_PER_PICK {
                return action;
            }
        }
    }

    /// Serves the starved flow whose turn it is, if the starved share covers its next chunk.
    fn relieve(&mut self, now: Time) -> Option<Action> {
        let slot = self.starved.next(&mut self.port.flows, now)?;
        let flow = self.port.flows.get(slot);
        if flow.spec.stage == Stage::P2d && flow.remaining > 0 && flow.deadline <= now {
            return self.relocate(now, slot, QueuePosition::scavenger());
        }
        let bytes = self.piece(&flow.spec, flow.remaining);
        if !self.starved.covers(bytes) {
            return None;
        }
        let entry = self.port.queues.get(flow.group);
        let level = self.level_now(now, flow, entry);
        let wire = flow.wire.unwrap_or(level);
        // Where pieces that exceed the window follow one another, the window is never free.
        let is_next = || {
            self.peer_takes(entry.queue, &flow.spec, wire, bytes)
                && self.fits(now, entry.queue, wire, bytes)
        };
        if !self.has_share(&flow.spec) && !is_next() {
            if self.bounds_peers() {
                // The next starved flow may have a peer with room.
                self.starved.pass(&mut self.port.flows, slot);
            }
            return None;
        }
        self.starved.spend(&mut self.port.flows, slot, bytes);
        Some(self.permit(now, slot, level, bytes))
    }

    fn pick(&mut self, now: Time) -> Option<Action> {
        self.paced = None;
        let relieved = self.relieve(now);
        if relieved.is_some() {
            return relieved;
        }
        loop {
            let (group, insists) = self.next_group(now)?;
            // A rank may be stale, but only too high, because members lose their deadlines as time
            // passes. A stale group therefore comes to the front, where its rank is corrected.
            let best = self.port.queues.first()?.1;
            if group == best {
                let rank = self.rank(now, self.port.queues.get(group));
                self.port.queues.set_rank(group, rank);
                if self.port.queues.first()?.1 != group {
                    continue;
                }
            }
            let entry = self.port.queues.get(group);
            let (_, _, _, slot) = entry.head()?;
            let flow = self.port.flows.get(slot);
            if entry.queue != SCAVENGER {
                let feasibility = self.discipline.feasibility(&self.port, now, flow, entry);
                if let Feasibility::Behind(position) = feasibility {
                    // A flow is put behind at most once, and keeps its level.
                    let _ = self.relocate(now, slot, position);
                    continue;
                }
                if feasibility != Feasibility::Alive {
                    if feasibility == Feasibility::RequestLost && flow.request != NONE {
                        let request = flow.request;
                        self.port.batches.request_mut(request).lost = true;
                    }
                    return self.relocate(now, slot, QueuePosition::scavenger());
                }
            }
            let bytes = self.piece(&flow.spec, flow.remaining);
            let level = self.level_now(now, flow, entry);
            let (queue, wire) = (entry.queue, flow.wire.unwrap_or(level));
            let (peer, window) = (flow.spec.peer, self.port.config.window_bytes);
            if !self.peer_takes(queue, &flow.spec, wire, bytes) {
                self.port.peers.refused(now, peer, window, self.port.full_rate);
                self.port.queues.set_aside(group);
                continue;
            }
            if !insists && !self.fits(now, queue, wire, bytes) {
                // The network may serve scavenged bytes more slowly than others.
                if queue != SCAVENGER {
                    self.port.backlog_rate.refused(now, window, self.port.full_rate);
                }
                self.paced = self.exceeds_at(queue, bytes);
                return None;
            }
            return Some(self.permit(now, slot, level, bytes));
        }
    }

    /// Returns the scavenger if its guaranteed share covers its next chunk and the chunk fits, else
    /// the best group. The second value says whether the window may be exceeded.
    fn next_group(&self, now: Time) -> Option<(SlotId, bool)> {
        if let Some(scavenger) = self.port.queues.scavenger()
            && let Some((_, _, _, slot)) = self.port.queues.get(scavenger).head()
        {
            let flow = self.port.flows.get(slot);
            let bytes = self.piece(&flow.spec, flow.remaining);
            let insists = self.guarantee.insists() && self.has_share(&flow.spec);
            let fits = || self.fits(now, SCAVENGER, Level::SCAVENGER, bytes);
            if self.guarantee.covers(bytes) && (insists || fits()) {
                return Some((scavenger, insists));
            }
        }
        self.port.queues.first().map(|(_, group)| (group, false))
    }

    /// Returns the level to which a permit raises `flow`, the head of the group.
    pub(super) fn level_now(&self, now: Time, flow: &Flow, entry: &Group) -> Level {
        if entry.queue == SCAVENGER {
            return flow.level;
        }
        promoted(flow.level, self.discipline.level(&self.port, now, flow, entry))
    }

    fn permit(&mut self, now: Time, slot: SlotId, level: Level, bytes: u64) -> Action {
        let flow = self.port.flows.get(slot);
        let entry = self.port.queues.get(flow.group);
        if entry.queue != SCAVENGER {
            let promotable = !entry.layers.is_empty();
            if level != flow.level && !promotable {
                let (from, remaining) = (flow.level, flow.remaining);
                self.by_level[from.row()].remove(remaining);
                self.by_level[level.row()].add(remaining);
                self.promotions += 1;
            }
        }
        let flow = self.port.flows.get_mut(slot);
        if level != flow.level {
            flow.moved = Some((now, flow.level));
        }
        flow.level = level;
        let level = *flow.wire.get_or_insert(level);
        let (id, last) = (flow.spec.flow, flow.remaining == bytes);
        let (stage, batch, layer) = (flow.spec.stage, flow.batch, flow.spec.layer);
        self.note_late_reuse(now, stage, batch, layer);
        self.serve(now, slot, bytes);
        Action::Permit { flow: id, bytes, level, last }
    }

    /// Moves `bytes` of a waiting flow from waiting to in flight.
    pub(super) fn serve(&mut self, now: Time, slot: SlotId, bytes: u64) {
        let flow = self.port.flows.get(slot);
        let (group, spec, share) = (flow.group, flow.spec, flow.share);
        let (scavenged, whole) = (flow.level == Level::SCAVENGER, flow.remaining == bytes);
        let (level, starved) = (flow.wire.unwrap_or(flow.level), flow.age.is_starved());
        self.account(now, spec.stage, spec.peer, level, bytes);
        if scavenged {
            self.guarantee.spend(bytes);
        } else {
            if self.port.queues.scavenger().is_some() {
                self.guarantee.earn(bytes);
            }
            if !starved {
                self.starved.earn(bytes);
            }
        }
        self.port.queues.charge(group, share, bytes);
        if whole {
            self.dequeue(now, slot);
            self.depart(slot);
            let flow = self.port.flows.get_mut(slot);
            flow.outstanding = flow.outstanding.saturating_add(bytes);
            self.port.flows.mark_in_flight(slot);
            return;
        }
        self.shrink(slot, bytes);
        let flow = self.port.flows.get(slot);
        let elsewhere =
            if scavenged { None } else { self.discipline.served(&self.port, now, flow, bytes) };
        if let Some(position) = elsewhere {
            // The next permit reports a level that service changed.
            let _ = self.relocate(now, slot, position);
        } else {
            self.reorder(slot);
            self.rerank(now, group);
        }
    }

    /// Takes permitted bytes off all counts of a flow that has bytes left.
    fn shrink(&mut self, slot: SlotId, bytes: u64) {
        let flow = self.port.flows.get_mut(slot);
        flow.remaining -= bytes;
        flow.outstanding = flow.outstanding.saturating_add(bytes);
        flow.share = flow.share.saturating_add(bytes);
        let (group, layer, level) = (flow.group, flow.spec.layer, flow.level);
        self.by_stage[flow.spec.stage.index()].bytes -= bytes;
        let entry = self.port.queues.get_mut(group);
        entry.bytes = entry.bytes.saturating_sub(bytes);
        if let Some(tally) = entry.layers.get_mut(&layer.0) {
            tally.bytes = tally.bytes.saturating_sub(bytes);
        } else {
            let row = &mut self.by_level[level.row()];
            row.bytes = row.bytes.saturating_sub(bytes);
        }
    }

    /// Updates the order among equal flows of a flow that was served.
    fn reorder(&mut self, slot: SlotId) {
        let flow = self.port.flows.get_mut(slot);
        let old = (flow.order.0, flow.order.1, flow.seq, slot);
        flow.order.1 = tie_order(flow);
        let new = (flow.order.0, flow.order.1, flow.seq, slot);
        if new != old {
            let members = &mut self.port.queues.get_mut(flow.group).members;
            members.remove(&old);
            members.insert(new);
        }
    }
}
