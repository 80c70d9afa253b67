//! The daemon's half of a lane: takes records out, writes permits in, distrusts everything.
//! The protocol is described in [`crate::lane`].

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

/// A record with its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Incoming {
    /// Where it lies; its `tag` names the flow that a `Submit` or `SubmitOnCredit` begins. The
    /// slot matters for a `Submit` only.
    pub at: SlotRef,
    /// What it says.
    pub record: Record,
}

/// Takes what comes out of lanes, the frequent records each by a call of their own.
///
/// Closures that take an [`Incoming`] are sinks too, and good enough for anything but a scheduler:
/// a record that comes in an enum is put together in memory in pieces of one size and read back in
/// others, and the processor waits for each of these, for longer than the rest takes.
pub trait Sink {
    /// [`Record::Submit`]; its permits go to `at`, through `consumer`.
    fn submit(&mut self, lane: u16, consumer: &mut Consumer, at: SlotRef, flow: Flow);

    /// [`Record::SubmitOnCredit`].
    fn on_credit(
        &mut self,
        lane: u16,
        consumer: &mut Consumer,
        at: SlotRef,
        flow: Flow,
        observed: bool,
    );

    /// [`Record::Completed`].
    fn completed(&mut self, lane: u16, consumer: &mut Consumer, at: SlotRef, tag: u64, bytes: u64);

    /// Any other record.
    fn message(&mut self, lane: u16, consumer: &mut Consumer, at: SlotRef, record: Record);

    /// The lane is dead.
    fn garbage(&mut self, lane: u16, consumer: &mut Consumer, garbage: Garbage);

    /// So many records came out of the lane in one go.
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

/// The flow was withdrawn, has had its last permit, or never was: nothing was written. Forget it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no flow waits in this slot under this tag: forget the flow")]
pub struct Stale;

/// How many slots ahead of the one that is read the next cache line is asked for. Records that are
/// given back in order lie in order, so the chain can be guessed though it is followed one link at
/// a time: without this each link of a backlog is a cache miss of its own.
const AHEAD: usize = 8;

/// Whether somebody sleeps on the permit just written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a client that sleeps on this permit must be woken"]
pub enum Wake {
    /// Nobody does.
    NotNeeded,
    /// Call [`Consumer::wake`], once all permits of this round are written.
    Needed,
}

/// A record that made no sense, as it was read: for a log that explains it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Where it lay; the tag is its sequence.
    pub at: SlotRef,
    /// Its words.
    pub descriptor: Descriptor,
}

impl core::fmt::Display for Refused {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let SlotRef { slot, tag } = self.at;
        write!(f, "record {tag} in slot {slot}:")?;
        let words = self.descriptor.0;
        words.iter().try_for_each(|word| write!(f, " {word:016x}"))
    }
}

/// The daemon's half.
#[derive(Debug)]
pub struct Consumer {
    memory: LaneMemory,
    /// The slot where the next record will appear.
    at: u16,
    /// And its sequence.
    seq: u64,
    /// Tag of the living gated flow of each slot, 0 if none. Private, so a client cannot have a
    /// permit written where it should not be.
    live: Box<[u64]>,
    /// Value of the shared `consumed` counter.
    flushed: u64,
    /// Records after which it is brought up to date though the lane does not pause.
    flush_every: u64,
    granted: [u64; CREDIT_PORTS],
    spent: [u64; CREDIT_PORTS],
    /// The `awaited` word that was answered last: one wake-up is enough for each.
    woken: u64,
    refused: Option<Refused>,
    /// Execute a real fence before looking for a sleeper: `membarrier` does not reach us.
    fenced: bool,
}

impl Consumer {
    /// The consumer of a lane that was never used. `fenced` if this process could not be
    /// registered for `membarrier` ([`crate::sleep::register`]).
    #[must_use]
    pub fn new(memory: LaneMemory, fenced: bool) -> Self {
        let count = memory.slots().len();
        Self {
            at: 0,
            seq: 1,
            live: vec![0; count].into_boxed_slice(),
            flushed: 0,
            flush_every: (count / 4).max(1) as u64,
            granted: [0; CREDIT_PORTS],
            spent: [0; CREDIT_PORTS],
            woken: 0,
            refused: None,
            fenced,
            memory,
        }
    }

    /// The next record, if there is one. After garbage the lane is dead and yields nothing more.
    pub fn poll(&mut self) -> Option<Result<Incoming, Garbage>> {
        let mut next = None;
        self.poll_into(0, &mut |_, _: &mut Self, incoming| next = Some(incoming));
        next
    }

    /// Gives the next record, if there is one, to `sink`, which is told that it came from `lane`;
    /// whether there was one. After garbage the lane is dead and yields nothing more.
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
        let at = SlotRef {
            slot: self.at,
            tag: self.seq,
        };
        if let Err(garbage) = self.take(lane, sink, &descriptor) {
            self.refused = Some(Refused { at, descriptor });
            sink.garbage(lane, self, garbage);
        }
        true
    }

    /// Takes the record whose turn it is.
    #[inline(always)]
    fn take<S: Sink>(
        &mut self,
        lane: u16,
        sink: &mut S,
        descriptor: &Descriptor,
    ) -> Result<(), Garbage> {
        let at = SlotRef {
            slot: self.at,
            tag: self.seq,
        };
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
                // Last: what a refused record says was not spent, or it would never be given back.
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

    /// Goes on to the slot that the record names.
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

    /// The counter that the flow draws on, and what it comes to.
    #[inline(always)]
    fn spend(&self, flow: &Flow) -> Result<(usize, u64), Garbage> {
        let Some(port) = flow.credit_port() else {
            return Err(Garbage::Overdraft(flow.bytes));
        };
        let spent = self.spent[port].saturating_add(flow.bytes);
        if spent > self.granted[port] {
            return Err(Garbage::Overdraft(spent - self.granted[port]));
        }
        Ok((port, spent))
    }

    /// A withdrawn flow: O(slots), and rare. Tags of credited flows are not in the table.
    #[cold]
    fn forget(&mut self, tag: u64) {
        if tag != 0
            && let Some(cell) = self.live.iter_mut().find(|cell| **cell == tag)
        {
            *cell = 0;
        }
    }

    /// Tells the producer how far this consumer has come. Call it when a lane pauses; a lane that
    /// does not pause is flushed by `poll` every quarter of its slots.
    #[inline]
    pub fn flush(&mut self) {
        let consumed = self.seq - 1;
        if consumed != self.flushed {
            self.flushed = consumed;
            // Release: pairs with the Acquire load in `Producer::look_again`. The copies of the
            // descriptors come before it.
            self.memory
                .header()
                .consumed
                .consumed
                .store(consumed, Ordering::Release);
        }
    }

    /// Permits `cumulative` bytes in all to the flow at `at`.
    ///
    /// # Errors
    /// [`Stale`]: the client withdrew the flow; nothing was written.
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

    /// Whether somebody sleeps who should see what was just written to `slot` (or to any).
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

    /// Wakes the lane's owner if it sleeps: 10 to 14 µs then, so do it after all permits of a
    /// round are written. Returns whether there was a sleeper that had not been woken.
    pub fn wake(&mut self) -> bool {
        if self.sleeper(None) == Wake::NotNeeded {
            return false;
        }
        let waiter = &self.memory.header().waiter;
        self.woken = waiter.awaited.load(Ordering::Relaxed);
        waiter.wake();
        true
    }

    /// Sets the credit of a port, in bytes since the lane began. Never goes down: credit that was
    /// handed out is spent or not, it cannot be taken back.
    pub fn grant_credit(&mut self, port: usize, cumulative: u64) {
        if let Some(granted) = self.granted.get_mut(port)
            && cumulative > *granted
        {
            *granted = cumulative;
            // Relaxed: the number is all that is said.
            self.memory.header().credit.granted[port].store(cumulative, Ordering::Relaxed);
        }
    }

    /// Credit handed out and credit spent on a port, in bytes since the lane began.
    #[must_use]
    pub fn credit(&self, port: usize) -> (u64, u64) {
        match (self.granted.get(port), self.spent.get(port)) {
            (Some(granted), Some(spent)) => (*granted, *spent),
            _ => (0, 0),
        }
    }

    /// Whether the flow still waits.
    #[inline]
    #[must_use]
    pub fn is_waiting(&self, at: SlotRef) -> bool {
        at.tag != 0 && self.live.get(usize::from(at.slot)) == Some(&at.tag)
    }

    /// Records consumed so far.
    #[must_use]
    pub fn consumed(&self) -> u64 {
        self.seq - 1
    }

    /// Garbage came out of this lane.
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.refused.is_some()
    }

    /// The record for which the lane was given up.
    #[must_use]
    pub fn refused(&self) -> Option<&Refused> {
        self.refused.as_ref()
    }
}
