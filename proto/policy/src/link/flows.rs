//! The flows that live on a port: those that wait, and those that are wholly in flight.
//!
//! A flow that waits has a record. A flow whose last byte was permitted shrinks to the number of
//! its bytes that are not completed, because there may be many such flows. A flow that is permitted
//! whole at once has no entry ([`Link::commit_permit`](super::Link::commit_permit)).

use std::collections::hash_map::Entry;

use laxity_types::{FlowId, Level};

use crate::event::FlowSpec;
use crate::lookup::Lookup;
use crate::time::Time;

/// Index into one of the tables of a port.
pub(crate) type Slot = u32;
/// No index.
pub(crate) const NONE: Slot = Slot::MAX;

/// How members of a group with the same order stand to each other, before arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tie {
    /// First come, first served.
    Arrival,
    /// They share: the one that has had the fewest bytes is next (start-time fair queueing).
    Share,
    /// The one with the fewest bytes left is next.
    Shortest,
}

/// How long a flow waits in the levels, and its neighbours by age (`link/starved.rs`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Age {
    /// Since when it waits in the levels, [`Time::NEVER`] if it does not.
    pub(super) since: Time,
    pub(super) starved: bool,
    pub(super) next: Slot,
    pub(super) previous: Slot,
}

impl Default for Age {
    fn default() -> Self {
        Self {
            since: Time::NEVER,
            starved: false,
            next: NONE,
            previous: NONE,
        }
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
    /// Order of arrival on this port: the last of all tie rules.
    pub(crate) seq: u64,
    /// Bytes still to be permitted.
    pub(crate) remaining: u64,
    /// Bytes permitted and not completed.
    pub(crate) outstanding: u64,
    /// The flow's own deadline, or its request's.
    pub(crate) deadline: Time,
    /// Level in the host's queues: only climbs, except into the scavenger.
    pub(crate) level: Level,
    /// Level of the first permit, which the wire keeps.
    pub(crate) wire: Option<Level>,
    /// Its batch; [`NULL_BATCH`](super::batch_table::NULL_BATCH) if none is known.
    pub(crate) batch: Slot,
    /// Its request, [`NONE`] if it has none.
    pub(crate) request: Slot,
    /// Next and previous waiting flow of the same request.
    pub(crate) siblings: (Slot, Slot),
    /// The group in which it waits; [`NONE`] while it is held.
    pub(crate) group: Slot,
    /// Its position among the members of the group.
    pub(crate) order: (u64, u64),
    /// How it stands to members of the same order.
    pub(crate) tie: Tie,
    /// Bytes that it has had of a shared queue, in virtual time.
    pub(crate) share: u64,
    /// When its level is to be looked at again, [`Time::NEVER`] if not.
    pub(crate) check_at: Time,
    /// Its position among the flows that wait, by age.
    pub(crate) age: Age,
}

impl Flow {
    pub(crate) fn new(spec: FlowSpec, deadline: Time, batch: Slot, request: Slot) -> Self {
        Self {
            spec,
            seq: 0,
            remaining: spec.bytes,
            outstanding: 0,
            deadline,
            level: Level(Level::COUNT_MAX),
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

    /// It has bytes to be permitted and does not wait for permits.
    pub(crate) const fn is_held(&self) -> bool {
        self.group == NONE
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Life {
    /// It has bytes to be permitted, though it may be held: the record at this index.
    Waits(Slot),
    /// Everything is permitted; so many bytes, sent at this level, are not completed.
    InFlight(u64, Level),
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Flows {
    slots: Vec<Flow>,
    free: Vec<Slot>,
    lives: Lookup<FlowId, Life>,
}

impl Flows {
    pub(crate) fn life(&self, id: FlowId) -> Option<Life> {
        self.lives.get(&id).copied()
    }

    /// Registers a flow that waits, `None` if the name is taken.
    pub(crate) fn insert(&mut self, flow: Flow) -> Option<Slot> {
        let Entry::Vacant(life) = self.lives.entry(flow.spec.flow) else {
            return None;
        };
        let slot = if let Some(slot) = self.free.pop() {
            self.slots[slot as usize] = flow;
            slot
        } else {
            self.slots.push(flow);
            (self.slots.len() - 1) as Slot
        };
        life.insert(Life::Waits(slot));
        Some(slot)
    }

    /// The waiting flow at `slot` has had its last permit.
    pub(crate) fn mark_in_flight(&mut self, slot: Slot) {
        let flow = &self.slots[slot as usize];
        let (id, bytes) = (flow.spec.flow, flow.outstanding);
        let level = flow.wire.unwrap_or(flow.level);
        self.free.push(slot);
        if bytes == 0 {
            self.lives.remove(&id);
        } else {
            self.lives.insert(id, Life::InFlight(bytes, level));
        }
    }

    /// Forgets a flow.
    pub(crate) fn remove(&mut self, id: FlowId) {
        if let Some(Life::Waits(slot)) = self.lives.remove(&id) {
            self.free.push(slot);
        }
    }

    /// Takes up to `bytes` off what `id` has in flight; returns how many those were, and the
    /// level at which they went.
    pub(crate) fn complete(&mut self, id: FlowId, bytes: u64) -> Option<(u64, Level)> {
        let Entry::Occupied(mut entry) = self.lives.entry(id) else {
            return None;
        };
        let (outstanding, level) = match entry.get_mut() {
            Life::Waits(slot) => {
                let flow = &mut self.slots[*slot as usize];
                (&mut flow.outstanding, flow.wire?)
            }
            Life::InFlight(outstanding, level) => (outstanding, *level),
        };
        let done = bytes.min(*outstanding);
        *outstanding -= done;
        if matches!(entry.get(), Life::InFlight(0, _)) {
            entry.remove();
        }
        Some((done, level))
    }

    pub(crate) fn get(&self, slot: Slot) -> &Flow {
        &self.slots[slot as usize]
    }

    pub(crate) fn get_mut(&mut self, slot: Slot) -> &mut Flow {
        &mut self.slots[slot as usize]
    }

    /// Every flow that has bytes still to be permitted: first those that wait, then those that are
    /// held, each in the order of arrival.
    pub(crate) fn by_arrival(&self) -> Vec<Slot> {
        let mut slots: Vec<Slot> = self
            .lives
            .values()
            .filter_map(|life| match life {
                Life::Waits(slot) => Some(*slot),
                Life::InFlight(..) => None,
            })
            .collect();
        slots.sort_unstable_by_key(|&slot| (self.get(slot).is_held(), self.get(slot).seq));
        slots
    }
}
