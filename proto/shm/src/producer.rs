//! The client's half of a lane: it publishes records, reads permits and reuses slots.
//! [`crate::lane`] describes the protocol.

use crate::lane::{LaneFull, LaneMemory};
use crate::layout::{SLOTS_MIN, Slot};
use crate::permit::{self, SlotState};
use crate::record::{Descriptor, Flow, OP_SUBMIT, Record, decode_flow};
use crate::sync::Ordering;

/// A slot in use, and the sequence of the record in it, which is the tag of its flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SlotRef {
    /// Index of the slot in the lane.
    pub slot: u16,
    /// Sequence of the record.
    pub tag: u64,
}

/// The slots that no gated flow holds, as a circle in the order of their use.
///
/// A record that needs no permit leaves its slot where it is in the circle, with its sequence. When
/// the turn comes round again, one comparison shows whether the daemon has consumed the record. No
/// slot moves: the next record's slot is a link away. A gated flow takes its slot out of the
/// circle. The slot comes back as the last, just before the turn, so that slots are used in the
/// order in which they came back.
#[derive(Debug)]
struct FreeList {
    /// By slot: the next slot of the circle. All are slots of the lane (`new`, `insert`).
    links: Box<[u16]>,
    /// By slot: the previous slot of the circle, so that `pass` need not remember it.
    back: Box<[u16]>,
    /// By slot: the sequence of its last record that needed no permit.
    tags: Box<[u64]>,
    /// The slot of the next record, which the last record named.
    turn: u16,
    /// Number of slots in the circle, at least 2, because gated flows leave that many.
    count: u32,
}

impl FreeList {
    fn new(slots: usize) -> Self {
        let count = slots as u16;
        Self {
            links: (0..count).map(|slot| (slot + 1) % count).collect(),
            back: (0..count).map(|slot| (slot + count - 1) % count).collect(),
            tags: vec![0; slots].into_boxed_slice(),
            turn: 0,
            count: slots as u32,
        }
    }

    /// Returns the slot after this turn if the daemon has `consumed` the slot's last record.
    #[inline]
    fn next(&self, consumed: u64) -> Option<u16> {
        // SAFETY: `turn` and all links are slots of the lane, for which both tables have entries.
        unsafe {
            let next = *self.links.get_unchecked(usize::from(self.turn));
            (*self.tags.get_unchecked(usize::from(next)) <= consumed).then_some(next)
        }
    }

    /// Moves on after the record `seq`, which needs no permit, used this turn.
    #[inline]
    fn pass(&mut self, turn: u16, next: u16, seq: u64) {
        self.turn = next;
        debug_assert!(usize::from(turn) < self.tags.len());
        // SAFETY: `turn` is the former `self.turn`, a slot of the lane. Both callers pass that
        // value, because the compiler would repeat a load of it here.
        unsafe { *self.tags.get_unchecked_mut(usize::from(turn)) = seq };
    }

    /// Moves on after a gated flow used this turn, and takes its slot out of the circle.
    #[inline]
    fn remove(&mut self, next: u16) {
        self.link(self.back[usize::from(self.turn)], next);
        self.turn = next;
        self.count -= 1;
    }

    /// Adds a slot as the last of the circle. It may be used once `seq` is consumed.
    #[inline]
    fn insert(&mut self, slot: u16, seq: u64) {
        self.tags[usize::from(slot)] = seq;
        self.link(self.back[usize::from(self.turn)], slot);
        self.link(slot, self.turn);
        self.count += 1;
    }

    #[inline]
    fn link(&mut self, slot: u16, next: u16) {
        self.links[usize::from(slot)] = next;
        self.back[usize::from(next)] = slot;
    }
}

/// The client's half of a lane. One thread owns it at a time.
#[derive(Debug)]
pub struct Producer {
    memory: LaneMemory,
    /// Sequence of the record that will be published next. The first is 1.
    seq: u64,
    /// Value of the shared `consumed` counter at the last read.
    consumed: u64,
    free_list: FreeList,
    /// Number of slots that gated flows leave to other records. A lane full of waiting flows must
    /// still be able to report completions. Otherwise no further permits would follow.
    spare: u32,
}

impl Producer {
    /// Creates the producer of a lane that was never used.
    pub fn new(memory: LaneMemory) -> Self {
        let slots = memory.slots().len();
        assert!(slots >= usize::from(SLOTS_MIN), "a lane has at least {SLOTS_MIN} slots");
        let (free_list, spare) = (FreeList::new(slots), (slots / 8) as u32);
        Self { memory, seq: 1, consumed: 0, free_list, spare }
    }

    /// Returns the lane's memory.
    #[inline]
    pub fn memory(&self) -> &LaneMemory {
        &self.memory
    }

    /// Returns the sequence that the next record will have.
    #[inline]
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
        let at = self.put(&record.encode().with_next(next));
        self.free_list.pass(at.slot, next, at.tag);
        Ok(at)
    }

    /// Takes the flow's bytes out of `credit`, publishes the flow and returns its tag. Returns
    /// `None`, without any effect, if the credit is too small or if only a new read of the daemon's
    /// counters could find a slot. It does the work of [`Producer::publish`] in the order that
    /// keeps the fewest values alive, because it is the most frequent path.
    #[inline(always)]
    pub fn publish_on_credit(&mut self, flow: &Flow, credit: &mut u64) -> Option<u64> {
        let left = credit.checked_sub(flow.bytes)?;
        let next = self.free_list.next(self.consumed)?;
        *credit = left;
        let (turn, seq) = (self.free_list.turn, self.seq);
        self.free_list.pass(turn, next, seq);
        let slot = self.slot(turn);
        slot.write_on_credit(flow, next);
        // Release: as in `put`.
        slot.state.store(permit::published(seq), Ordering::Release);
        self.seq += 1;
        Some(seq)
    }

    /// Publishes a flow that waits for its permit. Its slot is in use until [`Producer::release`]
    /// or [`Producer::withdraw`].
    ///
    /// # Errors
    /// [`LaneFull`]: nothing was published.
    #[inline]
    pub fn publish_gated(&mut self, record: &Record) -> Result<SlotRef, LaneFull> {
        // One more than `spare`: the slot of the next record is reserved.
        if self.free_list.count - 1 <= self.spare {
            return Err(LaneFull);
        }
        let next = self.next()?;
        let at = self.put(&record.encode().with_next(next));
        self.free_list.remove(next);
        Ok(at)
    }

    /// Returns the slot that the current record names as the next one's.
    #[inline]
    fn next(&mut self) -> Result<u16, LaneFull> {
        match self.free_list.next(self.consumed) {
            Some(next) => Ok(next),
            None => self.look_again(),
        }
    }

    /// Reads the daemon's `consumed` counter again and returns the next slot.
    #[cold]
    fn look_again(&mut self) -> Result<u16, LaneFull> {
        // Acquire: pairs with the Release store in `Consumer::flush`. The slots that come back
        // are overwritten later, which must come after the daemon's copies.
        self.consumed = self.memory.header().consumed.consumed.load(Ordering::Acquire);
        self.free_list.next(self.consumed).ok_or(LaneFull)
    }

    /// Publishes into the slot of this turn.
    #[inline]
    fn put(&mut self, descriptor: &Descriptor) -> SlotRef {
        let at = SlotRef { slot: self.free_list.turn, tag: self.seq };
        let slot = self.slot(at.slot);
        slot.write(descriptor);
        // Release: pairs with the consumer's Acquire load in `Consumer::poll_into`.
        slot.state.store(permit::published(at.tag), Ordering::Release);
        self.seq += 1;
        at
    }

    /// Returns a slot that came out of the circle.
    #[inline]
    fn slot(&self, slot: u16) -> &Slot {
        debug_assert!(usize::from(slot) < self.memory.slots().len());
        // SAFETY: the circle holds slots of this lane only, see `FreeList::links`.
        unsafe { self.memory.slots().get_unchecked(usize::from(slot)) }
    }

    /// Returns the state word of a slot.
    #[inline]
    pub fn word(&self, slot: u16) -> u64 {
        // Acquire: pairs with the Release store of a permit. After a last permit the slot may be
        // overwritten, which must come after the daemon's copy of the descriptor.
        self.memory.slots()[usize::from(slot)].state.load(Ordering::Acquire)
    }

    /// Returns the daemon's answer to a gated flow.
    #[inline]
    #[must_use]
    pub fn state(&self, at: SlotRef) -> SlotState {
        permit::decode(self.word(at.slot))
    }

    /// Returns the gated flow that this producer published in `slot`, as it was submitted. Returns
    /// `None` if the slot has no flow any more, as in a region whose pages are gone.
    #[must_use]
    pub fn flow(&self, slot: u16) -> Option<Flow> {
        let descriptor = self.memory.slots().get(usize::from(slot))?.read();
        (descriptor.opcode() == OP_SUBMIT).then(|| decode_flow(&descriptor).ok())?
    }

    /// Puts the slot of a flow back into the circle after its last permit was read.
    #[inline]
    pub fn release(&mut self, at: SlotRef) {
        // Usable at once, because no record in it remains to be consumed.
        self.free_list.insert(at.slot, 0);
    }

    /// Withdraws a gated flow of which `permitted` bytes were used. The slot comes back once the
    /// daemon has consumed the record of the withdrawal.
    ///
    /// # Errors
    /// [`LaneFull`]: nothing happened, and the flow still holds its slot. Try again later.
    pub fn withdraw(&mut self, at: SlotRef, permitted: u64) -> Result<(), LaneFull> {
        let message = self.publish(&Record::Cancelled { tag: at.tag, permitted })?;
        self.free_list.insert(at.slot, message.tag);
        Ok(())
    }

    /// Withdraws every flow of the lane, of which `gated` still hold slots, before the lane gets
    /// another owner.
    ///
    /// # Errors
    /// [`LaneFull`]: nothing happened. Try again later.
    pub fn reset(&mut self, gated: impl IntoIterator<Item = SlotRef>) -> Result<(), LaneFull> {
        let message = self.publish(&Record::LaneReset)?;
        for at in gated {
            self.free_list.insert(at.slot, message.tag);
        }
        Ok(())
    }

    /// Returns the number of records that the daemon has not consumed yet. It is not for the fast
    /// path, because the daemon writes that counter.
    #[must_use]
    pub fn backlog(&self) -> u64 {
        let consumed = self.memory.header().consumed.consumed.load(Ordering::Relaxed);
        (self.seq - 1).saturating_sub(consumed)
    }

    /// Returns the credit of a port, in bytes since the lane began.
    #[inline]
    pub fn credit(&self, port: usize) -> u64 {
        // Relaxed: no other data depends on this number.
        self.memory.header().credit.permitted.get(port).map_or(0, |c| c.load(Ordering::Relaxed))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::consumer::Consumer;
    use crate::record::Hint;

    /// Asserts that a flow holds each slot or the circle has it once, with correct links both ways.
    fn assert_whole(free_list: &FreeList, held: usize) {
        let mut seen = vec![false; free_list.links.len()];
        let mut slot = free_list.turn;
        for _ in 0..free_list.count {
            let next = free_list.links[usize::from(slot)];
            assert_eq!(free_list.back[usize::from(next)], slot);
            assert!(!core::mem::replace(&mut seen[usize::from(slot)], true));
            slot = next;
        }
        assert_eq!(slot, free_list.turn, "the circle is longer than its count");
        assert_eq!(free_list.count as usize + held, seen.len());
    }

    proptest! {
        #[test]
        fn no_slot_is_lost_or_used_twice(
            ops in prop::collection::vec((0..6_u8, any::<usize>()), 1..400),
        ) {
            let memory = LaneMemory::heap(16);
            let mut producer = Producer::new(memory.clone());
            let mut consumer = Consumer::new(memory, false);
            let (mut gated, mut tags) = (Vec::new(), Vec::new());
            for (op, which) in ops {
                match op {
                    0 => drop(producer.publish(&Record::Hint(Hint::RequestEnd { request: 1 }))),
                    1 | 2 => gated.extend(producer.publish_gated(&Record::Submit(Flow::default()))),
                    3 if !gated.is_empty() => {
                        let at = gated[which % gated.len()];
                        if consumer.permit(at, 0, 1, true).is_ok() {
                            gated.retain(|other| *other != at);
                            producer.release(at);
                        }
                    }
                    4 if !gated.is_empty() => {
                        let at = gated[which % gated.len()];
                        if producer.withdraw(at, 0).is_ok() {
                            gated.retain(|other| *other != at);
                        }
                    }
                    _ => {
                        while let Some(incoming) = consumer.poll() {
                            tags.push(incoming.expect("no garbage").at.tag);
                        }
                        consumer.flush();
                    }
                }
                assert_whole(&producer.free_list, gated.len());
            }
            let published = producer.next_tag() - 1;
            while let Some(incoming) = consumer.poll() {
                tags.push(incoming.expect("no garbage").at.tag);
            }
            prop_assert_eq!(tags, (1..=published).collect::<Vec<_>>());
        }
    }
}
