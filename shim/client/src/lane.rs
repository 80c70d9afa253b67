//! One thread's lane: submit, complete, cancel, hint.
//!
//! A submit on credit is a handful of stores; a submit that is gated returns a ticket whose
//! permit [`crate::wait`] awaits. Nothing here blocks, and nothing here can fail: whatever the
//! daemon cannot take is permitted at once and counted as bypassed.

mod loan;
mod owed;

use std::cell::Cell;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use laxity_shm::layout::{CREDIT_WHOLE, attention};
use laxity_shm::permit::FLOW_BYTES_MAX;
use laxity_shm::record::{Flow, Record, Stage};
use laxity_shm::sleep::now_ns;

pub use loan::Loan;
pub(crate) use owed::Owed;

use crate::client::Core;
use crate::hint::Hint;
use crate::lane_binding::LaneBinding;
use crate::peers;
use crate::session::NoSeat;
use crate::stats::LaneCounters;
use crate::ticket::{Mark, SEATS, Ticket};
use crate::wait::Spin;

/// Before a lane that found no free seat looks again.
const SEAT_RETRY_NS: u64 = 10_000_000;

/// A number for a binding that no other binding of this process has, so that a ticket can be used
/// on the lane that gave it only: any other takes it for one of a binding that is lost.
fn next_number() -> u64 {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    // Relaxed: only that it is unique matters.
    NUMBER.fetch_add(1, Ordering::Relaxed) % (SEATS - 1) + 1
}

/// One thread's way to the daemon. `Send`, not `Sync`.
#[derive(Debug)]
pub struct Lane {
    pub(crate) core: Arc<Core>,
    pub(crate) counters: Arc<LaneCounters>,
    pub(crate) binding: Option<LaneBinding>,
    /// Number of the current binding, 0 before the first; tickets of others are bypassed.
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
            binding: None,
            seat: 0,
            owed: VecDeque::new(),
            spin: Spin::default(),
            _not_sync: PhantomData,
        };
        lane.find_binding();
        lane
    }

    /// Submits a flow. Never blocks: the ticket is permitted at once (credit, bypass, `observe`) or
    /// waits for its permit.
    #[inline(always)]
    pub fn submit(&mut self, flow: &Flow) -> Ticket {
        let mut ticket = Ticket::default();
        self.submit_into(flow, &mut ticket);
        ticket
    }

    /// [`Lane::submit`], with the ticket where it is to stay. What was in it is forgotten, as if
    /// dropped.
    ///
    /// The body is the path on credit, and only as long as nothing is unusual: one comparison
    /// finds out that this kind of flow has credit at hand, one look at the attention word,
    /// after the record is out, that nobody wants anything. All calls are in tail position, so
    /// that no register has to be saved.
    #[inline(always)]
    pub fn submit_into(&mut self, flow: &Flow, ticket: &mut Ticket) {
        if !self.submit_on_hand(flow, ticket) {
            self.submit_otherwise(flow, ticket);
        }
    }

    /// On credit that is at hand, if it is.
    #[inline(always)]
    fn submit_on_hand(&mut self, flow: &Flow, ticket: &mut Ticket) -> bool {
        if let Some(binding) = &mut self.binding
            && flow.key() == binding.credit.key
            && let Some(tag) = binding
                .producer
                .publish_on_credit(flow, &mut binding.credit.left)
        {
            let attention = binding.header.after_publish();
            *ticket = Ticket {
                tag,
                total: flow.bytes,
                permitted: 0,
                mark: binding.credit.mark,
            };
            if attention != 0 {
                self.attend(ticket);
            }
            true
        } else {
            false
        }
    }

    /// [`Lane::submit_into`] for work requests. Their credit is leave to send as long as they are
    /// alone on their port, and no longer; see [`Flow::whole`].
    ///
    /// `nic` says by which number the daemon that the lane has now knows the flow's NIC. It is
    /// asked here, since the lane may find its daemon here: a number that was asked for before is
    /// none of that daemon's.
    ///
    /// `false` if the lane is full and the daemon alive, so that there will be room: nothing was
    /// submitted. Who can have the work request wait does so, and tries again a little later.
    #[inline]
    #[must_use]
    pub fn submit_whole_into(
        &mut self,
        flow: &mut Flow,
        nic: impl FnOnce() -> u8,
        ticket: &mut Ticket,
    ) -> bool {
        self.seek();
        if self.binding.is_none() {
            *ticket = self.bypassed(flow.bytes);
            return true;
        }
        flow.nic = nic();
        if let Some(binding) = &mut self.binding
            && flow.stage != Stage::Collective
            && binding.header.credit_stages() & CREDIT_WHOLE == 0
        {
            binding.credit.key = 0;
        }
        if self.submit_on_hand(flow, ticket) {
            return true;
        }
        *ticket = match self.submit_gated(flow) {
            Some(submitted) => submitted,
            None if self.will_have_room() => return false,
            None => self.submit_to_full_lane(flow),
        };
        true
    }

    /// No credit is at hand.
    #[inline(never)]
    fn submit_otherwise(&mut self, flow: &Flow, ticket: &mut Ticket) {
        *ticket = match self.submit_gated(flow) {
            Some(submitted) => submitted,
            None => self.submit_to_full_lane(flow),
        };
    }

    /// A flow for which no credit is at hand: gated, unless credit can be found.
    /// `None` if the lane is full.
    #[inline]
    fn submit_gated(&mut self, flow: &Flow) -> Option<Ticket> {
        if flow.peer != 0 {
            self.introduce(flow.peer);
        }
        let Some(binding) = &mut self.binding else {
            return self.submit_unbound(flow);
        };
        let seen = binding.header.attention();
        if seen & attention::NOT_ENFORCED != 0 || !self.owed.is_empty() {
            return self.submit_slowly(flow);
        }
        if flow.bytes > FLOW_BYTES_MAX {
            return Some(self.bypassed(flow.bytes));
        }
        let stages = binding.header.credit_stages();
        let idle = flow.whole && stages & CREDIT_WHOLE != 0;
        if (idle || stages & flow.stage.bit() != 0) && binding.find_credit(flow) {
            return self.submit_on_credit(flow);
        }
        let at = binding
            .producer
            .publish_gated(&Record::Submit(*flow))
            .ok()?;
        binding.notify();
        if binding.pending.is_empty() {
            self.spin.quiet_since_ns = 0;
        }
        binding.pending.add(at);
        let mark = Mark::of(self.seat).gated(at.slot);
        Some(Ticket {
            tag: at.tag,
            total: flow.bytes,
            permitted: 0,
            mark,
        })
    }

    /// Tells the daemon who a peer is, once per lane: whatever uses credit came this way before.
    fn introduce(&mut self, peer: u8) {
        if let Some(binding) = &mut self.binding
            && binding.introduces(peer)
            && let Some(address) = peers::address(peer)
        {
            self.say(Record::Peer { peer, address });
        }
    }

    /// On credit that was just found: the lane may be full as far as known.
    fn submit_on_credit(&mut self, flow: &Flow) -> Option<Ticket> {
        let Some(binding) = &mut self.binding else {
            return Some(self.bypassed(flow.bytes));
        };
        let record = Record::SubmitOnCredit {
            flow: *flow,
            observed: false,
        };
        let at = binding.producer.publish(&record).ok()?;
        binding.credit.left -= flow.bytes;
        let mut ticket = Ticket {
            tag: at.tag,
            total: flow.bytes,
            permitted: 0,
            mark: binding.credit.mark,
        };
        self.attend(&mut ticket);
        Some(ticket)
    }

    /// A flow on credit was published and the daemon may want something: to be woken, or that
    /// nothing goes out on credit any more, this flow included.
    #[cold]
    #[inline(never)]
    fn attend(&mut self, ticket: &mut Ticket) {
        let Some(binding) = &mut self.binding else {
            return;
        };
        if !binding.can_tell_later() {
            binding.notify();
        }
        let seen = binding.header.attention();
        if seen & attention::NOT_ENFORCED == 0 {
            return;
        }
        binding.credit.key = 0;
        if seen & attention::UNSCHEDULED != 0 {
            self.withdraw(ticket);
            *ticket = self.bypassed(ticket.total);
        } else {
            self.counters.observed_bytes.add(ticket.total);
            ticket.mark = ticket.mark.observed();
        }
    }

    /// `bytes` of the flow have left the wire. Tell the daemon for every byte that was permitted:
    /// it counts what is in flight. For bypassed flows it is a no-op.
    pub fn complete(&mut self, ticket: &Ticket, bytes: u64) {
        if self.knows(ticket) {
            self.say(Record::Completed {
                tag: ticket.tag,
                bytes,
            });
        }
    }

    /// Gives up a flow: what was not permitted will not be sent, what was permitted and not
    /// completed never will be.
    pub fn cancel(&mut self, mut ticket: Ticket) {
        if self.knows(&ticket) {
            self.withdraw(&mut ticket);
        }
    }

    /// Looks for a daemon if there is none, as a submit would.
    #[inline]
    pub fn seek(&mut self) {
        if self.binding.is_none() {
            self.find_binding();
        }
    }

    /// Tells the daemon something about requests, batches and layers.
    pub fn hint(&mut self, hint: Hint) {
        self.seek();
        // Only hints are dropped in mode `off`: what became of flows that the daemon knows it must
        // learn, or their slots and its accounts would be lost for good.
        if let Some(binding) = &self.binding
            && binding.header.attention() & attention::OFF != 0
        {
            return;
        }
        self.say(hint.record());
    }

    /// Whether flows submitted now are scheduled (or, in mode `observe`, accounted).
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.binding
            .as_ref()
            .is_some_and(|binding| binding.session.lost_at().is_none())
    }

    /// The daemon was told of this flow, and it is the daemon that we have.
    fn knows(&self, ticket: &Ticket) -> bool {
        ticket.mark.is_of(self.seat) && self.binding.is_some()
    }

    /// Withdraws what is left of a flow that the daemon knows.
    pub(crate) fn withdraw(&mut self, ticket: &mut Ticket) {
        let at = ticket.at();
        if ticket.mark.is_gated() {
            if let Some(binding) = &mut self.binding {
                binding.pending.remove(at.slot);
            }
            self.send(Owed::Withdraw(at, ticket.permitted));
        } else {
            self.send(Owed::Say(Record::Cancelled {
                tag: at.tag,
                granted: ticket.permitted,
            }));
        }
        // No completion of it means anything from here on.
        ticket.mark = Mark::DONE;
    }

    fn say(&mut self, record: Record) {
        self.send(Owed::Say(record));
    }

    #[cold]
    fn submit_unbound(&mut self, flow: &Flow) -> Option<Ticket> {
        self.find_binding();
        // A NIC that was asked for before there was a daemon is none that it knows.
        if self.binding.is_some() && flow.nic != u8::MAX {
            self.submit_gated(flow)
        } else {
            Some(self.bypassed(flow.bytes))
        }
    }

    /// Something is unusual: bypass, `observe`, the daemon is gone, or messages are owed.
    #[cold]
    fn submit_slowly(&mut self, flow: &Flow) -> Option<Ticket> {
        self.notice_hangup();
        let Some(binding) = &mut self.binding else {
            return Some(self.bypassed(flow.bytes));
        };
        let seen = binding.header.attention();
        if seen & attention::GONE != 0 || binding.session.lost_at().is_some() {
            self.lose_binding();
            // The flow names its NIC by a number of the daemon that is gone, and maybe of no other.
            return Some(self.bypassed(flow.bytes));
        }
        if !self.owed.is_empty() {
            self.pay();
            if !self.owed.is_empty() {
                return None;
            }
            return self.submit_gated(flow);
        }
        if seen & attention::UNSCHEDULED != 0 || flow.bytes > FLOW_BYTES_MAX {
            return Some(self.bypassed(flow.bytes));
        }
        if seen & attention::OBSERVE == 0 {
            // What led here is over: a bypass may end at any time. To say "observed" to a daemon
            // that never ordered it would be a protocol violation.
            return self.submit_gated(flow);
        }
        let record = Record::SubmitOnCredit {
            flow: *flow,
            observed: true,
        };
        let at = binding.producer.publish(&record).ok()?;
        binding.notify();
        self.counters.observed_bytes.add(flow.bytes);
        let mark = Mark::of(self.seat).observed();
        Some(Ticket {
            tag: at.tag,
            total: flow.bytes,
            permitted: 0,
            mark,
        })
    }

    #[cold]
    fn submit_to_full_lane(&mut self, flow: &Flow) -> Ticket {
        self.notice_hangup();
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
    pub(crate) fn find_binding(&mut self) {
        let Some(session) = self.core.session() else {
            return;
        };
        let seat = match session.sit() {
            Ok(seat) => seat,
            Err(why) => {
                self.core.look_again(now_ns() + SEAT_RETRY_NS);
                let full = why == NoSeat::AllTaken;
                self.counters.lane_full.add(full.into());
                return;
            }
        };
        self.seat = next_number();
        self.binding = Some(LaneBinding::new(session, seat, self.seat));
    }

    /// The session is lost: flows of this binding resolve as bypassed when they are polled.
    #[cold]
    pub(crate) fn lose_binding(&mut self) {
        if self.binding.take().is_some() {
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
            Owed::Say(_) | Owed::Repay(_) => None,
        });
        if let Some(binding) = self.binding.take() {
            let gated = owed.chain(binding.waiting()).collect();
            binding.leave(gated);
        }
        self.core.retire(&self.counters);
    }
}
