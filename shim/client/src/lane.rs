//! One thread's lane: submit, complete, cancel, hint.
//!
//! A submit on credit is a handful of stores; a submit that is gated returns a ticket whose
//! permit [`crate::wait`] awaits. Nothing here blocks, and nothing here can fail: whatever the
//! daemon cannot take is granted at once and counted as bypassed.

use std::cell::Cell;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use laxity_shm::layout::{CREDIT_PORTS, attention};
use laxity_shm::permit::{FLOW_BYTES_MAX, published};
use laxity_shm::producer::{Producer, SlotRef};
use laxity_shm::record::{Flow, Record};
use laxity_shm::region::Region;
use laxity_shm::sleep::now_ns;

use crate::client::Core;
use crate::hint::Hint;
use crate::session::{Seat, Session};
use crate::stats::LaneCounters;
use crate::ticket::{Mark, Ticket};
use crate::wait::Spin;

/// Messages that may wait for a slot. A daemon that is alive never lets them; see `owe`.
const OWED_MAX: usize = 1 << 16;
/// Before a lane that found no free seat looks again.
const SEAT_RETRY_NS: u64 = 10_000_000;

/// A lane with a seat in a region.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) session: Arc<Session>,
    pub(crate) region: Arc<Region>,
    pub(crate) index: u16,
    pub(crate) producer: Producer,
    credit: Credit,
    pub(crate) turn: u64,
    pub(crate) pending: Pending,
}

/// Leave to send ahead of any permit, per port.
#[derive(Debug)]
struct Credit {
    /// Left, as far as it was looked up.
    left: [u64; CREDIT_PORTS],
    /// Taken note of, in bytes since the lane began.
    seen: [u64; CREDIT_PORTS],
}

impl Credit {
    /// Takes `bytes`, looking the shared counter up only when short.
    #[inline]
    fn take(&mut self, producer: &Producer, port: usize, bytes: u64) -> bool {
        if self.left[port] < bytes {
            let more = producer.credit(port).saturating_sub(self.seen[port]);
            self.seen[port] += more;
            self.left[port] += more;
            if self.left[port] < bytes {
                return false;
            }
        }
        self.left[port] -= bytes;
        true
    }

    /// Used up, in bytes since the lane began.
    fn used(&self) -> [u64; CREDIT_PORTS] {
        core::array::from_fn(|port| self.seen[port] - self.left[port])
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
    fn add(&mut self, at: SlotRef) {
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

/// A number for a place that no other place of this process has, so that a ticket can be used on
/// the lane that gave it only: any other takes it for one of a place that is lost.
fn next_number() -> u64 {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    // Relaxed: only that it is unique matters.
    NUMBER.fetch_add(1, Ordering::Relaxed)
}

/// A message that found no slot.
#[derive(Clone, Copy, Debug)]
enum Owed {
    Say(Record),
    Withdraw(SlotRef, u64),
}

/// One thread's way to the daemon. `Send`, not `Sync`.
#[derive(Debug)]
pub struct Lane {
    pub(crate) core: Arc<Core>,
    pub(crate) counters: Arc<LaneCounters>,
    pub(crate) place: Option<Place>,
    /// Number of the current place; tickets of others are bypassed.
    pub(crate) seat: u64,
    owed: VecDeque<Owed>,
    pub(crate) spin: Spin,
    _not_sync: PhantomData<Cell<()>>,
}

impl Lane {
    pub(crate) fn new(core: Arc<Core>, counters: Arc<LaneCounters>) -> Self {
        let mut lane = Self {
            core,
            counters,
            place: None,
            seat: 0,
            owed: VecDeque::new(),
            spin: Spin::default(),
            _not_sync: PhantomData,
        };
        lane.find_place();
        lane
    }

    /// Submits a flow. Never blocks: the ticket is granted at once (credit, bypass, `observe`) or
    /// waits for its permit.
    #[inline]
    pub fn submit(&mut self, flow: &Flow) -> Ticket {
        let Some(place) = &mut self.place else {
            return self.submit_without_place(flow);
        };
        let header = place.region.header();
        let seen = header.attention();
        if seen & attention::NOT_ENFORCED != 0 || !self.owed.is_empty() {
            return self.submit_slowly(flow);
        }
        if header.credit_stages() & flow.stage.bit() != 0
            && let Some(port) = flow.credit_port()
            && place.credit.take(&place.producer, port, flow.bytes)
        {
            let record = Record::SubmitOnCredit {
                flow: *flow,
                observed: false,
            };
            let Ok(at) = place.producer.publish(&record) else {
                place.credit.left[port] += flow.bytes;
                return self.submit_to_full_lane(flow);
            };
            self.counters.scheduled_bytes.add(flow.bytes);
            let mark = Mark::on_credit(header.credit_mark());
            place.notify();
            return Ticket {
                tag: at.tag,
                seat: self.seat,
                total: flow.bytes,
                granted: 0,
                mark,
            };
        }
        if flow.bytes > FLOW_BYTES_MAX {
            return self.bypassed(flow.bytes);
        }
        let Ok(at) = place.producer.publish_gated(&Record::Submit(*flow)) else {
            return self.submit_to_full_lane(flow);
        };
        place.notify();
        if place.pending.is_empty() {
            self.spin.quiet_since_ns = 0;
        }
        place.pending.add(at);
        let mark = Mark::gated(at.slot);
        Ticket {
            tag: at.tag,
            seat: self.seat,
            total: flow.bytes,
            granted: 0,
            mark,
        }
    }

    /// `bytes` of the flow have left the wire. Tell the daemon for every byte that was granted:
    /// it counts what is in flight. For bypassed flows it is a no-op.
    pub fn complete(&mut self, ticket: &Ticket, bytes: u64) {
        if self.knows(ticket) {
            self.say(Record::Completed {
                tag: ticket.tag,
                bytes,
            });
        }
    }

    /// Gives up a flow: what was not granted will not be sent, what was granted and not completed
    /// never will be.
    pub fn cancel(&mut self, mut ticket: Ticket) {
        if self.knows(&ticket) {
            self.withdraw(&mut ticket);
        }
    }

    /// Tells the daemon something about requests, batches and layers.
    pub fn hint(&mut self, hint: Hint) {
        if self.place.is_none() {
            self.find_place();
        }
        // Only hints are dropped in mode `off`: what became of flows that the daemon knows it must
        // learn, or their slots and its books would be lost for good.
        if let Some(place) = &self.place
            && place.region.header().attention() & attention::OFF != 0
        {
            return;
        }
        self.say(hint.record());
    }

    /// Whether flows submitted now are scheduled (or, in mode `observe`, accounted).
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.place
            .as_ref()
            .is_some_and(|place| place.session.lost_at().is_none())
    }

    /// The daemon was told of this flow, and it is the daemon that we have.
    fn knows(&self, ticket: &Ticket) -> bool {
        ticket.tag != 0 && ticket.seat == self.seat && self.place.is_some()
    }

    /// Withdraws what is left of a flow that the daemon knows.
    pub(crate) fn withdraw(&mut self, ticket: &mut Ticket) {
        let at = ticket.at();
        if ticket.mark.is_gated() {
            if let Some(place) = &mut self.place {
                place.pending.remove(at.slot);
            }
            self.send(Owed::Withdraw(at, ticket.granted));
        } else {
            self.send(Owed::Say(Record::Cancelled {
                tag: at.tag,
                granted: ticket.granted,
            }));
        }
        ticket.mark = Mark::DONE;
        // No completion of it means anything from here on.
        ticket.tag = 0;
    }

    /// Every message found its slot.
    pub(crate) fn owed_nothing(&self) -> bool {
        self.owed.is_empty()
    }

    fn say(&mut self, record: Record) {
        self.send(Owed::Say(record));
    }

    fn send(&mut self, message: Owed) {
        if !self.owed.is_empty() {
            self.pay();
        }
        let Some(place) = &mut self.place else { return };
        if place.region.header().attention() & attention::GONE != 0 {
            if place.session.lost_at().is_some() {
                self.lose_place();
            }
            return;
        }
        if self.owed.is_empty() && place.publish(message) {
            place.notify();
        } else {
            self.owe(message);
        }
    }

    /// Keeps a message for later. Completions must not be lost: the daemon would count their
    /// bytes as in flight for ever. A daemon that lets this many pile up is not alive.
    #[cold]
    fn owe(&mut self, message: Owed) {
        if self.owed.len() >= OWED_MAX {
            if let Some(place) = &self.place {
                place.session.lose();
            }
            self.lose_place();
            return;
        }
        self.owed.push_back(message);
    }

    /// Sends what is owed, as far as there are slots.
    #[cold]
    pub(crate) fn pay(&mut self) {
        let Some(place) = &mut self.place else {
            return self.owed.clear();
        };
        let before = self.owed.len();
        while let Some(&message) = self.owed.front() {
            if !place.publish(message) {
                break;
            }
            self.owed.pop_front();
        }
        if self.owed.len() != before {
            place.notify();
        }
    }

    #[cold]
    fn submit_without_place(&mut self, flow: &Flow) -> Ticket {
        self.find_place();
        if self.place.is_some() {
            self.submit(flow)
        } else {
            self.bypassed(flow.bytes)
        }
    }

    /// Something is unusual: bypass, `observe`, the daemon is gone, or messages are owed.
    #[cold]
    fn submit_slowly(&mut self, flow: &Flow) -> Ticket {
        let Some(place) = &mut self.place else {
            return self.submit_without_place(flow);
        };
        let seen = place.region.header().attention();
        if seen & attention::GONE != 0 || place.session.lost_at().is_some() {
            self.lose_place();
            return self.submit_without_place(flow);
        }
        if !self.owed.is_empty() {
            self.pay();
            if !self.owed.is_empty() {
                return self.submit_to_full_lane(flow);
            }
            return self.submit(flow);
        }
        if seen & attention::UNSCHEDULED != 0 || flow.bytes > FLOW_BYTES_MAX {
            return self.bypassed(flow.bytes);
        }
        // Observe.
        let record = Record::SubmitOnCredit {
            flow: *flow,
            observed: true,
        };
        let at = match place.producer.publish(&record) {
            Ok(at) => at,
            Err(_) => return self.submit_to_full_lane(flow),
        };
        place.notify();
        self.counters.observed_bytes.add(flow.bytes);
        let mark = Mark::OBSERVED;
        Ticket {
            tag: at.tag,
            seat: self.seat,
            total: flow.bytes,
            granted: 0,
            mark,
        }
    }

    #[cold]
    fn submit_to_full_lane(&mut self, flow: &Flow) -> Ticket {
        self.counters.lane_full.add(1);
        self.bypassed(flow.bytes)
    }

    /// A flow that the daemon is not told of.
    fn bypassed(&mut self, bytes: u64) -> Ticket {
        self.counters.bypassed_bytes.add(bytes);
        self.counters.bypassed_flows.add(1);
        Ticket::bypassed(bytes)
    }

    /// Takes a seat if there is a daemon, or goes one step towards finding one.
    #[cold]
    pub(crate) fn find_place(&mut self) {
        let Some(session) = self.core.session() else {
            return;
        };
        let Some(seat) = session.sit() else {
            self.core.look_again(now_ns() + SEAT_RETRY_NS);
            self.counters.lane_full.add(1);
            return;
        };
        self.seat = next_number();
        self.place = Some(Place::new(session, seat));
    }

    /// The session is lost: flows of this place resolve as bypassed when they are polled.
    #[cold]
    pub(crate) fn lose_place(&mut self) {
        if self.place.take().is_some() {
            // Tickets carry the old number.
            self.seat = next_number();
            self.owed.clear();
            self.core.look_again(0);
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.pay();
        let owed = self.owed.drain(..).filter_map(|message| match message {
            Owed::Withdraw(at, _) => Some(at),
            Owed::Say(_) => None,
        });
        if let Some(place) = self.place.take() {
            let gated = owed.chain(place.pending_flows()).collect();
            place.leave(gated);
        }
        self.core.retire(&self.counters);
    }
}

impl Place {
    fn new(session: Arc<Session>, seat: Seat) -> Self {
        Self {
            region: Arc::clone(&session.region),
            session,
            index: seat.index,
            pending: Pending::new(seat.producer.memory().slots().len()),
            producer: seat.producer,
            credit: Credit {
                left: [0; CREDIT_PORTS],
                seen: seat.credit_used,
            },
            turn: seat.turn,
        }
    }

    fn leave(self, gated: Vec<SlotRef>) {
        let seat = Seat::taken(self.index, self.producer, self.credit.used(), self.turn);
        self.session.leave(seat, gated);
    }

    /// Flows that hold slots. Their tags are not needed any more.
    fn pending_flows(&self) -> Vec<SlotRef> {
        self.pending
            .slots()
            .map(|slot| SlotRef { slot, tag: 0 })
            .collect()
    }

    /// Publishes a message; false if there is no slot.
    #[inline]
    fn publish(&mut self, message: Owed) -> bool {
        match message {
            Owed::Say(record) => self.producer.publish(&record).is_ok(),
            Owed::Withdraw(at, granted) => self.producer.withdraw(at, granted).is_ok(),
        }
    }

    /// After publishing: wakes the daemon if it asked for it.
    #[inline]
    pub(crate) fn notify(&self) {
        let header = self.region.header();
        let seen = header.after_publish();
        if seen != 0 && header.answer(self.index, seen) {
            self.session.ring();
        }
    }
}
