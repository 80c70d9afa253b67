//! The living flows: what the driver must remember between a flow's submit and its last
//! completion, and how the names that clients use lead to it.
//!
//! A client names a flow by the sequence number of the record that submitted it, in its lane. The
//! policy names it by a [`FlowId`]: index and generation in a slab, so that an action for a flow
//! that is gone finds nothing instead of its successor.

use std::collections::HashMap;

use laxity_policy::{FlowId, RequestId, Stage, Time};

/// What the driver remembers of a flow.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    /// Index of the client.
    pub client: u32,
    /// Lane that it was submitted in.
    pub lane: u16,
    /// Slot that takes its permits; meaningless if it is not `gated`.
    pub slot: u16,
    /// Index of the port.
    pub port: u16,
    /// What it is for.
    pub stage: Stage,
    /// It waits for permits; otherwise it was sent on credit or observed.
    pub gated: bool,
    /// Level on the wire: that of the first permit, 0 before it. A message keeps one DSCP for its
    /// whole life (DESIGN §4.3), so later permits repeat it.
    pub level: u8,
    /// Sequence of the submitting record.
    pub seq: u64,
    /// Request that it serves, zero if unknown.
    pub request: RequestId,
    /// Bytes in all.
    pub bytes: u64,
    /// Bytes permitted.
    pub permitted: u64,
    /// Bytes completed.
    pub completed: u64,
    /// When the driver read the submit.
    pub submitted: Time,
    /// TTFT deadline, [`Time::NEVER`] if there is none.
    pub deadline: Time,
    /// Last permit or completion: from here on the completion is overdue.
    pub touched: Time,
}

impl Flow {
    /// Bytes permitted and not completed.
    #[must_use]
    pub const fn outstanding(&self) -> u64 {
        self.permitted.saturating_sub(self.completed)
    }

    /// Whether it has bytes not yet permitted, or has had no permit at all.
    #[must_use]
    pub const fn waits(&self) -> bool {
        self.permitted < self.bytes || self.level == 0
    }
}

#[derive(Debug)]
struct Entry {
    generation: u32,
    flow: Option<Flow>,
}

/// All living flows of all clients.
#[derive(Debug, Default)]
pub struct FlowTable {
    entries: Vec<Entry>,
    free: Vec<u32>,
}

impl FlowTable {
    /// The id that the next [`Self::insert`] will give. The fast path needs it before it inserts.
    #[must_use]
    #[inline]
    pub fn next_id(&self) -> FlowId {
        match self.free.last() {
            Some(&index) => id(index, self.entries[index as usize].generation),
            None => id(self.entries.len() as u32, 0),
        }
    }

    /// Keeps `flow`; its id is what [`Self::next_id`] said.
    #[inline]
    pub fn insert(&mut self, flow: Flow) -> FlowId {
        if let Some(index) = self.free.pop() {
            let entry = &mut self.entries[index as usize];
            entry.flow = Some(flow);
            id(index, entry.generation)
        } else {
            self.entries.push(Entry {
                generation: 0,
                flow: Some(flow),
            });
            id(self.entries.len() as u32 - 1, 0)
        }
    }

    /// The flow of `id`, unless it is gone.
    #[must_use]
    #[inline]
    pub fn get_mut(&mut self, id: FlowId) -> Option<&mut Flow> {
        let entry = self.entries.get_mut(id.0 as u32 as usize)?;
        if u64::from(entry.generation) == id.0 >> 32 {
            entry.flow.as_mut()
        } else {
            None
        }
    }

    /// Forgets the flow of `id`.
    #[inline]
    pub fn remove(&mut self, id: FlowId) -> Option<Flow> {
        let index = id.0 as u32;
        let entry = self.entries.get_mut(index as usize)?;
        if u64::from(entry.generation) != id.0 >> 32 {
            return None;
        }
        let flow = entry.flow.take()?;
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(index);
        Some(flow)
    }

    /// Living flows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Entries, living or not: the range of [`Self::at`].
    #[must_use]
    pub fn entries(&self) -> usize {
        self.entries.len()
    }

    /// The living flow at entry `index`, for a sweep over all of them in pieces.
    #[must_use]
    pub fn at(&self, index: usize) -> Option<(FlowId, &Flow)> {
        let entry = self.entries.get(index)?;
        Some((id(index as u32, entry.generation), entry.flow.as_ref()?))
    }
}

const fn id(index: u32, generation: u32) -> FlowId {
    FlowId((generation as u64) << 32 | index as u64)
}

/// From a sequence number in a lane to the flow that it submitted.
///
/// Direct-mapped by the low bits of the sequence, because almost always the living flows of a
/// lane are its latest ones; what collides goes to a hash map. The map is the standard library's
/// keyed one: which sequences collide is the client's choice.
#[derive(Debug)]
pub struct Tags {
    direct: Box<[(u64, FlowId)]>,
    spilled: HashMap<u64, FlowId>,
}

/// No sequence that a lane reaches.
const FREE: u64 = u64::MAX;

impl Tags {
    /// An empty table that holds about `expected` living flows without spilling.
    #[must_use]
    pub fn new(expected: usize) -> Self {
        let size = (expected * 2).next_power_of_two().max(16);
        Self {
            direct: vec![(FREE, FlowId(0)); size].into(),
            spilled: HashMap::new(),
        }
    }

    /// Notes that record `seq` submitted `flow`.
    #[inline]
    pub fn insert(&mut self, seq: u64, flow: FlowId) {
        let place = seq as usize & (self.direct.len() - 1);
        if self.direct[place].0 == FREE {
            self.direct[place] = (seq, flow);
        } else {
            self.spilled.insert(seq, flow);
        }
    }

    /// The flow that record `seq` submitted.
    #[must_use]
    #[inline]
    pub fn get(&self, seq: u64) -> Option<FlowId> {
        let (held, flow) = self.direct[seq as usize & (self.direct.len() - 1)];
        if held == seq && seq != FREE {
            Some(flow)
        } else if self.spilled.is_empty() {
            None
        } else {
            self.spilled.get(&seq).copied()
        }
    }

    /// Forgets `seq`.
    #[inline]
    pub fn remove(&mut self, seq: u64) {
        let place = seq as usize & (self.direct.len() - 1);
        if self.direct[place].0 == seq {
            self.direct[place].0 = FREE;
        } else if !self.spilled.is_empty() {
            self.spilled.remove(&seq);
        }
    }

    /// Empties the table and gives what it held, by sequence.
    pub fn drain(&mut self) -> Vec<FlowId> {
        let mut all: Vec<(u64, FlowId)> = self.spilled.drain().collect();
        for held in &mut self.direct {
            if held.0 != FREE {
                all.push(*held);
                held.0 = FREE;
            }
        }
        all.sort_unstable_by_key(|(seq, _)| *seq);
        all.into_iter().map(|(_, flow)| flow).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(seq: u64) -> Flow {
        Flow {
            client: 0,
            lane: 0,
            slot: 0,
            port: 0,
            stage: Stage::P2d,
            gated: true,
            level: 0,
            seq,
            request: RequestId(0),
            bytes: 10,
            permitted: 0,
            completed: 0,
            submitted: Time::ZERO,
            deadline: Time::NEVER,
            touched: Time::ZERO,
        }
    }

    #[test]
    fn an_id_of_a_flow_that_is_gone_does_not_find_its_successor() {
        let mut table = FlowTable::default();
        let foreseen = table.next_id();
        let first = table.insert(flow(1));
        assert_eq!(first, foreseen);
        assert_eq!(table.remove(first).unwrap().seq, 1);
        let foreseen = table.next_id();
        let second = table.insert(flow(2));
        assert_eq!(second, foreseen);
        assert_ne!(first, second);
        assert!(table.get_mut(first).is_none());
        assert!(table.remove(first).is_none());
        assert_eq!(table.get_mut(second).unwrap().seq, 2);
        assert_eq!(table.len(), 1);
        assert!(table.get_mut(FlowId(u64::MAX)).is_none());
    }

    #[test]
    fn tags_agree_with_a_map_under_collisions() {
        let mut tags = Tags::new(8);
        let mut oracle = std::collections::BTreeMap::new();
        let mut random = 7_u64;
        for step in 0..10_000_u64 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let seq = (random >> 33) % 64;
            if random >> 63 == 0 {
                if let std::collections::btree_map::Entry::Vacant(entry) = oracle.entry(seq) {
                    tags.insert(seq, FlowId(step));
                    entry.insert(FlowId(step));
                }
            } else {
                tags.remove(seq);
                oracle.remove(&seq);
            }
            for seq in 0..64 {
                assert_eq!(tags.get(seq), oracle.get(&seq).copied());
            }
        }
        assert_eq!(tags.get(u64::MAX), None);
        assert_eq!(tags.drain(), oracle.into_values().collect::<Vec<_>>());
        assert!(tags.drain().is_empty());
    }
}
