//! The living flows of one lane: what the driver must remember between a flow's submit and its
//! last completion.
//!
//! A client names a flow by the sequence number of the record that submitted it, in its lane; the
//! policy names it by a [`FlowId`]. Both lead here without a search: the id is client, lane and
//! sequence packed into one word ([`name`]), and the table of a lane is direct-mapped by the low
//! bits of the sequence, because almost always the living flows of a lane are its latest ones. What
//! collides goes to a hash map. That map is the standard library's keyed one: which sequences
//! collide is the client's choice.

use std::collections::HashMap;

use laxity_policy::{FlowId, RequestId, Stage, Time};

const SEQ_BITS: u32 = 40;
const LANE_BITS: u32 = 10;
const SEQ_MASK: u64 = (1 << SEQ_BITS) - 1;
const _: () = assert!(laxity_shm::layout::LANES_MAX as u64 <= 1 << LANE_BITS);

/// The policy's name of the flow that record `seq` of `lane` of the client with index `client`
/// submitted. Unique among living flows: two sequences of a lane that agree in 40 bits are more
/// than 10^12 records apart, fifteen hours of the fastest lane there is, and nothing lives that
/// long here (`completion_timeout`).
#[must_use]
#[inline]
pub const fn name(client: u32, lane: u16, seq: u64) -> FlowId {
    FlowId((client as u64) << (SEQ_BITS + LANE_BITS) | (lane as u64) << SEQ_BITS | (seq & SEQ_MASK))
}

/// Client, lane and sequence (its low bits) of a name.
#[must_use]
#[inline]
pub const fn place(id: FlowId) -> (u32, u16, u64) {
    (
        (id.0 >> (SEQ_BITS + LANE_BITS)) as u32,
        (id.0 >> SEQ_BITS) as u16 & ((1 << LANE_BITS) - 1),
        id.0 & SEQ_MASK,
    )
}

/// What the driver remembers of a flow. One cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub struct Flow {
    /// Sequence of the submitting record; [`FREE`] in a free place of the table.
    pub seq: u64,
    /// Bytes in all.
    pub bytes: u64,
    /// Bytes permitted.
    pub permitted: u64,
    /// Bytes completed.
    pub completed: u64,
    /// TTFT deadline, [`Time::NEVER`] if there is none.
    pub deadline: Time,
    /// When it was submitted or permitted, or when it last made progress: how long it waits, or its
    /// completion is overdue.
    pub touched: Time,
    /// Request that it serves, zero if unknown.
    pub request: RequestId,
    /// Slot that takes its permits; meaningless if it was sent on credit.
    pub slot: u16,
    /// Index of the port.
    pub port: u16,
    /// What it is for.
    pub stage: Stage,
    /// Level on the wire: that of the first permit, 0 before it. A message keeps one DSCP for its
    /// whole life (architecture §4.3), so later permits repeat it.
    pub level: u8,
    /// Who accounts for its bytes on the wire.
    pub accounting: Accounting,
    /// It is part of a fetch, which is told when it ends ([`crate::driver::fetches`]).
    pub fetch: bool,
}

/// Who accounts for the bytes of a flow on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accounting {
    /// The link knows the flow: it had to wait.
    Link,
    /// The flow was launched whole, at [`Flow::level`]: the driver tells the link when it lands.
    Driver,
    /// Nobody: sent without a permit in mode `observe`.
    Nobody,
    /// Its client, which owes all that is outstanding ([`crate::driver::silence`]): the link has
    /// forgotten the flow.
    Owed,
    /// The same for what was permitted of it. The rest waits in the link, held.
    OwedInPart,
}

const _: () = assert!(size_of::<Flow>() == 64);

/// No sequence that a lane reaches.
const FREE: u64 = u64::MAX;

impl Flow {
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
        stage: Stage::Background,
        level: 0,
        accounting: Accounting::Link,
        fetch: false,
    };

    /// Bytes permitted and not completed.
    #[must_use]
    #[inline]
    pub const fn outstanding(&self) -> u64 {
        self.permitted.saturating_sub(self.completed)
    }

    /// Whether it has bytes not yet permitted, or has had no permit at all.
    #[must_use]
    #[inline]
    pub const fn waits(&self) -> bool {
        self.permitted < self.bytes || self.level == 0
    }
}

/// The living flows of a lane. Sequences are given in full or by their low 40 bits.
#[derive(Debug)]
pub struct Flows {
    direct: Box<[Flow]>,
    spilled: HashMap<u64, Flow>,
    len: usize,
}

impl Flows {
    /// An empty table that holds about `expected` living flows without spilling.
    #[must_use]
    pub fn new(expected: usize) -> Self {
        let size = (expected * 2).next_power_of_two().max(16);
        Self {
            direct: vec![Flow::NONE; size].into(),
            spilled: HashMap::new(),
            len: 0,
        }
    }

    #[inline]
    fn index(&self, seq: u64) -> usize {
        seq as usize & (self.direct.len() - 1)
    }

    /// Keeps `flow`. Its sequence is new.
    #[inline]
    pub fn insert(&mut self, flow: Flow) {
        self.len += 1;
        let index = self.index(flow.seq);
        if self.direct[index].seq == FREE {
            self.direct[index] = flow;
        } else {
            self.spilled.insert(flow.seq & SEQ_MASK, flow);
        }
    }

    /// The flow that record `seq` submitted, if it lives.
    #[must_use]
    #[inline]
    pub fn get_mut(&mut self, seq: u64) -> Option<&mut Flow> {
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

    /// Forgets the flow of `seq`; whether there was one.
    #[inline]
    pub fn remove(&mut self, seq: u64) -> bool {
        let index = self.index(seq);
        let held = &mut self.direct[index];
        let removed = if held.seq != FREE && (held.seq ^ seq) & SEQ_MASK == 0 {
            held.seq = FREE;
            true
        } else {
            !self.spilled.is_empty() && self.spilled.remove(&(seq & SEQ_MASK)).is_some()
        };
        self.len -= usize::from(removed);
        removed
    }

    /// Living flows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Places that [`Self::iter`] looks at.
    #[must_use]
    pub fn places(&self) -> usize {
        self.direct.len() + self.spilled.len()
    }

    /// The living flows, in no order that matters.
    pub fn iter(&self) -> impl Iterator<Item = &Flow> {
        self.direct
            .iter()
            .filter(|flow| flow.seq != FREE)
            .chain(self.spilled.values())
    }

    /// Sequences of the living flows, ascending.
    #[must_use]
    pub fn seqs(&self) -> Vec<u64> {
        let mut seqs: Vec<u64> = self.iter().map(|flow| flow.seq).collect();
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
                    assert_eq!(place(name(client, lane, seq)), expected);
                }
            }
        }
    }

    #[test]
    fn the_table_agrees_with_a_map_under_collisions_and_short_sequences() {
        let mut flows = Flows::new(8);
        let mut oracle = std::collections::BTreeMap::new();
        let mut random = 7_u64;
        let base = 5 << SEQ_BITS;
        for step in 0..10_000_u64 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let seq = base + (random >> 33) % 64;
            if random >> 63 == 0 {
                if let std::collections::btree_map::Entry::Vacant(entry) = oracle.entry(seq) {
                    flows.insert(Flow {
                        seq,
                        bytes: step,
                        ..Flow::NONE
                    });
                    entry.insert(step);
                }
            } else {
                assert_eq!(flows.remove(seq & SEQ_MASK), oracle.remove(&seq).is_some());
            }
            assert_eq!(flows.len(), oracle.len());
            for seq in base..base + 64 {
                let expected = oracle.get(&seq).copied();
                assert_eq!(flows.get_mut(seq).map(|flow| flow.bytes), expected);
                assert_eq!(
                    flows.get_mut(seq & SEQ_MASK).map(|flow| flow.bytes),
                    expected
                );
            }
        }
        assert!(flows.get_mut(u64::MAX).is_none());
        assert!(!flows.remove(u64::MAX));
        assert_eq!(flows.seqs(), oracle.into_keys().collect::<Vec<_>>());
    }
}
