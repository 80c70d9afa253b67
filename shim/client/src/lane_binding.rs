//! The state of a lane with a seat: the producer's half of a shared lane, its credit, and waiting
//! flows.

use std::sync::Arc;

use laxity_shm::layout::{CREDIT_PORTS, CREDIT_WHOLE, attention};
use laxity_shm::permit::published;
use laxity_shm::producer::{Producer, SlotRef};
use laxity_shm::record::{Flow, WHOLE};
use laxity_shm::region::HeaderRef;

use crate::lane::Unsent;
use crate::session::{Seat, Session};
use crate::ticket::TicketState;

/// A lane with a seat in a region. Fields are in the order in which a submit on credit needs them.
#[derive(Debug)]
pub(crate) struct LaneBinding {
    pub(crate) header: HeaderRef,
    pub(crate) credit: Credit,
    pub(crate) producer: Producer,
    pub(crate) pending: Pending,
    pub(crate) session: Arc<Session>,
    pub(crate) index: u16,
    pub(crate) turn: u64,
    /// Tag of the record at which the daemon was last woken because many records wait.
    last_wake_tag: u64,
    /// Bit set of the peers that were introduced to the daemon on this lane.
    introduced: [u64; 4],
}

/// Credit of a lane. That of the last used port is at hand, and the others' is in a table.
#[derive(Debug)]
pub(crate) struct Credit {
    /// The [`Flow::key`] of flows that may use the credit at hand, 0 for none.
    pub(crate) key: u64,
    /// Level and DSCP of a flow on the credit at hand.
    pub(crate) state: TicketState,
    /// Bytes of credit at hand.
    pub(crate) left: u64,
    /// Number of bytes below which the daemon should be woken: half of what there was.
    low: u64,
    /// Index of the port whose credit is at hand.
    pub(crate) port: usize,
    /// Remaining bytes per port, without those at hand.
    parked: [u64; CREDIT_PORTS],
    /// Bytes of credit received per port, since the lane began.
    seen: [u64; CREDIT_PORTS],
}

impl Credit {
    /// Returns the credit of a lane. `used` is what earlier owners of the seat have used.
    fn new(used: [u64; CREDIT_PORTS], state: TicketState) -> Self {
        Self { key: 0, state, left: 0, low: 0, port: 0, parked: [0; CREDIT_PORTS], seen: used }
    }

    /// Returns the bytes used per port since the lane began.
    fn used(&self) -> [u64; CREDIT_PORTS] {
        let mut used = self.seen;
        used[self.port] -= self.left;
        for (used, parked) in used.iter_mut().zip(self.parked) {
            *used -= parked;
        }
        used
    }

    /// Returns unused bytes of `port` to the credit.
    pub(crate) fn give_back(&mut self, port: usize, bytes: u64) {
        if port == self.port {
            self.left += bytes;
        } else {
            self.parked[port] += bytes;
        }
    }

    /// Makes the credit of `port` the one at hand, with new credit added. Reports whether there was
    /// any.
    fn switch(&mut self, port: usize, permitted: u64) -> bool {
        self.parked[self.port] += self.left;
        self.port = port;
        let more = permitted.saturating_sub(self.seen[port]);
        self.seen[port] += more;
        self.left = core::mem::take(&mut self.parked[port]) + more;
        self.low = self.left / 2;
        more > 0
    }
}

/// Gated flows that wait, by slot.
#[derive(Debug)]
pub(crate) struct Pending {
    /// The last seen state word of each slot's flow.
    seen: Box<[u64]>,
    /// Bit set of the slots that wait.
    waits: Box<[u64]>,
    count: u32,
    /// Flows that continue those of the last daemon: their slots, and the bytes permitted before.
    continued: Vec<(u16, u64)>,
}

impl Pending {
    fn new(slots: usize) -> Self {
        let waits = vec![0; slots.div_ceil(64)].into_boxed_slice();
        Self { seen: vec![0; slots].into_boxed_slice(), waits, count: 0, continued: Vec::new() }
    }

    #[inline]
    pub(crate) fn add(&mut self, at: SlotRef) {
        let slot = usize::from(at.slot);
        self.seen[slot] = published(at.tag);
        self.waits[slot / 64] |= 1 << (slot % 64);
        self.count += 1;
    }

    /// Removes a flow that had its last permit or was withdrawn.
    #[inline]
    pub(crate) fn remove(&mut self, slot: u16) {
        let slot = usize::from(slot);
        self.waits[slot / 64] &= !(1 << (slot % 64));
        self.count -= 1;
        if !self.continued.is_empty() {
            self.continued.retain(|(other, _)| usize::from(*other) != slot);
        }
    }

    /// Sets the bytes of a slot's flow that the last daemon permitted. This daemon has the rest.
    pub(crate) fn continues(&mut self, slot: u16, permitted: u64) {
        self.continued.push((slot, permitted));
    }

    /// Returns the bytes of a slot's flow that the last daemon permitted.
    #[inline]
    pub(crate) fn before(&self, slot: u16) -> u64 {
        let of_slot = |(other, bytes): &(u16, u64)| (*other == slot).then_some(*bytes);
        self.continued.iter().find_map(of_slot).unwrap_or(0)
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

    pub(crate) fn slots(&self) -> impl Iterator<Item = u16> {
        self.waits.iter().enumerate().flat_map(|(i, &word)| {
            let bits = core::iter::successors(Some(word), |bits| Some(bits & bits.wrapping_sub(1)));
            bits.take_while(|bits| *bits != 0)
                .map(move |bits| (i * 64) as u16 + bits.trailing_zeros() as u16)
        })
    }
}

impl LaneBinding {
    /// Returns the binding of a seat. Tickets contain its `number`.
    pub(crate) fn new(session: Arc<Session>, seat: Seat, number: u64) -> Self {
        Self {
            header: HeaderRef::new(&session.region),
            credit: Credit::new(seat.credit_used, TicketState::of(number)),
            pending: Pending::new(seat.producer.memory().slots().len()),
            producer: seat.producer,
            index: seat.index,
            turn: seat.turn,
            last_wake_tag: 0,
            introduced: [0; 4],
            session,
        }
    }

    /// Reports whether a peer has not been introduced to the daemon on this lane, and marks it as
    /// introduced.
    #[inline]
    pub(crate) fn introduces(&mut self, peer: u8) -> bool {
        let (word, bit) = (usize::from(peer / 64), 1 << (peer % 64));
        let known = self.introduced[word] & bit != 0;
        self.introduced[word] |= bit;
        !known
    }

    /// Returns the seat to the session. `gated` are the flows that hold slots.
    pub(crate) fn return_lane(self, gated: Vec<SlotRef>) {
        let Self { index, producer, turn, .. } = self;
        let seat = Seat { index, producer, credit_used: self.credit.used(), turn, leftover: None };
        self.session.return_lane(seat, gated);
    }

    /// Reports whether there is credit for this flow, and makes it the credit at hand.
    pub(crate) fn find_credit(&mut self, flow: &Flow) -> bool {
        let Some(port) = flow.credit_port() else { return false };
        self.credit.switch(port, self.producer.credit(port));
        let enough = self.credit.left >= flow.bytes;
        self.credit.key = if enough { flow.key() } else { 0 };
        // The daemon decides the level of a flow that goes because its port is idle.
        let decided = self.header.credit_stages() & flow.stage.bit() != 0;
        let mark = if decided { self.header.credit_mark() } else { 0 };
        self.credit.state = self.credit.state.on_credit(mark);
        enough
    }

    /// Reports whether a sleeping daemon need not be woken for the last record. That is so for a
    /// work request on credit, or its completion, while nothing waits on any port and neither
    /// credit nor slots run low. The daemon reads such records when something else wakes it.
    pub(crate) fn can_notify_later(&mut self) -> bool {
        let header = &self.header;
        header.after_publish() == attention::SLEEPING
            && header.credit_stages() & CREDIT_WHOLE != 0
            && self.credit.key & WHOLE != 0
            && self.pending.is_empty()
            && self.has_slots()
            && self.has_plenty()
    }

    /// Reports whether few records wait, or the daemon was woken for them recently.
    fn has_slots(&mut self) -> bool {
        let slots = self.pending.seen.len() as u64;
        let published = self.producer.next_tag();
        if self.producer.backlog() < slots / 2 || published < self.last_wake_tag + slots / 8 {
            return true;
        }
        self.last_wake_tag = published;
        false
    }

    /// Reports whether more than half of the credit is left, or new credit has come. If not, the
    /// daemon is woken once, and again when half of the rest is used.
    fn has_plenty(&mut self) -> bool {
        let port = self.credit.port;
        self.credit.left >= self.credit.low || self.credit.switch(port, self.producer.credit(port))
    }

    /// Reports whether fewer than half of the slots are held by flows that wait.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        (self.pending.count as usize) < self.pending.seen.len() / 2
    }

    /// Returns the flows that hold slots, without their tags, which are not needed any more.
    pub(crate) fn waiting(&self) -> Vec<SlotRef> {
        self.pending.slots().map(|slot| SlotRef { slot, tag: 0 }).collect()
    }

    /// Publishes a record. Returns false if there is no slot.
    #[inline]
    pub(crate) fn publish(&mut self, message: Unsent) -> bool {
        match message {
            Unsent::Record(record) => self.producer.publish(&record).is_ok(),
            Unsent::Withdraw(at, permitted) => self.producer.withdraw(at, permitted).is_ok(),
            // `Lane::send_unsent` makes the two records.
            Unsent::Repay(_) => false,
        }
    }

    /// Wakes the daemon after a publish if it asked for that.
    #[inline]
    pub(crate) fn notify(&self) {
        let header = &self.header;
        let seen = header.after_publish();
        if seen != 0 && header.answer(self.index, seen) {
            self.session.wake_daemon();
        }
    }
}
