//! One thread's lane: submit, complete, cancel, hint.
//!
//! A submit on credit is a few stores. A gated submit returns a ticket whose permit [`crate::wait`]
//! awaits. No function here blocks or fails: a flow that the daemon cannot take is permitted at
//! once and counted as bypassed.

pub(crate) mod handover;
mod loan;
mod unsent;

use std::cell::Cell;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use laxity_shm::layout::{CREDIT_WHOLE, attention};
use laxity_shm::permit::FLOW_BYTES_MAX;
use laxity_shm::record::{Flow, Record, Stage};

use handover::Handover;
pub use loan::Loan;
pub(crate) use unsent::Unsent;

use crate::Hint;
use crate::client::Core;
use crate::lane_binding::LaneBinding;
use crate::peers;
use crate::session::NoFreeLane;
use crate::stats::LaneCounters;
use crate::ticket::{SEATS, Ticket, TicketState};
use crate::wait::Spin;

/// Time before a lane looks for a seat again if there was none.
const SEAT_RETRY_NS: u64 = 10_000_000;

/// Returns a number of a binding that is unique in this process. A ticket can be used only on the
/// lane that returned it. Any other lane treats it as a ticket of a lost binding.
fn next_number() -> u64 {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    // Relaxed, because the number only has to be unique.
    NUMBER.fetch_add(1, Ordering::Relaxed) % (SEATS - 1) + 1
}

/// A connection to the daemon. It may move to another thread, and has one user at a time.
#[derive(Debug)]
pub struct Lane {
    pub(crate) core: Arc<Core>,
    pub(crate) counters: Arc<LaneCounters>,
    pub(crate) binding: Option<LaneBinding>,
    /// Number of the current binding, 0 before the first. Tickets of other bindings are bypassed.
    pub(crate) seat: u64,
    unsent: VecDeque<Unsent>,
    pub(crate) handover: Handover,
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
            unsent: VecDeque::new(),
            handover: Handover::default(),
            spin: Spin::default(),
            _not_sync: PhantomData,
        };
        lane.find_binding();
        lane
    }

    /// Submits a flow. Never blocks. The ticket is permitted at once (credit, bypass, `observe`) or
    /// waits for its permit.
    #[inline(always)]
    pub fn submit(&mut self, flow: &Flow) -> Ticket {
        let mut ticket = Ticket::default();
        if flow.whole {
            self.end_revoked_credit(flow);
        }
        self.submit_into(flow, &mut ticket);
        ticket
    }

    /// Does the same as [`Lane::submit`] for a flow that can be cut, and writes the ticket in
    /// place. The old ticket is forgotten, as if dropped.
    ///
    /// The body is the usual path on credit. One comparison shows whether this kind of flow has
    /// credit at hand. One load of the attention word, after the record, shows whether the daemon
    /// requests anything. All calls are in tail position, so that no register has to be saved.
    #[inline(always)]
    pub fn submit_into(&mut self, flow: &Flow, ticket: &mut Ticket) {
        if !self.submit_on_hand(flow, ticket) {
            self.submit_without_credit(flow, ticket);
        }
    }

    /// Drops credit at hand that the daemon no longer gives for flows like this one, which goes in
    /// one piece.
    #[inline]
    fn end_revoked_credit(&mut self, flow: &Flow) {
        if let Some(binding) = &mut self.binding
            && flow.stage != Stage::Collective
            && binding.header.credit_stages() & CREDIT_WHOLE == 0
        {
            binding.credit.key = 0;
        }
    }

    /// Submits on credit at hand. Returns false if there is none.
    #[inline(always)]
    fn submit_on_hand(&mut self, flow: &Flow, ticket: &mut Ticket) -> bool {
        if let Some(binding) = &mut self.binding
            && flow.key() == binding.credit.key
            && let Some(tag) = binding.producer.publish_on_credit(flow, &mut binding.credit.left)
        {
            let attention = binding.header.after_publish();
            *ticket = Ticket { tag, total: flow.bytes, permitted: 0, state: binding.credit.state };
            if attention != 0 {
                self.attend(ticket);
            }
            true
        } else {
            false
        }
    }

    /// Submits a work request like [`Lane::submit_into`]. Unless it is a collective, credit permits
    /// it only while no flow waits on any port, see [`Flow::whole`].
    ///
    /// `nic` returns the number of the flow's NIC at the lane's current daemon. It is called here,
    /// since the lane may find its daemon here. An earlier number would not be that daemon's.
    ///
    /// Returns `false` without a submit if the lane is full and the daemon is alive, so that there
    /// will be room. A caller that can defer the work request tries again a little later.
    #[inline]
    #[must_use]
    pub fn submit_whole_into(
        &mut self,
        flow: &mut Flow,
        nic: impl FnOnce() -> u8,
        ticket: &mut Ticket,
    ) -> bool {
        self.try_attach();
        flow.nic = nic();
        if self.binding.is_none() {
            if self.is_backlog_full() {
                return false;
            }
            *ticket = self.submit_to_next(flow);
            return true;
        }
        self.end_revoked_credit(flow);
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

    #[inline(never)]
    fn submit_without_credit(&mut self, flow: &Flow, ticket: &mut Ticket) {
        *ticket = match self.submit_gated(flow) {
            Some(submitted) => submitted,
            None => self.submit_to_full_lane(flow),
        };
    }

    /// Submits a flow without credit at hand: gated, unless there is credit. Returns `None` if the
    /// lane is full.
    #[inline]
    fn submit_gated(&mut self, flow: &Flow) -> Option<Ticket> {
        if flow.peer != 0 {
            self.introduce(flow.peer);
        }
        let Some(binding) = &mut self.binding else { return self.submit_unbound(flow) };
        let seen = binding.header.attention();
        if seen & attention::NOT_ENFORCED != 0 || !self.unsent.is_empty() {
            return self.submit_slow_path(flow);
        }
        if flow.bytes > FLOW_BYTES_MAX {
            return Some(self.bypassed(flow.bytes));
        }
        let stages = binding.header.credit_stages();
        let idle = flow.whole && stages & CREDIT_WHOLE != 0;
        if (idle || stages & flow.stage.bit() != 0) && binding.find_credit(flow) {
            return self.submit_on_credit(flow);
        }
        let at = binding.producer.publish_gated(&Record::Submit(*flow)).ok()?;
        binding.notify();
        if binding.pending.is_empty() {
            self.spin.quiet_since_ns = 0;
        }
        binding.pending.add(at);
        let state = TicketState::of(self.seat).gated(at.slot);
        Some(Ticket { tag: at.tag, total: flow.bytes, permitted: 0, state })
    }

    /// Sends the address of a peer to the daemon, once per lane. Flows on credit at hand need no
    /// call: a flow with the same key, and so with the same peer, came here before.
    fn introduce(&mut self, peer: u8) {
        if let Some(binding) = &mut self.binding
            && binding.introduces(peer)
            && let Some(address) = peers::address(peer)
        {
            self.send_record(Record::Peer { peer, address });
        }
    }

    /// Submits on credit that was just found. The lane may be full.
    fn submit_on_credit(&mut self, flow: &Flow) -> Option<Ticket> {
        let Some(binding) = &mut self.binding else { return Some(self.bypassed(flow.bytes)) };
        let record = Record::SubmitOnCredit { flow: *flow, observed: false };
        let at = binding.producer.publish(&record).ok()?;
        binding.credit.left -= flow.bytes;
        let mut ticket =
            Ticket { tag: at.tag, total: flow.bytes, permitted: 0, state: binding.credit.state };
        self.attend(&mut ticket);
        Some(ticket)
    }

    /// Handles a request of the daemon after a flow on credit was published: to be woken, or that
    /// nothing goes out on credit any more, including this flow.
    #[cold]
    #[inline(never)]
    fn attend(&mut self, ticket: &mut Ticket) {
        let Some(binding) = &mut self.binding else { return };
        if !binding.can_notify_later() {
            binding.notify();
        }
        let seen = binding.header.attention();
        if seen & attention::NOT_ENFORCED == 0 {
            return;
        }
        binding.credit.key = 0;
        if binding.session.is_handed_over() {
            // The daemon gave this credit before it ended, so the flow may use it.
            self.lose_binding();
        } else if seen & attention::UNSCHEDULED != 0 {
            self.withdraw(ticket);
            *ticket = self.bypassed(ticket.total);
        } else {
            self.counters.observed_bytes.add(ticket.total);
            ticket.state = ticket.state.observed();
        }
    }

    /// Reports that `bytes` of the flow were delivered. Call it for every permitted byte, because
    /// the daemon counts bytes in flight. Does nothing for bypassed flows.
    pub fn complete(&mut self, ticket: &Ticket, bytes: u64) {
        if self.knows(ticket) {
            self.send_record(Record::Completed { tag: ticket.tag, bytes });
        }
    }

    /// Cancels a flow. Bytes that were not permitted will not be sent, and bytes that were
    /// permitted will not be completed.
    pub fn cancel(&mut self, mut ticket: Ticket) {
        self.follow(&mut ticket);
        self.forget(&mut ticket);
        if self.knows(&ticket) {
            self.withdraw(&mut ticket);
        }
    }

    /// Looks for a daemon if there is none, as a submit does.
    #[inline]
    pub fn try_attach(&mut self) {
        if self.binding.is_none() {
            self.find_binding();
        }
    }

    /// Sends a hint about requests, batches and layers to the daemon.
    pub fn hint(&mut self, hint: Hint) {
        self.try_attach();
        // Mode `off` drops only hints. Completions and withdrawals must reach the daemon, or it
        // would never free the slots and bytes of these flows.
        if let Some(binding) = &self.binding
            && binding.header.attention() & attention::OFF != 0
        {
            return;
        }
        self.send_record(Record::Hint(hint));
    }

    /// Reports whether the lane has a seat at a daemon that is not lost.
    pub fn is_attached(&self) -> bool {
        self.binding.as_ref().is_some_and(|binding| binding.session.lost_at().is_none())
    }

    /// Reports whether the current daemon has this flow.
    fn knows(&self, ticket: &Ticket) -> bool {
        ticket.state.is_of(self.seat) && self.binding.is_some()
    }

    /// Withdraws the rest of a flow that the daemon has.
    pub(crate) fn withdraw(&mut self, ticket: &mut Ticket) {
        let at = ticket.at();
        if ticket.state.is_gated() {
            let mut before = 0;
            if let Some(binding) = &mut self.binding {
                before = binding.pending.before(at.slot);
                binding.pending.remove(at.slot);
            }
            self.send(Unsent::Withdraw(at, ticket.permitted.saturating_sub(before)));
        } else {
            self.send(Unsent::Record(Record::Cancelled {
                tag: at.tag,
                permitted: ticket.permitted,
            }));
        }
        // Completions of the flow are ignored from now on.
        ticket.state = TicketState::DONE;
    }

    fn send_record(&mut self, record: Record) {
        self.send(Unsent::Record(record));
    }

    #[cold]
    fn submit_unbound(&mut self, flow: &Flow) -> Option<Ticket> {
        self.find_binding();
        // A NIC's number from before there was a daemon is not this daemon's.
        if self.binding.is_some() && flow.nic != u8::MAX {
            self.submit_gated(flow)
        } else {
            Some(self.submit_to_next(flow))
        }
    }

    /// Submits in a special state: bypass, `observe`, the daemon is gone, or records wait.
    #[cold]
    fn submit_slow_path(&mut self, flow: &Flow) -> Option<Ticket> {
        self.notice_hangup();
        let Some(binding) = &mut self.binding else { return Some(self.submit_to_next(flow)) };
        let seen = binding.header.attention();
        if seen & attention::GONE != 0 || binding.session.lost_at().is_some() {
            self.lose_binding();
            // The flow names its NIC by a number of the daemon that is gone.
            return Some(self.submit_to_next(flow));
        }
        if !self.unsent.is_empty() {
            self.send_unsent();
            if !self.unsent.is_empty() {
                return None;
            }
            return self.submit_gated(flow);
        }
        if seen & attention::UNSCHEDULED != 0 || flow.bytes > FLOW_BYTES_MAX {
            return Some(self.bypassed(flow.bytes));
        }
        if seen & attention::OBSERVE == 0 {
            // The special state has ended, as a bypass may at any time. An "observed" record would
            // be a protocol violation for a daemon that didn't order it.
            return self.submit_gated(flow);
        }
        let record = Record::SubmitOnCredit { flow: *flow, observed: true };
        let at = binding.producer.publish(&record).ok()?;
        binding.notify();
        self.counters.observed_bytes.add(flow.bytes);
        let state = TicketState::of(self.seat).observed();
        Some(Ticket { tag: at.tag, total: flow.bytes, permitted: 0, state })
    }

    #[cold]
    fn submit_to_full_lane(&mut self, flow: &Flow) -> Ticket {
        self.notice_hangup();
        if self.binding.is_none() {
            return self.submit_to_next(flow);
        }
        self.counters.lane_full.add(1);
        self.bypassed(flow.bytes)
    }

    /// Returns a ticket for a flow that is not sent to the daemon.
    fn bypassed(&mut self, bytes: u64) -> Ticket {
        self.counters.bypassed_bytes.add(bytes);
        self.counters.bypassed_flows.add(1);
        Ticket::bypassed(bytes)
    }

    /// Takes a seat if there is a daemon, or does one step towards finding one.
    #[cold]
    pub(crate) fn find_binding(&mut self) {
        let Some(session) = self.core.session() else { return self.inherit() };
        let seat = match session.claim_lane() {
            Ok(seat) => seat,
            Err(why) => {
                self.core.look_again(self.core.clock.now_ns() + SEAT_RETRY_NS);
                let full = why == NoFreeLane::AllTaken;
                self.counters.lane_full.add(full.into());
                return;
            }
        };
        self.seat = next_number();
        self.binding = Some(LaneBinding::new(session, seat, self.seat));
        self.submit_waiting();
    }

    /// Drops the binding of a lost session. Its flows become bypassed when they are polled, unless
    /// they wait for the next daemon.
    #[cold]
    pub(crate) fn lose_binding(&mut self) {
        if let Some(binding) = self.binding.take() {
            // Old tickets have the old number.
            let seat = core::mem::replace(&mut self.seat, next_number());
            self.unsent.clear();
            self.core.look_again(0);
            if binding.session.lost_at().is_some() && binding.session.is_handed_over() {
                self.hand_over(&binding, seat);
            }
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.send_unsent();
        let unsent = self.unsent.drain(..).filter_map(|message| match message {
            Unsent::Withdraw(at, _) => Some(at),
            Unsent::Record(_) | Unsent::Repay(_) => None,
        });
        if let Some(binding) = self.binding.take() {
            let gated = unsent.chain(binding.waiting()).collect();
            binding.return_lane(gated);
        }
        self.core.retire(&self.counters);
    }
}
