//! A lane: one thread's queue of records to the daemon, and its memory-ordering protocol.
//!
//! # The chain
//! In a plain ring one deferred flow would block everything behind it, because its slot cannot be
//! reused before its last permit. So a lane is a *chain*: the producer keeps a private circle of
//! slots, and each record names (`next`) the slot where the next record of this lane will appear,
//! which the producer reserves for that. The consumer therefore polls exactly one known slot per
//! lane, records arrive in order, and slots come back in any order. Slot 0 has the first record.
//! Sequences count records from 1.
//!
//! # Who owns a slot
//! Every slot has one writer at any time, so no store on this path is a read-modify-write:
//!
//! | from → to | how it is passed on | pairs with |
//! |---|---|---|
//! | producer → consumer | descriptor (Relaxed), then `state = published(seq)`, **Release** | consumer's **Acquire** load of `state` that equals `published(seq)` |
//! | consumer → producer, gated flow | consumer's copy of the descriptor, then `state = permit(.., last)`, **Release** | producer's **Acquire** load of `state` |
//! | consumer → producer, other records | consumer's copy, then `consumed ≥ seq`, **Release** | producer's **Acquire** load of `consumed`, made when the last known value does not free the next slot |
//! | consumer → producer, withdrawn flow | consumer forgets the flow, then `consumed ≥` the sequence of `Cancelled` | the same load |
//!
//! `published(seq)` differs for each record, so the stale word of a slot's last use can never be
//! taken for the next record: the consumer compares with the one word it expects.
//!
//! # Permit against withdrawal
//! A client that stops waiting (bypass, stall, cancellation) may race with a permit. No
//! compare-and-swap is needed, because the *client* alone decides what it sends, from the last
//! permit it has **read**. It fixes that count, sends the rest as bypassed, never reads the word
//! again, and reports the count to the daemon (`Cancelled`). A permit that arrives later is a store
//! into a slot that still belongs to the daemon, and no one reads it. The daemon takes that permit
//! back when it consumes `Cancelled`. Before that the slot is not used again. If the daemon has
//! ended or stalled, the client abandons the whole region and uses no slot of it again, so a permit
//! that a daemon writes minutes late has no effect. A CAS on either side would cost the daemon one
//! cache-line transfer per permit (≈ 100 ns, 10 M permits/s), where plain stores overlap.
//!
//! # Distrust
//! The consumer trusts nothing: it reads each word once, checks `next`, and keeps in its own memory
//! which slots have a living flow. A producer that breaks the protocol can only stop its own lane
//! or get wrong permits itself. The producer trusts the daemon's counters only as far as it must: a
//! `consumed` that is too large frees slots too early, which corrupts the records of this one
//! client only.

use core::ptr::NonNull;
use std::sync::Arc;

use crate::layout::{LaneHeader, Slot};

/// The lane has no free slot. One slot is always reserved for the next record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the lane is full: send the flow unscheduled, or try again after the daemon has read some")]
pub struct LaneFull;

/// A lane in ordinary memory, for models and tests.
#[derive(Debug)]
struct HeapLane {
    header: LaneHeader,
    slots: Box<[Slot]>,
}

/// A reference that keeps a lane's memory at its address.
#[derive(Clone, Debug)]
enum Keep {
    Heap(#[expect(dead_code, reason = "held for its Drop only")] Arc<HeapLane>),
    #[cfg(not(loom))]
    Mapped(#[expect(dead_code, reason = "held for its Drop only")] Arc<crate::region::Region>),
}

/// The memory of a lane: in a mapped region, or on the heap.
#[derive(Clone, Debug)]
pub struct LaneMemory {
    header: NonNull<LaneHeader>,
    slots: NonNull<[Slot]>,
    _keep: Keep,
}

// SAFETY: the pointers lead into memory that `_keep` keeps in place. That memory consists of
// atomics, which any thread may access. The two constructors uphold this.
unsafe impl Send for LaneMemory {}
// SAFETY: `&LaneMemory` gives out references to atomics only, in memory that `_keep` keeps.
unsafe impl Sync for LaneMemory {}

impl LaneMemory {
    /// Creates a lane of `slots` slots on the heap.
    pub fn heap(slots: u16) -> Self {
        let lane = Arc::new(HeapLane {
            header: LaneHeader::new(),
            slots: (0..slots).map(|_| Slot::new()).collect(),
        });
        Self {
            header: NonNull::from(&lane.header),
            slots: NonNull::from(&*lane.slots),
            _keep: Keep::Heap(lane),
        }
    }

    /// Returns lane `index` of a mapped region, or `None` if the region has no such lane.
    #[cfg(not(loom))]
    pub fn mapped(region: &Arc<crate::region::Region>, index: u16) -> Option<Self> {
        let (header, slots) = region.lane_parts(index)?;
        Some(Self { header, slots, _keep: Keep::Mapped(Arc::clone(region)) })
    }

    /// Returns the lane's header, which precedes its slots.
    #[inline]
    pub fn header(&self) -> &LaneHeader {
        // SAFETY: the constructors point it at a whole, aligned lane header that `_keep` keeps in
        // place for as long as `self` lives. It is accessed as atomics only, here and by other
        // processes.
        unsafe { self.header.as_ref() }
    }

    /// Returns the lane's slots.
    #[inline]
    pub fn slots(&self) -> &[Slot] {
        // SAFETY: as in `header`, for the slots that follow it.
        unsafe { self.slots.as_ref() }
    }
}
