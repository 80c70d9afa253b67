//! The daemon's half of a lane: it consumes records and writes permits. All input is untrusted.
//! [`crate::lane`] describes the protocol.

use crate::lane::LaneMemory;
use crate::layout::CREDIT_PORTS;
use crate::permit;
use crate::producer::SlotRef;
use crate::record::{
    Descriptor, Flow, Garbage, OP_COMPLETED, OP_CREDIT, OP_OBSERVED, OP_SUBMIT, Record,
    decode_completed, decode_flow,
};
use crate::sleep::Awaited;
use crate::sync::{Ordering, fence, light_fence, prefetch};

/// A record with its slot and sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Incoming {
    /// The slot and the sequence of the record. The `tag` names the flow that a `Submit` or
    /// `SubmitOnCredit` begins. The slot matters for a `Submit` only.
    pub at: SlotRef,
    /// The record.
    pub record: Record,
}

/// Receives the records of lanes, with a separate method for each frequent kind.
///
/// Closures that take an [`Incoming`] are sinks too, but slow ones: they get each record as an
/// enum. The processor writes the enum to memory in pieces of one size and reads it back in others,
/// and each such read stalls. A scheduler should implement the trait.
pub trait Sink {
    /// Takes a [`Record::Submit`]. Its permits go to `at`, through `consumer`.
    fn submit(&mut self, lane: u16, consumer: &mut Consumer, at: SlotRef, flow: Flow);

    /// Takes a [`Record::SubmitOnCredit`].
    fn on_credit(
        &mut self,
        lane: u16,
        consumer: &mut Consumer,
        at: SlotRef,
        flow: Flow,
        observed: bool,
    );

    /// Takes a [`Record::Completed`].
    fn completed(&mut self, lane: u16, consumer: &mut Consumer, at: SlotRef, tag: u64, bytes: u64);

    /// Takes a record of any other kind.
    fn message(&mut self, lane: u16, consumer: &mut Consumer, at: SlotRef, record: Record);

    /// Handles the garbage after which the lane yields no more records.
    fn garbage(&mut self, lane: u16, consumer: &mut Consumer, garbage: Garbage);

    /// Takes the number of records that one poll consumed from the lane.
    #[inline]
    fn drained(&mut self, _lane: u16, _records: usize) {}
}

impl<F> Sink for F
where
    F: FnMut(u16, &mut Consumer, Result<Incoming, Garbage>),
{
    fn submit(&mut self, lane: u16, consumer: &mut Consumer, at: SlotRef, flow: Flow) {
        self.message(lane, consumer, at, Record::Submit(flow));
    }

    fn on_credit(
        &mut self,
        lane: u16,
        consumer: &mut Consumer,
        at: SlotRef,
        flow: Flow,
        observed: bool,
    ) {
        let record = Record::SubmitOnCredit { flow, observed };
        self.message(lane, consumer, at, record);
    }

    fn completed(&mut self, lane: u16, consumer: &mut Consumer, at: SlotRef, tag: u64, bytes: u64) {
        self.message(lane, consumer, at, Record::Completed { tag, bytes });
    }

    fn message(&mut self, lane: u16, consumer: &mut Consumer, at: SlotRef, record: Record) {
        self(lane, consumer, Ok(Incoming { at, record }));
    }

    fn garbage(&mut self, lane: u16, consumer: &mut Consumer, garbage: Garbage) {
        self(lane, consumer, Err(garbage));
    }
}

/// The flow no longer waits in this slot. Nothing was written. Remove the flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no flow waits in this slot under this tag: forget the flow")]
pub struct Stale;

/// Distance in slots from the current slot to the one that is prefetched. Slots that come back in
/// order lie in order, so the next links of the chain can be guessed. Without the prefetch each
/// link of a backlog would be a cache miss.
const AHEAD: usize = 8;

/// Whether a client sleeps on the permit that was just written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a client that sleeps on this permit must be woken"]
pub enum Wake {
    /// No client sleeps on it.
    NotNeeded,
    /// A client sleeps. Call [`Consumer::wake`] once all permits of this round are written.
    Needed,
}

/// A garbage record as it was read, for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GarbageRecord {
    /// The record's slot. The tag is its sequence.
    pub at: SlotRef,
    /// The record's words.
    pub descriptor: Descriptor,
}

impl core::fmt::Display for GarbageRecord {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let SlotRef { slot, tag } = self.at;
        write!(f, "record {tag} in slot {slot}:")?;
        let words = self.descriptor.0;
        words.iter().try_for_each(|word| write!(f, " {word:016x}"))
    }
}

/// The daemon's half of a lane.
#[derive(Debug)]
pub struct Consumer {
    memory: LaneMemory,
    /// The slot where the next record will appear.
    at: u16,
    /// The sequence of the next record.
    seq: u64,
    /// Tag of the flow that waits in each slot, 0 if none. The table is private, so that a client
    /// cannot redirect a permit.
    live: Box<[u64]>,
    /// Value of the shared `consumed` counter.
    flushed: u64,
    /// Maximum number of records between two updates of `consumed`.
    flush_every: u64,
    permitted: [u64; CREDIT_PORTS],
    spent: [u64; CREDIT_PORTS],
    /// The last `awaited` word that got a wake-up. Each word needs one only.
    woken: u64,
    refused: Option<GarbageRecord>,
    /// Whether to execute a real fence before looking for a sleeper, because this process is not
    /// registered for `membarrier`.
    fenced: bool,
}

impl Consumer {
    /// Creates the consumer of a lane that was never used. `fenced` says that this process could
    /// not be registered for `membarrier` ([`crate::sleep::register`]).
    pub fn new(memory: LaneMemory, fenced: bool) -> Self {
        let count = memory.slots().len();
        Self {
            at: 0,
            seq: 1,
            live: vec![0; count].into_boxed_slice(),
            flushed: 0,
            flush_every: (count / 4).max(1) as u64,
            permitted: [0; CREDIT_PORTS],
            spent: [0; CREDIT_PORTS],
            woken: 0,
            refused: None,
            fenced,
            memory,
        }
    }

    /// Returns the next record, if any. After garbage the lane yields no more records.
    pub fn poll(&mut self) -> Option<Result<Incoming, Garbage>> {
        let mut next = None;
        self.poll_into(0, &mut |_, _: &mut Self, incoming| next = Some(incoming));
        next
    }

    /// Gives the next record, if any, to `sink` with the number `lane`. Returns whether there was
    /// one. After garbage the lane yields no more records.
    #[inline(always)]
    pub fn poll_into<S: Sink>(&mut self, lane: u16, sink: &mut S) -> bool {
        let slots = self.memory.slots();
        let slot = &slots[usize::from(self.at)];
        // Acquire: pairs with the Release store in `Producer::put`.
        if slot.state.load(Ordering::Acquire) != permit::published(self.seq)
            || self.refused.is_some()
        {
            return false;
        }
        if let Some(ahead) = slots.get(usize::from(self.at) + AHEAD) {
            prefetch(ahead);
        }
        let descriptor = slot.read();
        let at = SlotRef { slot: self.at, tag: self.seq };
        if let Err(garbage) = self.take(lane, sink, &descriptor) {
            self.refused = Some(GarbageRecord { at, descriptor });
            sink.garbage(lane, self, garbage);
        }
        true
    }

    /// Decodes the current record and gives it to `sink`.
    #[inline(always)]
    fn take<S: Sink>(
        &mut self,
        lane: u16,
        sink: &mut S,
        descriptor: &Descriptor,
    ) -> Result<(), Garbage> {
        let at = SlotRef { slot: self.at, tag: self.seq };
        match descriptor.opcode() {
            OP_SUBMIT => {
                let flow = decode_flow(descriptor)?;
                self.live[usize::from(at.slot)] = at.tag;
                self.advance(descriptor)?;
                sink.submit(lane, self, at, flow);
            }
            OP_COMPLETED => {
                let (tag, bytes) = decode_completed(descriptor)?;
                self.advance(descriptor)?;
                sink.completed(lane, self, at, tag, bytes);
            }
            OP_CREDIT => {
                let flow = decode_flow(descriptor)?;
                let (port, spent) = self.spend(&flow)?;
                self.advance(descriptor)?;
                // Last: a refused record must not count as spent, as its bytes never return.
                self.spent[port] = spent;
                sink.on_credit(lane, self, at, flow, false);
            }
            OP_OBSERVED => {
                let flow = decode_flow(descriptor)?;
                self.advance(descriptor)?;
                sink.on_credit(lane, self, at, flow, true);
            }
            opcode => {
                let record = Record::decode_rare(opcode, descriptor)?;
                match record {
                    Record::Cancelled { tag, .. } => self.forget(tag),
                    Record::LaneReset => self.live.fill(0),
                    _ => {}
                }
                self.advance(descriptor)?;
                sink.message(lane, self, at, record);
            }
        }
        Ok(())
    }

    /// Moves to the slot that the record names.
    #[inline(always)]
    fn advance(&mut self, descriptor: &Descriptor) -> Result<(), Garbage> {
        let next = descriptor.next();
        // A chain into a slot that waits for a permit would make both sides write it.
        if self.live.get(usize::from(next)) != Some(&0) || next == self.at {
            return Err(Garbage::Next(next));
        }
        let seq = self.seq;
        self.at = next;
        self.seq += 1;
        if seq - self.flushed >= self.flush_every {
            self.flush();
        }
        Ok(())
    }

    /// Returns the port whose credit the flow uses, and the port's spent credit including the flow.
    #[inline(always)]
    fn spend(&self, flow: &Flow) -> Result<(usize, u64), Garbage> {
        let Some(port) = flow.credit_port() else { return Err(Garbage::Overdraft(flow.bytes)) };
        let spent = self.spent[port].saturating_add(flow.bytes);
        if spent > self.permitted[port] {
            return Err(Garbage::Overdraft(spent - self.permitted[port]));
        }
        Ok((port, spent))
    }

    /// Removes a withdrawn flow in O(slots), which is rare. Flows on credit are not in the table.
    #[cold]
    fn forget(&mut self, tag: u64) {
        if tag != 0
            && let Some(cell) = self.live.iter_mut().find(|cell| **cell == tag)
        {
            *cell = 0;
        }
    }

    /// Publishes how many records were consumed. Call it when a lane pauses. A lane that does not
    /// pause is flushed by `poll` every quarter of its slots.
    #[inline]
    pub fn flush(&mut self) {
        let consumed = self.seq - 1;
        if consumed != self.flushed {
            self.flushed = consumed;
            // Release: pairs with the Acquire load in `Producer::look_again`. The copies of the
            // descriptors come before it.
            self.memory.header().consumed.consumed.store(consumed, Ordering::Release);
        }
    }

    /// Permits `cumulative` bytes in all to the flow at `at`.
    ///
    /// # Errors
    /// [`Stale`]: the client withdrew the flow, and nothing was written.
    #[inline]
    pub fn permit(
        &mut self,
        at: SlotRef,
        cumulative: u64,
        level: u8,
        last: bool,
    ) -> Result<Wake, Stale> {
        match self.live.get_mut(usize::from(at.slot)) {
            Some(tag) if *tag == at.tag && at.tag != 0 => {
                if last {
                    *tag = 0;
                }
            }
            _ => return Err(Stale),
        }
        // Release: pairs with the Acquire load in `Producer::word`.
        self.memory.slots()[usize::from(at.slot)]
            .state
            .store(permit::permit(cumulative, level, last), Ordering::Release);
        Ok(self.sleeper(Some(at.slot)))
    }

    /// Reports whether a client sleeps on `slot`, or on any slot if `slot` is `None`.
    #[inline]
    fn sleeper(&self, slot: Option<u16>) -> Wake {
        if self.fenced {
            fence(Ordering::SeqCst);
        } else {
            light_fence();
        }
        // Relaxed: ordered by the fence above against the sleeper's heavy fence.
        let word = self.memory.header().waiter.awaited.load(Ordering::Relaxed);
        if word == 0 || word == self.woken || !Awaited::matches(word, slot) {
            Wake::NotNeeded
        } else {
            Wake::Needed
        }
    }

    /// Wakes the lane's owner if it sleeps. That takes 10 to 14 µs, so call it after all permits of
    /// a round are written. Returns whether there was a sleeper that had not been woken.
    pub fn wake(&mut self) -> bool {
        if self.sleeper(None) == Wake::NotNeeded {
            return false;
        }
        let waiter = &self.memory.header().waiter;
        self.woken = waiter.awaited.load(Ordering::Relaxed);
        waiter.wake();
        true
    }

    /// Sets the credit of a port, in bytes since the lane began. Credit never goes down, because
    /// the client may have spent it already.
    pub fn give_credit(&mut self, port: usize, cumulative: u64) {
        if let Some(permitted) = self.permitted.get_mut(port)
            && cumulative > *permitted
        {
            *permitted = cumulative;
            // Relaxed: no other data depends on this number.
            self.memory.header().credit.permitted[port].store(cumulative, Ordering::Relaxed);
        }
    }

    /// Returns the credit given and the credit spent on a port, in bytes since the lane began.
    #[must_use]
    pub fn credit(&self, port: usize) -> (u64, u64) {
        match (self.permitted.get(port), self.spent.get(port)) {
            (Some(permitted), Some(spent)) => (*permitted, *spent),
            _ => (0, 0),
        }
    }

    /// Reports whether the flow still waits.
    #[inline]
    pub fn is_waiting(&self, at: SlotRef) -> bool {
        at.tag != 0 && self.live.get(usize::from(at.slot)) == Some(&at.tag)
    }

    /// Returns the garbage record after which the lane yields no more records, if there was one.
    pub fn refused(&self) -> Option<&GarbageRecord> {
        self.refused.as_ref()
    }
}
