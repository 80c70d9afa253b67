//! The client's half of a lane: publishes records, reads permits, takes slots back.
//! The protocol is described in [`crate::lane`].

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

/// The slots that are not held by gated flows, in the order in which they will be used.
///
/// A slot whose record needs no permit is put back at the moment it is used, together with the
/// sequence that `consumed` must reach before its turn comes. So there is no second queue to move
/// slots from, and publishing costs the same whether or not the daemon keeps up.
#[derive(Debug)]
struct Queue {
    /// A power of two of them, so that an index is masked into range.
    entries: Box<[SlotRef]>,
    head: u32,
    tail: u32,
}

impl Queue {
    fn new(slots: usize) -> Self {
        let entries = vec![SlotRef::default(); slots.next_power_of_two()].into_boxed_slice();
        let mut queue = Self {
            entries,
            head: 0,
            tail: 0,
        };
        for slot in 1..slots {
            queue.push(SlotRef {
                slot: slot as u16,
                tag: 0,
            });
        }
        queue
    }

    #[inline]
    fn len(&self) -> u32 {
        self.tail.wrapping_sub(self.head)
    }

    #[inline]
    fn at(&self, index: u32) -> usize {
        index as usize & (self.entries.len() - 1)
    }

    /// Each slot of the lane is in at most once, so there is room.
    #[inline]
    fn push(&mut self, entry: SlotRef) {
        let at = self.at(self.tail);
        self.entries[at] = entry;
        self.tail = self.tail.wrapping_add(1);
    }
}

/// The client's half. Owned by one thread at a time.
#[derive(Debug)]
pub struct Producer {
    memory: LaneMemory,
    /// Sequence of the record that will be published next; the first is 1. At 100 million a
    /// second it outgrows the 52 bits of a state word in 520 days of one lane: the daemon then
    /// sees nothing new, the lane is full, and its flows are bypassed.
    seq: u64,
    /// `consumed` as last read.
    consumed: u64,
    queue: Queue,
    /// Where the next record will be published.
    reserved: u16,
    /// Slots that gated flows leave to other records: a lane full of waiting flows must still be
    /// able to say that bytes completed, or nothing would ever be permitted again.
    spare: u32,
}

impl Producer {
    /// The producer of a lane that was never used.
    #[must_use]
    pub fn new(memory: LaneMemory) -> Self {
        let count = memory.slots().len();
        Self {
            seq: 1,
            consumed: 0,
            queue: Queue::new(count),
            reserved: 0,
            spare: (count / 8) as u32,
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
        let next = self.next()?;
        let at = self.put(record.encode(), next);
        self.queue.push(at);
        Ok(at)
    }

    /// Publishes a flow that waits for its permit. Its slot is in use until [`Producer::release`]
    /// or [`Producer::withdraw`].
    ///
    /// # Errors
    /// [`LaneFull`]: nothing was published.
    #[inline]
    pub fn publish_gated(&mut self, record: &Record) -> Result<SlotRef, LaneFull> {
        if self.queue.len() <= self.spare {
            return Err(LaneFull);
        }
        let next = self.next()?;
        Ok(self.put(record.encode(), next))
    }

    /// Takes the slot whose turn it is, if the daemon is done with it.
    #[inline]
    fn next(&mut self) -> Result<u16, LaneFull> {
        let entry = self.queue.entries[self.queue.at(self.queue.head)];
        if entry.tag > self.consumed || self.queue.len() == 0 {
            self.look_again(entry)?;
        }
        self.queue.head = self.queue.head.wrapping_add(1);
        Ok(entry.slot)
    }

    /// Looks how far the daemon has come.
    #[cold]
    fn look_again(&mut self, entry: SlotRef) -> Result<(), LaneFull> {
        // Acquire: pairs with the Release store in `Consumer::flush`. The slots that come back
        // are overwritten later, which must come after the daemon's copies.
        self.consumed = self
            .memory
            .header()
            .consumed
            .consumed
            .load(Ordering::Acquire);
        if entry.tag > self.consumed || self.queue.len() == 0 {
            Err(LaneFull)
        } else {
            Ok(())
        }
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
        self.queue.push(SlotRef {
            slot: at.slot,
            tag: 0,
        });
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
        self.queue.push(SlotRef {
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
        for at in gated {
            self.queue.push(SlotRef {
                slot: at.slot,
                tag: message.tag,
            });
        }
        Ok(())
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
