//! The client's half of a lane: publishes records, reads permits, takes slots back.
//! The protocol is described in [`crate::lane`].

use crate::lane::{LaneFull, LaneMemory};
use crate::permit::{self, State};
use crate::record::{Descriptor, Flow, Record};
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
///
/// An entry is `sequence (48) | slot (16)`. Sequences are compared modulo 2^48: what is in the
/// queue is never that far apart.
#[derive(Debug)]
struct Queue {
    /// `mask + 1` of them, a power of two.
    entries: Box<[u64]>,
    mask: u32,
    /// Where the next slot is taken from, and put back to. Both are masked.
    head: u32,
    tail: u32,
    /// Never below `spare`, which is at least 1: gated flows leave that many, and other records
    /// put back what they take.
    len: u32,
    /// Entries up to this one are usable.
    limit: u64,
}

impl Queue {
    fn new(slots: usize) -> Self {
        let size = slots.next_power_of_two();
        let entries = vec![0; size].into_boxed_slice();
        let limit = u64::from(u16::MAX);
        let mut queue = Self {
            entries,
            mask: size as u32 - 1,
            head: 0,
            tail: 0,
            len: 0,
            limit,
        };
        for slot in 1..slots {
            queue.push(slot as u16, 0);
        }
        queue
    }

    /// The slot whose turn it is, `None` if the daemon, as far as known, is not done with it.
    #[inline]
    fn front(&self) -> Option<u16> {
        // SAFETY: `head` is masked, and `mask + 1` is the number of entries (`new`).
        let entry = unsafe { *self.entries.get_unchecked(self.head as usize) };
        (self.limit.wrapping_sub(entry) as i64 >= 0).then_some(entry as u16)
    }

    /// Takes the front.
    #[inline]
    fn pop(&mut self) {
        self.head = (self.head + 1) & self.mask;
        self.len -= 1;
    }

    /// Each slot of the lane is in at most once, so there is room.
    #[inline]
    fn push(&mut self, slot: u16, seq: u64) {
        self.append(slot, seq);
        self.len += 1;
    }

    /// Takes the front and puts a slot at the end.
    #[inline]
    fn rotate(&mut self, slot: u16, seq: u64) {
        self.head = (self.head + 1) & self.mask;
        self.append(slot, seq);
    }

    #[inline]
    fn append(&mut self, slot: u16, seq: u64) {
        // SAFETY: as in `front`, for `tail`.
        let entry = unsafe { self.entries.get_unchecked_mut(self.tail as usize) };
        *entry = seq << 16 | u64::from(slot);
        self.tail = (self.tail + 1) & self.mask;
    }
}

/// The client's half. Owned by one thread at a time.
#[derive(Debug)]
pub struct Producer {
    memory: LaneMemory,
    /// Sequence of the record that will be published next; the first is 1.
    seq: u64,
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
            queue: Queue::new(count),
            reserved: 0,
            spare: (count / 8).max(1) as u32,
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
        match self.queue.front() {
            Some(next) => Ok(self.put_ungated(record.encode(), next)),
            None => {
                let next = self.look_again()?;
                Ok(self.put_ungated(record.encode(), next))
            }
        }
    }

    /// Takes the flow's bytes out of `credit`, publishes it and returns its tag; `None`, and
    /// nothing happened, if the credit does not reach or if it takes a look at the daemon's
    /// counters to find a slot. The same as [`Producer::publish`], in the order that keeps the
    /// fewest values alive: it is the shortest path there is.
    #[inline]
    pub fn publish_on_credit(&mut self, flow: &Flow, credit: &mut u64) -> Option<u64> {
        let left = credit.checked_sub(flow.bytes)?;
        let next = self.queue.front()?;
        *credit = left;
        let (reserved, seq) = (self.reserved, self.seq);
        self.queue.rotate(reserved, seq);
        self.reserved = next;
        self.seq += 1;
        // SAFETY: as in `put`.
        let slot = unsafe { self.memory.slots().get_unchecked(usize::from(reserved)) };
        slot.write_on_credit(flow, next);
        // Release: as in `put`.
        slot.state.store(permit::published(seq), Ordering::Release);
        Some(seq)
    }

    /// Publishes a flow that waits for its permit. Its slot is in use until [`Producer::release`]
    /// or [`Producer::withdraw`].
    ///
    /// # Errors
    /// [`LaneFull`]: nothing was published.
    #[inline]
    pub fn publish_gated(&mut self, record: &Record) -> Result<SlotRef, LaneFull> {
        if self.queue.len <= self.spare {
            return Err(LaneFull);
        }
        let next = match self.queue.front() {
            Some(next) => next,
            None => self.look_again()?,
        };
        self.queue.pop();
        Ok(self.put(record.encode(), next))
    }

    /// Looks how far the daemon has come.
    #[cold]
    fn look_again(&mut self) -> Result<u16, LaneFull> {
        // Acquire: pairs with the Release store in `Consumer::flush`. The slots that come back
        // are overwritten later, which must come after the daemon's copies.
        let consumed = self
            .memory
            .header()
            .consumed
            .consumed
            .load(Ordering::Acquire);
        self.queue.limit = consumed << 16 | u64::from(u16::MAX);
        self.queue.front().ok_or(LaneFull)
    }

    /// Publishes into the reserved slot, reserves `next`, and puts the slot at the end.
    #[inline]
    fn put_ungated(&mut self, descriptor: Descriptor, next: u16) -> SlotRef {
        let at = self.put(descriptor, next);
        self.queue.rotate(at.slot, at.tag);
        at
    }

    #[inline]
    fn put(&mut self, descriptor: Descriptor, next: u16) -> SlotRef {
        let at = SlotRef {
            slot: self.reserved,
            tag: self.seq,
        };
        // SAFETY: `reserved` is 0 or came out of the queue, which holds slots of this lane only:
        // `Queue::new` puts in those there are, and `put_back` checks.
        let slot = unsafe { self.memory.slots().get_unchecked(usize::from(at.slot)) };
        slot.write(&descriptor.with_next(next));
        // Release: pairs with the consumer's Acquire load in `Consumer::poll`.
        slot.state
            .store(permit::published(at.tag), Ordering::Release);
        self.seq += 1;
        self.reserved = next;
        at
    }

    /// Puts a slot back; it is usable once the record `seq` is consumed.
    #[inline]
    fn put_back(&mut self, slot: u16, seq: u64) {
        assert!(
            usize::from(slot) < self.memory.slots().len(),
            "a slot of this lane"
        );
        self.queue.push(slot, seq);
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
        // Usable at once: this sequence counts as consumed.
        self.put_back(at.slot, self.queue.limit >> 16);
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
        self.put_back(at.slot, message.tag);
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
            self.put_back(at.slot, message.tag);
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
