//! Flows that wait for the next daemon of a planned upgrade.
//!
//! A daemon that hands its clients over (`attention::HANDOVER`) releases them, and the next one
//! answers at the same socket. A lane then records its waiting flows, and never reads the old
//! region again. The permits that it has read are final. The rest of each flow is submitted to the
//! next daemon as a new flow. So each byte goes out once, whatever either daemon writes.
//!
//! A ticket belongs to the caller, so it gets its new flow when the caller polls it. Until then
//! [`HandoverFlow`] keeps the state of that flow. New flows wait in the same way. All of them are
//! bypassed once [`crate::session::Session::has_successor`] is false: after a second, or as soon as
//! nobody listens at the socket.
//!
//! The next daemon does not learn of bytes that the last one permitted and that are in flight. It
//! may permit one window too many, once. Such bytes have usually left before it has started.

use std::sync::Arc;
use std::time::Duration;

use laxity_shm::permit::{self, SlotState};
use laxity_shm::record::Flow;

use super::Lane;
use crate::lane_binding::LaneBinding;
use crate::session::Session;
use crate::ticket::{Permit, Ticket, TicketState};

/// Longest pause between two looks for the next daemon while flows wait for it.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(1);

/// The flows of a lane that wait for the next daemon, or that it got since.
#[derive(Debug, Default)]
pub(crate) struct Handover {
    /// The last daemon's session, while flows wait.
    session: Option<Arc<Session>>,
    /// The number of its binding.
    seat: u64,
    /// Number of flows that may wait: as many as in a lane of that session.
    room: usize,
    flows: Vec<HandoverFlow>,
    /// Whether flows got tickets of the next daemon since [`Lane::has_moved`] was last called.
    moved: bool,
}

/// A flow whose ticket comes from an earlier daemon, or from none.
#[derive(Debug)]
struct HandoverFlow {
    state: TicketState,
    /// The flow, with those bytes only that are not permitted.
    flow: Flow,
    /// The ticket at the next daemon, once it has the flow.
    next: Option<Ticket>,
}

impl Handover {
    fn begin(&mut self, session: Arc<Session>) {
        let slots = usize::from(session.region.geometry().slots);
        self.room = slots - slots / 8 - 1;
        self.session = Some(session);
    }

    /// Reports whether further flows should be submitted, see [`Lane::has_room`].
    pub(crate) fn has_room(&self) -> bool {
        self.session.is_none() || self.flows.len() < self.room / 2
    }

    fn find(&self, ticket: &Ticket) -> Option<usize> {
        self.flows.iter().position(|held| held.state == ticket.state)
    }
}

/// Returns the flows of a binding that wait, oldest first, without the bytes that were permitted.
fn waiting(binding: &LaneBinding, seat: u64) -> Vec<HandoverFlow> {
    let mut flows: Vec<(u64, HandoverFlow)> = binding
        .pending
        .slots()
        .filter_map(|slot| {
            let (age, permitted) = match permit::decode(binding.pending.seen(slot)) {
                SlotState::Published(tag) => (tag, 0),
                SlotState::Permit { cumulative, .. } => (0, cumulative),
                SlotState::Empty | SlotState::Invalid => return None,
            };
            let mut flow = binding.producer.flow(slot)?;
            flow.bytes = flow.bytes.checked_sub(permitted)?;
            Some((age, HandoverFlow { state: TicketState::of(seat).gated(slot), flow, next: None }))
        })
        .collect();
    flows.sort_by_key(|(age, _)| *age);
    flows.into_iter().map(|(_, held)| held).collect()
}

impl Lane {
    /// Keeps the waiting flows of a binding whose daemon handed over. `seat` is its number.
    #[cold]
    pub(super) fn hand_over(&mut self, binding: &LaneBinding, seat: u64) {
        self.handover.flows.append(&mut waiting(binding, seat));
        self.handover.seat = seat;
        self.handover.begin(Arc::clone(&binding.session));
    }

    /// Reports whether flows wait for the next daemon.
    pub(crate) fn awaits_next(&mut self) -> bool {
        let handover = &mut self.handover;
        if handover.session.as_ref().is_some_and(|session| !session.has_successor()) {
            handover.session = None;
        }
        handover.session.is_some()
    }

    /// Finds out whether this process waits for the next daemon, for a lane without a binding.
    pub(super) fn inherit(&mut self) {
        if self.handover.session.is_none()
            && let Some(session) = self.core.inherited()
        {
            self.handover.begin(session);
        }
    }

    /// Reports whether the daemon of the binding `seat` handed over.
    pub(super) fn was_handed_over(&self, seat: u64) -> bool {
        self.handover.seat == seat && seat != 0
    }

    /// Reports whether a new flow would wait for the next daemon, but too many flows already do.
    pub(crate) fn is_backlog_full(&mut self) -> bool {
        self.binding.is_none()
            && self.handover.flows.len() >= self.handover.room
            && self.awaits_next()
    }

    /// Submits a flow while there is no daemon. It waits if the next one is on its way.
    #[cold]
    pub(super) fn submit_to_next(&mut self, flow: &Flow) -> Ticket {
        if flow.nic == u8::MAX || !self.awaits_next() {
            return self.bypassed(flow.bytes);
        }
        if self.handover.flows.len() >= self.handover.room {
            self.counters.lane_full.add(1);
            return self.bypassed(flow.bytes);
        }
        // A number of its own tells the flow from others.
        let state = TicketState::of(super::next_number()).gated(0);
        self.handover.flows.push(HandoverFlow { state, flow: *flow, next: None });
        Ticket { tag: 0, total: flow.bytes, permitted: 0, state }
    }

    /// Submits the flows that wait to the daemon that was just found.
    #[cold]
    pub(super) fn submit_waiting(&mut self) {
        let (Some(before), Some(binding)) = (self.handover.session.take(), &self.binding) else {
            return;
        };
        let header = binding.header.clone();
        for at in 0..self.handover.flows.len() {
            let held = &mut self.handover.flows[at];
            if held.next.is_none() {
                held.flow.nic = header.nic_of(before.header(), held.flow.nic);
                let flow = held.flow;
                let next = match self.submit_gated(&flow) {
                    Some(ticket) => ticket,
                    None => self.submit_to_full_lane(&flow),
                };
                self.handover.flows[at].next = Some(next);
                self.handover.moved = true;
            }
        }
    }

    /// Replaces a ticket by that of the next daemon, if it has the flow.
    pub(super) fn follow(&mut self, ticket: &mut Ticket) {
        while let Some(at) = self.handover.find(ticket)
            && self.handover.flows[at].next.is_some()
            && let Some(next) = self.handover.flows.remove(at).next
        {
            (ticket.tag, ticket.state) = (next.tag, next.state);
            if ticket.permitted > 0
                && ticket.state.is_gated()
                && let Some(binding) = &mut self.binding
                && ticket.state.is_of(self.seat)
            {
                binding.pending.continues(ticket.state.slot(), ticket.permitted);
            }
        }
    }

    /// Forgets a flow that is cancelled or bypassed while it waits for the next daemon.
    pub(super) fn forget(&mut self, ticket: &mut Ticket) {
        if let Some(at) = self.handover.find(ticket) {
            self.handover.flows.remove(at);
            ticket.state = TicketState::DONE;
        }
    }

    /// Polls a gated flow that no daemon schedules now, or that the next daemon may have.
    #[cold]
    pub(crate) fn poll_unscheduled(&mut self, ticket: &mut Ticket) -> Option<Permit> {
        if self.binding.as_ref().is_some_and(|binding| binding.session.lost_at().is_some()) {
            self.lose_binding();
        }
        if self.handover.find(ticket).is_some() {
            self.try_attach();
            self.follow(ticket);
            if self.handover.find(ticket).is_none() {
                return self.poll(ticket);
            }
            if self.awaits_next() {
                return None;
            }
            self.forget(ticket);
        }
        Some(self.bypass_rest(ticket))
    }

    /// Reports whether flows wait for the next daemon, after a look for it.
    pub(crate) fn waits_for_next(&mut self) -> bool {
        let waits = |held: &HandoverFlow| held.next.is_none();
        if self.binding.is_some() || !self.handover.flows.iter().any(waits) {
            return false;
        }
        self.try_attach();
        self.binding.is_none() && self.awaits_next()
    }

    /// Reports whether flows moved to the next daemon since the last call. The caller polls them.
    pub(crate) fn has_moved(&mut self) -> bool {
        core::mem::take(&mut self.handover.moved)
    }
}
