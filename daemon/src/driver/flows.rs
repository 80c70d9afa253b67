//! The flows of one lane that are not completed.
//!
//! A client names a flow by the sequence number of the submitting record in its lane. The policy
//! names it by a [`FlowId`]: client, lane and sequence packed into one word ([`flow_id`]). The
//! table of a lane is direct-mapped by the low bits of the sequence, because most of its flows are
//! the latest ones. So a lookup needs no search. Flows that collide go to a hash map. That map has
//! a keyed hash, because a client can choose colliding sequences.

use std::collections::HashMap;

use laxity_policy::{FlowId, PeerId, RequestId, Stage, Time};

const SEQ_BITS: u32 = 40;
const LANE_BITS: u32 = 10;
const SEQ_MASK: u64 = (1 << SEQ_BITS) - 1;
const _: () = assert!(laxity_shm::layout::LANES_MAX as u64 <= 1 << LANE_BITS);

/// Returns the policy's name of the flow that record `seq` of `lane` of a client submitted.
///
/// The name is unique among the flows here. Sequences that agree in 40 bits are over 10^12 records
/// apart, 15 hours of the fastest lane. `completion_timeout` ends every flow before that.
#[inline]
pub const fn flow_id(client: u32, lane: u16, seq: u64) -> FlowId {
    FlowId((client as u64) << (SEQ_BITS + LANE_BITS) | (lane as u64) << SEQ_BITS | (seq & SEQ_MASK))
}

/// Returns the client, the lane and the low bits of the sequence of a name.
#[inline]
pub const fn split_flow_id(id: FlowId) -> (u32, u16, u64) {
    (
        (id.0 >> (SEQ_BITS + LANE_BITS)) as u32,
        (id.0 >> SEQ_BITS) as u16 & ((1 << LANE_BITS) - 1),
        id.0 & SEQ_MASK,
    )
}

/// The driver's state of a flow, in one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub struct FlowState {
    /// The sequence of the submitting record, or [`FREE`] in a free entry.
    pub seq: u64,
    pub bytes: u64,
    pub permitted: u64,
    pub completed: u64,
    /// The TTFT deadline, or [`Time::NEVER`] if there is none.
    pub deadline: Time,
    /// When the flow was submitted, was permitted or last made progress. It shows how long the flow
    /// waits, or whether its completion is overdue.
    pub touched: Time,
    pub request: RequestId,
    /// The slot that receives the flow's permits. It has no meaning for a flow on credit.
    pub slot: u16,
    pub port: u8,
    /// The number of the peer ([`crate::driver::peers`]), 0 if unknown.
    pub peer: u8,
    pub stage: Stage,
    /// The level on the wire: that of the first permit, 0 before. Later permits repeat it, because
    /// a message keeps one DSCP (architecture §4.3).
    pub level: u8,
    pub accounting: Accounting,
    /// Whether the flow is part of a fetch ([`crate::driver::fetches`]).
    pub fetch: bool,
}

/// The part of the daemon that accounts for the bytes of a flow on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accounting {
    /// The link, because the flow had to wait.
    Link,
    /// The driver, because the flow was permitted whole at [`FlowState::level`]. The driver reports
    /// the completion to the link.
    Driver,
    /// Nothing, because the flow was sent without a permit in mode `observe`.
    Nobody,
    /// The client, which owes all outstanding bytes ([`crate::driver::silence`]). The link no
    /// longer has the flow.
    Owed,
    /// The client, which owes the permitted bytes. The rest of the flow is held in the link.
    OwedInPart,
}

const _: () = assert!(size_of::<FlowState>() == 64);
const _: () = assert!(2 * crate::config::NICS_MAX <= 1 << u8::BITS);

/// A sequence that no lane reaches.
const FREE: u64 = u64::MAX;

impl FlowState {
    const NONE: Self = Self {
        seq: FREE,
        bytes: 0,
        permitted: 0,
        completed: 0,
        deadline: Time::NEVER,
        touched: Time::ZERO,
        request: RequestId(0),
        slot: 0,
        port: 0,
        peer: 0,
        stage: Stage::Background,
        level: 0,
        accounting: Accounting::Link,
        fetch: false,
    };

    #[inline]
    pub const fn port(&self) -> u16 {
        self.port as u16
    }

    /// Returns the peer, as links know it.
    #[inline]
    pub const fn peer(&self) -> PeerId {
        PeerId(self.peer as u16)
    }

    #[inline]
    pub const fn outstanding(&self) -> u64 {
        self.permitted.saturating_sub(self.completed)
    }

    /// Reports whether the flow has bytes that are not permitted, or had no permit at all.
    #[inline]
    pub const fn waits(&self) -> bool {
        self.permitted < self.bytes || self.level == 0
    }
}

/// Maximum number of entries for which an empty map of colliding flows keeps its memory.
const SPILLED_KEPT: usize = 1024;

/// The flows of a lane. Sequences are given in full or by their low 40 bits.
#[derive(Debug)]
pub struct Flows {
    direct: Box<[FlowState]>,
    spilled: HashMap<u64, FlowState>,
    len: usize,
}

impl Flows {
    /// Makes an empty table for about `expected` flows without collisions.
    pub fn new(expected: usize) -> Self {
        let size = (expected * 2).next_power_of_two().max(16);
        Self { direct: vec![FlowState::NONE; size].into(), spilled: HashMap::new(), len: 0 }
    }

    #[inline]
    fn index(&self, seq: u64) -> usize {
        seq as usize & (self.direct.len() - 1)
    }

    /// Stores `flow`, whose sequence is new.
    #[inline]
    pub fn insert(&mut self, flow: FlowState) {
        self.len += 1;
        let index = self.index(flow.seq);
        if self.direct[index].seq == FREE {
            self.direct[index] = flow;
        } else {
            self.spilled.insert(flow.seq & SEQ_MASK, flow);
        }
    }

    /// Returns the flow that record `seq` submitted, if it has not ended.
    #[must_use]
    #[inline]
    pub fn get_mut(&mut self, seq: u64) -> Option<&mut FlowState> {
        let index = self.index(seq);
        let held = &mut self.direct[index];
        if held.seq != FREE && (held.seq ^ seq) & SEQ_MASK == 0 {
            Some(held)
        } else if self.spilled.is_empty() {
            None
        } else {
            self.spilled.get_mut(&(seq & SEQ_MASK))
        }
    }

    #[inline]
    pub fn remove(&mut self, seq: u64) -> bool {
        let index = self.index(seq);
        let held = &mut self.direct[index];
        let removed = if held.seq != FREE && (held.seq ^ seq) & SEQ_MASK == 0 {
            held.seq = FREE;
            true
        } else {
            !self.spilled.is_empty() && self.remove_spilled(seq)
        };
        self.len -= usize::from(removed);
        removed
    }

    fn remove_spilled(&mut self, seq: u64) -> bool {
        let removed = self.spilled.remove(&(seq & SEQ_MASK)).is_some();
        // One burst of a client must not keep memory for as long as the client lives.
        if self.spilled.is_empty() && self.spilled.capacity() > SPILLED_KEPT {
            self.spilled = HashMap::new();
        }
        removed
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of entries that [`Self::iter`] visits.
    pub fn places(&self) -> usize {
        self.direct.len() + self.spilled.capacity()
    }

    pub fn iter(&self) -> impl Iterator<Item = &FlowState> {
        self.direct.iter().filter(|flow| flow.seq != FREE).chain(self.spilled.values())
    }

    /// Returns the sequences of the wanted flows, ascending, so that equal inputs give equal
    /// schedules.
    pub fn seqs(&self, wanted: impl Fn(&FlowState) -> bool) -> Vec<u64> {
        if self.is_empty() {
            // A client can ask for this again and again.
            return Vec::new();
        }
        let wanted = self.iter().filter(|flow| wanted(flow));
        let mut seqs: Vec<u64> = wanted.map(|flow| flow.seq).collect();
        seqs.sort_unstable();
        seqs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_back_to_its_place_at_the_edges_of_every_field() {
        for client in [0, 1, 16_383] {
            for lane in [0, 1, 1023] {
                for seq in [0, 1, SEQ_MASK, SEQ_MASK + 1, u64::MAX - 1] {
                    let expected = (client, lane, seq & SEQ_MASK);
                    assert_eq!(split_flow_id(flow_id(client, lane, seq)), expected);
                }
            }
        }
    }

    #[test]
    fn a_burst_of_colliding_flows_leaves_no_memory_behind() {
        let mut flows = Flows::new(8);
        let burst = 4 * SPILLED_KEPT as u64;
        (0..burst).for_each(|seq| flows.insert(FlowState { seq, ..FlowState::NONE }));
        assert!(flows.places() >= burst as usize);
        for seq in 0..burst {
            assert!(flows.remove(seq));
        }
        assert!(flows.places() <= 16 + SPILLED_KEPT);
    }

    #[test]
    fn the_table_agrees_with_a_map_under_collisions_and_short_sequences() {
        let mut flows = Flows::new(8);
        let mut oracle = std::collections::BTreeMap::new();
        let mut random = 7_u64;
        let base = 5 << SEQ_BITS;
        for step in 0..10_000_u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let seq = base + (random >> 33) % 64;
            if random >> 63 == 0 {
                if let std::collections::btree_map::Entry::Vacant(entry) = oracle.entry(seq) {
                    flows.insert(FlowState { seq, bytes: step, ..FlowState::NONE });
                    entry.insert(step);
                }
            } else {
                assert_eq!(flows.remove(seq & SEQ_MASK), oracle.remove(&seq).is_some());
            }
            assert_eq!(flows.len(), oracle.len());
            for seq in base..base + 64 {
                let expected = oracle.get(&seq).copied();
                assert_eq!(flows.get_mut(seq).map(|flow| flow.bytes), expected);
                assert_eq!(flows.get_mut(seq & SEQ_MASK).map(|flow| flow.bytes), expected);
            }
        }
        assert!(flows.get_mut(u64::MAX).is_none());
        assert!(!flows.remove(u64::MAX));
        assert_eq!(flows.seqs(|_| true), oracle.into_keys().collect::<Vec<_>>());
    }
}
