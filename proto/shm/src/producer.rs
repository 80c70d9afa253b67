//! The client's half of a lane: publishes records, reads permits, takes slots back.
//! The protocol is described in [`crate::lane`].

use std::collections::VecDeque;

use crate::lane::{LaneFull, LaneMemory};
use crate::permit::{self, State};
use crate::record::{Descriptor, Record};
use crate::sync::Ordering;

/// A slot in use, and the sequence of the record in it, which is the tag of its flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SlotRef {
    /// Index in the lane.
    pub slot: u16,
    /// Sequence of the record.
    pub tag: u64,
}

/// The client's half. Owned by one thread at a time.
#[derive(Debug)]
pub struct Producer {
    memory: LaneMemory,
    /// Sequence of the record that will be published next; the first is 1.
    seq: u64,
    /// Where it will be published.
    reserved: u16,
    free: VecDeque<u16>,
    /// Slots that come back when `consumed` reaches the sequence, ascending.
    sent: VecDeque<SlotRef>,
    /// Free slots that gated flows leave to other records: a lane full of waiting flows must
    /// still be able to say that bytes completed, or nothing would ever be permitted again.
    spare: usize,
}

impl Producer {
    /// The producer of a lane that was never used.
    #[must_use]
    pub fn new(memory: LaneMemory) -> Self {
        let count = memory.slots().len();
        let mut free = VecDeque::with_capacity(count);
        free.extend((1..count).map(|slot| slot as u16));
        Self {
            seq: 1,
            reserved: 0,
            free,
            sent: VecDeque::with_capacity(count),
            spare: count / 8,
            memory,
        }
    }

    /// The lane's memory.
    #[inline]
    #[must_use]
    pub fn memory(&self) -> &LaneMemory {
        &self.memory
    }

    /// Sequence that the next record will have.
    #[inline]
    #[must_use]
    pub fn next_tag(&self) -> u64 {
        self.seq
    }

    /// Publishes a record that needs no permit. Its slot comes back once it is consumed.
    ///
    /// # Errors
    /// [`LaneFull`]: nothing was published.
    #[inline]
    pub fn publish(&mut self, record: &Record) -> Result<SlotRef, LaneFull> {
        if self.free.is_empty() {
            self.reclaim();
        }
        let next = self.free.pop_front().ok_or(LaneFull)?;
        let at = self.put(record.encode(), next);
        self.sent.push_back(at);
        Ok(at)
    }

    /// Publishes a flow that waits for its permit. Its slot is in use until [`Producer::release`]
    /// or [`Producer::withdraw`].
    ///
    /// # Errors
    /// [`LaneFull`]: nothing was published.
    #[inline]
    pub fn publish_gated(&mut self, record: &Record) -> Result<SlotRef, LaneFull> {
        if self.free.len() <= self.spare {
            self.reclaim();
            if self.free.len() <= self.spare {
                return Err(LaneFull);
            }
        }
        let next = self.free.pop_front().ok_or(LaneFull)?;
        Ok(self.put(record.encode(), next))
    }

    #[inline]
    fn put(&mut self, descriptor: Descriptor, next: u16) -> SlotRef {
        let at = SlotRef {
            slot: self.reserved,
            tag: self.seq,
        };
        let slot = &self.memory.slots()[usize::from(at.slot)];
        slot.write(&descriptor.with_next(next));
        // Release: pairs with the consumer's Acquire load in `Consumer::poll`.
        slot.state
            .store(permit::published(at.tag), Ordering::Release);
        self.seq += 1;
        self.reserved = next;
        at
    }

    /// The state word of a slot, as last written by the daemon.
    #[inline]
    #[must_use]
    pub fn word(&self, slot: u16) -> u64 {
        // Acquire: pairs with the Release store of a permit. After a last permit the slot may be
        // overwritten, which must come after the daemon's copy of the descriptor.
        self.memory.slots()[usize::from(slot)]
            .state
            .load(Ordering::Acquire)
    }

    /// What the daemon has answered to a gated flow.
    #[inline]
    #[must_use]
    pub fn state(&self, at: SlotRef) -> State {
        permit::decode(self.word(at.slot))
    }

    /// Gives back the slot of a flow whose last permit was read.
    #[inline]
    pub fn release(&mut self, at: SlotRef) {
        self.free.push_back(at.slot);
    }

    /// Withdraws a gated flow of which `granted` bytes were used. The slot comes back once the
    /// daemon has consumed the message.
    ///
    /// # Errors
    /// [`LaneFull`]: nothing happened, the flow still holds its slot. Try again later.
    pub fn withdraw(&mut self, at: SlotRef, granted: u64) -> Result<(), LaneFull> {
        let message = self.publish(&Record::Cancelled {
            tag: at.tag,
            granted,
        })?;
        self.sent.push_back(SlotRef {
            slot: at.slot,
            tag: message.tag,
        });
        Ok(())
    }

    /// Withdraws every flow of the lane, of which `gated` still hold slots, before the lane goes
    /// to another owner.
    ///
    /// # Errors
    /// [`LaneFull`]: nothing happened. Try again later.
    pub fn reset(&mut self, gated: impl IntoIterator<Item = SlotRef>) -> Result<(), LaneFull> {
        let message = self.publish(&Record::LaneReset)?;
        self.sent.extend(gated.into_iter().map(|at| SlotRef {
            slot: at.slot,
            tag: message.tag,
        }));
        Ok(())
    }

    /// Takes back the slots of records that the daemon has consumed.
    #[cold]
    fn reclaim(&mut self) {
        // Acquire: pairs with the Release store in `Consumer::flush`. The slots freed here are
        // overwritten later, which must come after the daemon's copies.
        let consumed = self
            .memory
            .header()
            .consumed
            .consumed
            .load(Ordering::Acquire);
        while let Some(at) = self.sent.front() {
            if at.tag > consumed {
                break;
            }
            self.free.push_back(at.slot);
            self.sent.pop_front();
        }
    }

    /// Records that the daemon has not consumed yet, for statistics.
    #[must_use]
    pub fn backlog(&self) -> u64 {
        let consumed = self
            .memory
            .header()
            .consumed
            .consumed
            .load(Ordering::Relaxed);
        (self.seq - 1).saturating_sub(consumed)
    }

    /// Credit of a port, in bytes since the lane began.
    #[inline]
    #[must_use]
    pub fn credit(&self, port: usize) -> u64 {
        // Relaxed: the number is all that is said.
        self.memory
            .header()
            .credit
            .granted
            .get(port)
            .map_or(0, |c| c.load(Ordering::Relaxed))
    }
}
