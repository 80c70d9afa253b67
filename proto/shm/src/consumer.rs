//! The daemon's half of a lane: takes records out, writes permits in, distrusts everything.
//! The protocol is described in [`crate::lane`].

use crate::lane::LaneMemory;
use crate::layout::CREDIT_PORTS;
use crate::permit;
use crate::producer::SlotRef;
use crate::record::{Flow, Garbage, Record};
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
    poisoned: bool,
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
            poisoned: false,
            fenced,
            memory,
        }
    }

    /// The next record, if there is one. After garbage the lane is dead and yields nothing more.
    #[inline(always)]
    pub fn poll(&mut self) -> Option<Result<Incoming, Garbage>> {
        let slots = self.memory.slots();
        let slot = &slots[usize::from(self.at)];
        // Acquire: pairs with the Release store in `Producer::put`.
        if slot.state.load(Ordering::Acquire) != permit::published(self.seq) || self.poisoned {
            return None;
        }
        if let Some(ahead) = slots.get(usize::from(self.at) + AHEAD) {
            prefetch(ahead);
        }
        let descriptor = slot.read();
        let record = match Record::decode(&descriptor) {
            Ok(record) => record,
            Err(garbage) => return Some(Err(self.poison(garbage))),
        };
        let at = SlotRef {
            slot: self.at,
            tag: self.seq,
        };
        if let Err(garbage) = self.account(at, &record) {
            return Some(Err(self.poison(garbage)));
        }
        let next = descriptor.next();
        // A chain into a slot that waits for a permit would make both sides write it.
        if self.live.get(usize::from(next)) != Some(&0) || next == at.slot {
            return Some(Err(self.poison(Garbage::Next(next))));
        }
        self.at = next;
        self.seq += 1;
        if at.tag - self.flushed >= self.flush_every {
            self.flush();
        }
        Some(Ok(Incoming { at, record }))
    }

    #[cold]
    fn poison(&mut self, garbage: Garbage) -> Garbage {
        self.poisoned = true;
        garbage
    }

    /// What the lane itself has to know of a record.
    #[inline(always)]
    fn account(&mut self, at: SlotRef, record: &Record) -> Result<(), Garbage> {
        match record {
            Record::Submit(_) => self.live[usize::from(at.slot)] = at.tag,
            Record::SubmitOnCredit {
                flow,
                observed: false,
            } => return self.spend(flow),
            Record::Cancelled { tag, .. } => self.forget(*tag),
            Record::LaneReset => self.live.fill(0),
            _ => {}
        }
        Ok(())
    }

    #[inline(always)]
    fn spend(&mut self, flow: &Flow) -> Result<(), Garbage> {
        let Some(port) = flow.credit_port() else {
            return Err(Garbage::Overdraft(flow.bytes));
        };
        let spent = self.spent[port].saturating_add(flow.bytes);
        if spent > self.granted[port] {
            return Err(Garbage::Overdraft(spent - self.granted[port]));
        }
        self.spent[port] = spent;
        Ok(())
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
        self.poisoned
    }
}
