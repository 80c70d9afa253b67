//! The flows of a port: waiting flows, and flows whose bytes are all permitted.
//!
//! A waiting flow has a record. After its last permit only the number of bytes that are not
//! completed remains, because there may be many such flows. A flow whose first permit covers all
//! its bytes has no entry ([`Link::commit_permit`](super::Link::commit_permit)).

use std::collections::hash_map::Entry;

use laxity_types::{FlowId, Level, PeerId};

use crate::event::FlowSpec;
use crate::lookup::Lookup;
use crate::time::Time;

/// A slot of one of the tables of a port: an index into it.
pub(crate) type SlotId = u32;
/// A slot number that stands for no entry.
pub(crate) const NONE: SlotId = SlotId::MAX;

/// The order of members of a group with the same policy order. Arrival decides last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tie {
    /// First come, first served.
    Arrival,
    /// The flow that has had the fewest bytes is next (start-time fair queueing).
    Share,
}

/// How long a flow waits in the levels, and its neighbours by age (`link/starved.rs`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Age {
    /// When the wait in the levels began, [`Time::NEVER`] if the flow does not wait there.
    pub(super) since: Time,
    pub(super) starved: bool,
    pub(super) next: SlotId,
    pub(super) previous: SlotId,
}

impl Default for Age {
    fn default() -> Self {
        Self { since: Time::NEVER, starved: false, next: NONE, previous: NONE }
    }
}

impl Age {
    pub(crate) const fn is_starved(&self) -> bool {
        self.starved
    }
}

/// A flow that has bytes still to be permitted.
#[derive(Clone, Debug)]
pub(crate) struct Flow {
    pub(crate) spec: FlowSpec,
    /// Number of the flow's arrival on this port, by which all remaining ties are decided.
    pub(crate) seq: u64,
    /// Bytes still to be permitted.
    pub(crate) remaining: u64,
    /// Bytes permitted and not completed.
    pub(crate) outstanding: u64,
    pub(crate) arrived: Time,
    /// The flow's own deadline, or its request's.
    pub(crate) deadline: Time,
    /// Level in the host's queues. It only rises, except by demotion to the scavenger.
    pub(crate) level: Level,
    /// When the level changed last, and from which level.
    pub(crate) moved: Option<(Time, Level)>,
    /// Level of the first permit, which the flow keeps on the wire.
    pub(crate) wire: Option<Level>,
    /// The flow's batch, or [`NULL_BATCH`](super::batch_table::NULL_BATCH) if unknown.
    pub(crate) batch: SlotId,
    /// The flow's request, [`NONE`] if it has none.
    pub(crate) request: SlotId,
    /// Next and previous waiting flow of the same request.
    pub(crate) siblings: (SlotId, SlotId),
    /// The group in which the flow waits, [`NONE`] while the flow is held.
    pub(crate) group: SlotId,
    /// The order among the group's members: the policy's, then that of the tie rule.
    pub(crate) order: (u64, u64),
    /// The rule for members of the same policy order.
    pub(crate) tie: Tie,
    /// Bytes that the flow was permitted in a shared queue, in virtual time.
    pub(crate) share: u64,
    /// When to check the flow's level again, [`Time::NEVER`] if not at all.
    pub(crate) check_at: Time,
    /// The flow's position among the waiting flows by age.
    pub(crate) age: Age,
}

impl Flow {
    pub(crate) fn new(spec: FlowSpec, deadline: Time, batch: SlotId, request: SlotId) -> Self {
        Self {
            spec,
            seq: 0,
            remaining: spec.bytes,
            outstanding: 0,
            arrived: Time::ZERO,
            deadline,
            level: Level(Level::COUNT_MAX),
            moved: None,
            wire: None,
            batch,
            request,
            siblings: (NONE, NONE),
            group: NONE,
            order: (0, 0),
            tie: Tie::Arrival,
            share: 0,
            check_at: Time::NEVER,
            age: Age::default(),
        }
    }

    /// Reports whether the flow has bytes to be permitted and does not wait for permits.
    pub(crate) const fn is_held(&self) -> bool {
        self.group == NONE
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum FlowPhase {
    /// The flow, which may be held, has bytes still to be permitted. The slot has its record.
    Waits(SlotId),
    /// All bytes are permitted. This many are not completed, and were sent at this level to this
    /// peer.
    InFlight(u64, Level, PeerId),
}

#[derive(Clone, Debug, Default)]
pub(crate) struct FlowTable {
    slots: Vec<Flow>,
    free: Vec<SlotId>,
    lives: Lookup<FlowId, FlowPhase>,
}

impl FlowTable {
    pub(crate) fn life(&self, id: FlowId) -> Option<FlowPhase> {
        self.lives.get(&id).copied()
    }

    /// Adds a waiting flow. Returns `None` if its id is in use.
    pub(crate) fn insert(&mut self, flow: Flow) -> Option<SlotId> {
        let Entry::Vacant(life) = self.lives.entry(flow.spec.flow) else { return None };
        let slot = if let Some(slot) = self.free.pop() {
            self.slots[slot as usize] = flow;
            slot
        } else {
            self.slots.push(flow);
            (self.slots.len() - 1) as SlotId
        };
        life.insert(FlowPhase::Waits(slot));
        Some(slot)
    }

    /// Replaces the record of a flow that had its last permit by its bytes in flight.
    pub(crate) fn mark_in_flight(&mut self, slot: SlotId) {
        let flow = &self.slots[slot as usize];
        let (id, bytes, peer) = (flow.spec.flow, flow.outstanding, flow.spec.peer);
        let level = flow.wire.unwrap_or(flow.level);
        self.free.push(slot);
        if bytes == 0 {
            self.lives.remove(&id);
        } else {
            self.lives.insert(id, FlowPhase::InFlight(bytes, level, peer));
        }
    }

    pub(crate) fn remove(&mut self, id: FlowId) {
        if let Some(FlowPhase::Waits(slot)) = self.lives.remove(&id) {
            self.free.push(slot);
        }
    }

    /// Takes up to `bytes` off the bytes that `id` has in flight. Returns the number taken off, the
    /// level at which they were sent, and the peer.
    pub(crate) fn complete(&mut self, id: FlowId, bytes: u64) -> Option<(u64, Level, PeerId)> {
        let Entry::Occupied(mut entry) = self.lives.entry(id) else { return None };
        let (outstanding, level, peer) = match entry.get_mut() {
            FlowPhase::Waits(slot) => {
                let flow = &mut self.slots[*slot as usize];
                (&mut flow.outstanding, flow.wire?, flow.spec.peer)
            }
            FlowPhase::InFlight(outstanding, level, peer) => (outstanding, *level, *peer),
        };
        let done = bytes.min(*outstanding);
        *outstanding -= done;
        if matches!(entry.get(), FlowPhase::InFlight(0, ..)) {
            entry.remove();
        }
        Some((done, level, peer))
    }

    pub(crate) fn get(&self, slot: SlotId) -> &Flow {
        &self.slots[slot as usize]
    }

    pub(crate) fn get_mut(&mut self, slot: SlotId) -> &mut Flow {
        &mut self.slots[slot as usize]
    }

    /// Returns all flows that have bytes still to be permitted: first waiting flows, then held
    /// flows, each in the order of arrival.
    pub(crate) fn by_arrival(&self) -> Vec<SlotId> {
        let mut slots: Vec<SlotId> = self
            .lives
            .values()
            .filter_map(|life| match life {
                FlowPhase::Waits(slot) => Some(*slot),
                FlowPhase::InFlight(..) => None,
            })
            .collect();
        slots.sort_unstable_by_key(|&slot| (self.get(slot).is_held(), self.get(slot).seq));
        slots
    }
}
