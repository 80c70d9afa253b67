//! What a lane has while it has a seat: the producer's half of a shared lane, the credit that was
//! handed to it, and the flows that wait.

use std::sync::Arc;

use laxity_shm::layout::{CREDIT_PORTS, CREDIT_WHOLE, attention};
use laxity_shm::permit::published;
use laxity_shm::producer::{Producer, SlotRef};
use laxity_shm::record::{Flow, WHOLE};
use laxity_shm::region::HeaderRef;

use crate::lane::Owed;
use crate::session::{Seat, Session};
use crate::ticket::Mark;

/// A lane with a seat in a region. Fields in the order in which a submit on credit needs them.
#[derive(Debug)]
pub(crate) struct LaneBinding {
    pub(crate) header: HeaderRef,
    pub(crate) credit: Credit,
    pub(crate) producer: Producer,
    pub(crate) pending: Pending,
    pub(crate) session: Arc<Session>,
    pub(crate) index: u16,
    pub(crate) turn: u64,
    /// Tag of the record at which the daemon was last told that many wait.
    told: u64,
    /// Peers that the daemon was told of on this lane, a bit each.
    introduced: [u64; 4],
}

/// Leave to send ahead of any permit. What is left for the kind of flow that used it last is at
/// hand; for other ports it is kept in a table.
#[derive(Debug)]
pub(crate) struct Credit {
    /// [`Flow::key`] of the flows that may use what is at hand; 0 for none.
    pub(crate) key: u64,
    /// Level and DSCP of such a flow.
    pub(crate) mark: Mark,
    /// Bytes at hand.
    pub(crate) left: u64,
    /// When so few are left, the daemon should hear of it: half of what there was.
    low: u64,
    /// Whose bytes they are.
    pub(crate) port: usize,
    /// Bytes left per port; not counting those at hand.
    parked: [u64; CREDIT_PORTS],
    /// Bytes taken note of per port, since the lane began.
    seen: [u64; CREDIT_PORTS],
}

impl Credit {
    /// `used` is what earlier owners of the seat have used.
    fn new(used: [u64; CREDIT_PORTS], mark: Mark) -> Self {
        Self {
            key: 0,
            mark,
            left: 0,
            low: 0,
            port: 0,
            parked: [0; CREDIT_PORTS],
            seen: used,
        }
    }

    /// Used up per port, in bytes since the lane began.
    fn used(&self) -> [u64; CREDIT_PORTS] {
        let mut used = self.seen;
        used[self.port] -= self.left;
        for (used, parked) in used.iter_mut().zip(self.parked) {
            *used -= parked;
        }
        used
    }

    /// Bytes of `port` that were taken from what is at hand, and not used.
    pub(crate) fn give_back(&mut self, port: usize, bytes: u64) {
        if port == self.port {
            self.left += bytes;
        } else {
            self.parked[port] += bytes;
        }
    }

    /// Brings the credit of `port` to hand, with what was permitted since; whether that was
    /// anything.
    fn switch(&mut self, port: usize, granted: u64) -> bool {
        self.parked[self.port] += self.left;
        self.port = port;
        let more = granted.saturating_sub(self.seen[port]);
        self.seen[port] += more;
        self.left = core::mem::take(&mut self.parked[port]) + more;
        self.low = self.left / 2;
        more > 0
    }
}

/// Gated flows that wait, by slot.
#[derive(Debug)]
pub(crate) struct Pending {
    /// Last seen state word of each slot's flow.
    seen: Box<[u64]>,
    /// One bit per slot that waits.
    waits: Box<[u64]>,
    count: u32,
}

impl Pending {
    fn new(slots: usize) -> Self {
        let waits = vec![0; slots.div_ceil(64)].into_boxed_slice();
        Self {
            seen: vec![0; slots].into_boxed_slice(),
            waits,
            count: 0,
        }
    }

    #[inline]
    pub(crate) fn add(&mut self, at: SlotRef) {
        let slot = usize::from(at.slot);
        self.seen[slot] = published(at.tag);
        self.waits[slot / 64] |= 1 << (slot % 64);
        self.count += 1;
    }

    /// The flow had its last permit or was withdrawn.
    #[inline]
    pub(crate) fn remove(&mut self, slot: u16) {
        let slot = usize::from(slot);
        self.waits[slot / 64] &= !(1 << (slot % 64));
        self.count -= 1;
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    #[inline]
    pub(crate) fn seen(&self, slot: u16) -> u64 {
        self.seen[usize::from(slot)]
    }

    #[inline]
    pub(crate) fn saw(&mut self, slot: u16, word: u64) {
        self.seen[usize::from(slot)] = word;
    }

    /// The slots that wait.
    pub(crate) fn slots(&self) -> impl Iterator<Item = u16> {
        self.waits.iter().enumerate().flat_map(|(i, &word)| {
            let bits = core::iter::successors(Some(word), |bits| Some(bits & bits.wrapping_sub(1)));
            bits.take_while(|bits| *bits != 0)
                .map(move |bits| (i * 64) as u16 + bits.trailing_zeros() as u16)
        })
    }
}

impl LaneBinding {
    /// `number` is that of the binding, for tickets.
    pub(crate) fn new(session: Arc<Session>, seat: Seat, number: u64) -> Self {
        Self {
            header: HeaderRef::new(&session.region),
            credit: Credit::new(seat.credit_used, Mark::of(number)),
            pending: Pending::new(seat.producer.memory().slots().len()),
            producer: seat.producer,
            index: seat.index,
            turn: seat.turn,
            told: 0,
            introduced: [0; 4],
            session,
        }
    }

    /// Whether this is the first that the daemon hears of a peer on this lane.
    #[inline]
    pub(crate) fn introduces(&mut self, peer: u8) -> bool {
        let (word, bit) = (usize::from(peer / 64), 1 << (peer % 64));
        let known = self.introduced[word] & bit != 0;
        self.introduced[word] |= bit;
        !known
    }

    /// Gives the seat back; `gated` are the flows that hold slots.
    pub(crate) fn leave(self, gated: Vec<SlotRef>) {
        let seat = Seat::taken(self.index, self.producer, self.credit.used(), self.turn);
        self.session.leave(seat, gated);
    }

    /// Whether there is credit for this flow; brings it to hand if so.
    pub(crate) fn find_credit(&mut self, flow: &Flow) -> bool {
        let Some(port) = flow.credit_port() else {
            return false;
        };
        self.credit.switch(port, self.producer.credit(port));
        let enough = self.credit.left >= flow.bytes;
        self.credit.key = if enough { flow.key() } else { 0 };
        // The level that a flow has which goes by the idleness of its port is the daemon's affair.
        let decided = self.header.credit_stages() & flow.stage.bit() != 0;
        let mark = if decided {
            self.header.credit_mark()
        } else {
            0
        };
        self.credit.mark = self.credit.mark.on_credit(mark);
        enough
    }

    /// Whether a sleeping daemon need not be woken for what was just published: a work request on
    /// credit, or its completion, while nothing waits on any port and neither credit nor slots run
    /// low. It reads them when something wakes it. What a daemon is told that nobody waits for
    /// would otherwise cost a wake-up each, on a host that has better things to do.
    pub(crate) fn can_tell_later(&mut self) -> bool {
        let header = &self.header;
        header.after_publish() == attention::SLEEPING
            && header.credit_stages() & CREDIT_WHOLE != 0
            && self.credit.key & WHOLE != 0
            && self.pending.is_empty()
            && self.has_slots()
            && self.has_plenty()
    }

    /// Whether few records wait to be read, or the daemon was told of it a moment ago.
    fn has_slots(&mut self) -> bool {
        let slots = self.pending.seen.len() as u64;
        let published = self.producer.next_tag();
        if self.producer.backlog() < slots / 2 || published < self.told + slots / 8 {
            return true;
        }
        self.told = published;
        false
    }

    /// Whether there is more than half of the credit that there was, or there is more by now. If
    /// not, the daemon is to be told once, and once more when half of the rest is gone.
    fn has_plenty(&mut self) -> bool {
        let port = self.credit.port;
        self.credit.left >= self.credit.low || self.credit.switch(port, self.producer.credit(port))
    }

    /// Whether fewer than half of the slots are held by flows that wait.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        (self.pending.count as usize) < self.pending.seen.len() / 2
    }

    /// Flows that hold slots. Their tags are not needed any more.
    pub(crate) fn waiting(&self) -> Vec<SlotRef> {
        self.pending
            .slots()
            .map(|slot| SlotRef { slot, tag: 0 })
            .collect()
    }

    /// Publishes a message; false if there is no slot.
    #[inline]
    pub(crate) fn publish(&mut self, message: Owed) -> bool {
        match message {
            Owed::Say(record) => self.producer.publish(&record).is_ok(),
            Owed::Withdraw(at, permitted) => self.producer.withdraw(at, permitted).is_ok(),
            // Two records: `Lane::pay` makes them.
            Owed::Repay(_) => false,
        }
    }

    /// After publishing: wakes the daemon if it asked for it.
    #[inline]
    pub(crate) fn notify(&self) {
        let header = &self.header;
        let seen = header.after_publish();
        if seen != 0 && header.answer(self.index, seen) {
            self.session.ring();
        }
    }
}
