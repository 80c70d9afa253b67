//! The client's half of a lane: publishes records, reads permits, takes slots back.
//! The protocol is described in [`crate::lane`].

use crate::lane::{LaneFull, LaneMemory};
use crate::layout::{SLOTS_MIN, Slot};
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

/// The slots that are not held by gated flows: a circle, in the order in which they are used.
///
/// A record that needs no permit leaves its slot where it is in the circle, with its sequence, so
/// that when the turn comes round again one comparison says whether the daemon is done with it.
/// Nothing is moved: the next record's slot is a link away. A gated flow takes its slot out of the
/// circle; it comes back as the last, which is the one before the turn, so that slots are used in
/// the order in which they came back.
#[derive(Debug)]
struct Circle {
    /// By slot: the one after it. All are slots of the lane (`new`, `insert`).
    links: Box<[u16]>,
    /// By slot: the one before it, so that a turn that only passes writes no link.
    back: Box<[u16]>,
    /// By slot: the sequence of the record that was last in it and needed no permit.
    tags: Box<[u64]>,
    /// Whose turn it is: the slot of the next record, which the last one has named.
    turn: u16,
    /// How many there are, never below 2: gated flows leave that many.
    count: u32,
}

impl Circle {
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

    /// The slot after this turn, if the daemon has `consumed` what was in it.
    #[inline]
    fn next(&self, consumed: u64) -> Option<u16> {
        // SAFETY: `turn` and all links are slots of the lane, for which both tables have entries.
        unsafe {
            let next = *self.links.get_unchecked(usize::from(self.turn));
            (*self.tags.get_unchecked(usize::from(next)) <= consumed).then_some(next)
        }
    }

    /// This turn was used by the record `seq`, which needs no permit.
    #[inline]
    fn pass(&mut self, turn: u16, next: u16, seq: u64) {
        self.turn = next;
        debug_assert!(usize::from(turn) < self.tags.len());
        // SAFETY: `turn` is what `self.turn` was: a slot of the lane. Both callers pass that; a
        // load of it here would only be repeated, since the compiler cannot know.
        unsafe { *self.tags.get_unchecked_mut(usize::from(turn)) = seq };
    }

    /// The turn was used by a gated flow.
    #[inline]
    fn remove(&mut self, next: u16) {
        self.link(self.back[usize::from(self.turn)], next);
        self.turn = next;
        self.count -= 1;
    }

    /// A slot comes back as the last, to be used once `seq` is consumed.
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

/// The client's half. Owned by one thread at a time.
#[derive(Debug)]
pub struct Producer {
    memory: LaneMemory,
    /// Sequence of the record that will be published next; the first is 1.
    seq: u64,
    /// `consumed` as last read.
    consumed: u64,
    circle: Circle,
    /// Slots that gated flows leave to other records: a lane full of waiting flows must still be
    /// able to say that bytes completed, or nothing would ever be permitted again.
    spare: u32,
}

impl Producer {
    /// The producer of a lane that was never used.
    #[must_use]
    pub fn new(memory: LaneMemory) -> Self {
        let slots = memory.slots().len();
        assert!(
            slots >= usize::from(SLOTS_MIN),
            "a lane has at least {SLOTS_MIN} slots"
        );
        let (circle, spare) = (Circle::new(slots), (slots / 8) as u32);
        Self {
            memory,
            seq: 1,
            consumed: 0,
            circle,
            spare,
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
        let at = self.put(&record.encode().with_next(next));
        self.circle.pass(at.slot, next, at.tag);
        Ok(at)
    }

    /// Takes the flow's bytes out of `credit`, publishes it and returns its tag; `None`, and
    /// nothing happened, if the credit does not reach or if it takes a look at the daemon's
    /// counters to find a slot. The same as [`Producer::publish`], in the order that keeps the
    /// fewest values alive: it is the shortest path there is.
    #[inline(always)]
    pub fn publish_on_credit(&mut self, flow: &Flow, credit: &mut u64) -> Option<u64> {
        let left = credit.checked_sub(flow.bytes)?;
        let next = self.circle.next(self.consumed)?;
        *credit = left;
        let (turn, seq) = (self.circle.turn, self.seq);
        self.circle.pass(turn, next, seq);
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
        if self.circle.count - 1 <= self.spare {
            return Err(LaneFull);
        }
        let next = self.next()?;
        let at = self.put(&record.encode().with_next(next));
        self.circle.remove(next);
        Ok(at)
    }

    /// The slot to name as the next record's.
    #[inline]
    fn next(&mut self) -> Result<u16, LaneFull> {
        match self.circle.next(self.consumed) {
            Some(next) => Ok(next),
            None => self.look_again(),
        }
    }

    /// Looks how far the daemon has come.
    #[cold]
    fn look_again(&mut self) -> Result<u16, LaneFull> {
        // Acquire: pairs with the Release store in `Consumer::flush`. The slots that come back
        // are overwritten later, which must come after the daemon's copies.
        self.consumed = self
            .memory
            .header()
            .consumed
            .consumed
            .load(Ordering::Acquire);
        self.circle.next(self.consumed).ok_or(LaneFull)
    }

    /// Publishes into the slot whose turn it is.
    #[inline]
    fn put(&mut self, descriptor: &Descriptor) -> SlotRef {
        let at = SlotRef {
            slot: self.circle.turn,
            tag: self.seq,
        };
        let slot = self.slot(at.slot);
        slot.write(descriptor);
        // Release: pairs with the consumer's Acquire load in `Consumer::poll`.
        slot.state
            .store(permit::published(at.tag), Ordering::Release);
        self.seq += 1;
        at
    }

    /// A slot that came out of the circle.
    #[inline]
    fn slot(&self, slot: u16) -> &Slot {
        debug_assert!(usize::from(slot) < self.memory.slots().len());
        // SAFETY: the circle holds slots of this lane only, see `Circle::links`.
        unsafe { self.memory.slots().get_unchecked(usize::from(slot)) }
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
        // Usable at once: nothing of it remains to be consumed.
        self.circle.insert(at.slot, 0);
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
        self.circle.insert(at.slot, message.tag);
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
            self.circle.insert(at.slot, message.tag);
        }
        Ok(())
    }

    /// Records that the daemon has not consumed yet. Not for the fast path: the daemon writes that
    /// counter.
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

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::consumer::Consumer;

    /// Every slot is in the circle once or held by a flow, and the two ways round are one.
    fn assert_whole(circle: &Circle, held: usize) {
        let mut seen = vec![false; circle.links.len()];
        let mut slot = circle.turn;
        for _ in 0..circle.count {
            let next = circle.links[usize::from(slot)];
            assert_eq!(circle.back[usize::from(next)], slot);
            assert!(!core::mem::replace(&mut seen[usize::from(slot)], true));
            slot = next;
        }
        assert_eq!(slot, circle.turn, "the circle is longer than its count");
        assert_eq!(circle.count as usize + held, seen.len());
    }

    proptest! {
        #[test]
        fn no_slot_is_lost_or_used_twice(ops in prop::collection::vec((0..6_u8, any::<usize>()), 1..400)) {
            let memory = LaneMemory::heap(16);
            let mut producer = Producer::new(memory.clone());
            let mut consumer = Consumer::new(memory, false);
            let (mut gated, mut tags) = (Vec::new(), Vec::new());
            for (op, which) in ops {
                match op {
                    0 => drop(producer.publish(&Record::LayerBegin { batch: 1, layer: 2 })),
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
                assert_whole(&producer.circle, gated.len());
            }
            let published = producer.next_tag() - 1;
            while let Some(incoming) = consumer.poll() {
                tags.push(incoming.expect("no garbage").at.tag);
            }
            prop_assert_eq!(tags, (1..=published).collect::<Vec<_>>());
        }
    }
}
