//! Posts while nothing waits: what has leave goes to the provider in the caller's own list.

use laxity_client::{Flow, Ticket};
use rdma_sys::{ibv_qp, ibv_send_wr};

use super::{IN_FLIGHT_MAX, InFlight, QueuePair, State};
use crate::contexts::{Context, PostSend};
use crate::list::{Posted, call, call_prefix, position};
use crate::{classify, work};

/// Bytes posted without a signal that the daemon is not told of until one with a signal follows: little
/// against the window of any port that RDMA runs on.
pub(super) const AHEAD_BYTES: u64 = 64 << 10;
impl QueuePair {
    /// [`QueuePair::post_at_once`] of a single one, the way most go. `None`: nothing happened, it goes the
    /// long way.
    ///
    /// # Safety
    /// As for [`QueuePair::post`]; `one` is not null.
    #[inline]
    pub(super) unsafe fn post_one(
        &'static self,
        state: &mut State,
        real: PostSend,
        ibv: *mut ibv_qp,
        one: *mut ibv_send_wr,
    ) -> Option<Posted> {
        let nic = state.context.map_or(u8::MAX, Context::nic);
        // SAFETY: upheld by the caller.
        let wr = unsafe { &*one };
        let signaled = state.signals_all || work::is_signaled(wr);
        let mut flight = InFlight {
            wr_id: wr.wr_id,
            signaled,
            bytes: 0,
            ticket: Ticket::default(),
            failed: false,
        };
        // SAFETY: upheld by the caller.
        let flow = unsafe { classify::flow(wr, nic) };
        let mut goes_ahead = false;
        if let Some(flow) = &flow {
            let ahead = state.ahead_of(flow);
            let mut lane = self.shard().lane();
            if !signaled {
                let few = |ahead| ahead + flow.bytes <= AHEAD_BYTES;
                goes_ahead = ahead.is_some_and(|ahead| few(ahead) && lane.has_leave(flow, ahead));
            }
            if !goes_ahead {
                let told = Flow {
                    bytes: flow.bytes + ahead.unwrap_or(0),
                    ..*flow
                };
                flight.bytes = told.bytes;
                if !lane.submit_whole_into(&told, &mut flight.ticket) {
                    drop(lane);
                    self.shard().is_full();
                    // SAFETY: upheld by the caller.
                    return Some(unsafe { self.defer(state, one, None, false) });
                }
                if lane.poll(&mut flight.ticket).is_none() {
                    if told.bytes > flow.bytes {
                        // For itself alone, then; another tells of those that went ahead.
                        lane.cancel(flight.ticket);
                        return None;
                    }
                    drop(lane);
                    // SAFETY: upheld by the caller.
                    return Some(unsafe { self.defer(state, one, Some(flight.ticket), false) });
                }
            }
        }
        // SAFETY: upheld by the caller.
        let result = unsafe { call(real, ibv, one) };
        if result.is_err() {
            self.shard().lane().cancel(flight.ticket);
            return Some(result);
        }
        let own_bytes = flow.map_or(0, |flow| flow.bytes);
        if let Some(flow) = flow.filter(|_| goes_ahead) {
            let ahead = state.ahead.get_or_insert(Flow { bytes: 0, ..flow });
            ahead.bytes += flow.bytes;
        } else if flight.bytes > own_bytes {
            state.ahead = None;
        }
        if !signaled && flight.bytes > 0 {
            // Nobody can tell when it is complete.
            self.land(&mut self.shard().lane(), &flight.ticket, flight.bytes);
            flight.ticket = Ticket::default();
            flight.bytes = 0;
        }
        state.in_flight.push_back(flight);
        state.counts.posted += 1;
        state.counts.posted_bytes += own_bytes;
        if state.in_flight.len() > IN_FLIGHT_MAX {
            self.take_for_granted(state);
        }
        Some(result)
    }

    /// Nothing waits: what has leave goes, and the rest waits.
    ///
    /// # Safety
    /// As for [`QueuePair::post`].
    #[inline]
    pub(super) unsafe fn post_at_once(
        &'static self,
        state: &mut State,
        real: PostSend,
        ibv: *mut ibv_qp,
        list: *mut ibv_send_wr,
        atomic: bool,
    ) -> Posted {
        let first = state.in_flight.len();
        let nic = state.context.map_or(u8::MAX, Context::nic);
        let mut at = list;
        let mut gated = None;
        let mut lane = self.shard().lane();
        // SAFETY: upheld by the caller: a list that ends.
        while let Some(wr) = unsafe { at.as_ref() } {
            // SAFETY: as above.
            let flow = unsafe { classify::flow(wr, nic) };
            let mut flight = InFlight {
                wr_id: wr.wr_id,
                signaled: state.signals_all || work::is_signaled(wr),
                bytes: 0,
                ticket: Ticket::default(),
                failed: false,
            };
            if let Some(flow) = flow {
                flight.bytes = flow.bytes;
                if !lane.submit_whole_into(&flow, &mut flight.ticket) {
                    self.shard().is_full();
                    break;
                }
                if lane.poll(&mut flight.ticket).is_none() {
                    gated = Some(flight.ticket);
                    break;
                }
            }
            state.in_flight.push_back(flight);
            at = wr.next;
        }
        drop(lane);
        let ready = state.in_flight.len() - first;
        // SAFETY: upheld by the caller.
        let result = unsafe {
            if at.is_null() {
                call(real, ibv, list)
            } else {
                call_prefix(real, ibv, list, ready)
            }
        };
        let Err((error, bad)) = result else {
            self.launched(state, first);
            if at.is_null() {
                return Ok(());
            }
            // SAFETY: upheld by the caller; `at` is the one that has to wait.
            return unsafe { self.defer(state, at, gated, atomic) };
        };
        // The provider took some of them, or none.
        // SAFETY: `bad` is one of the list.
        let taken = unsafe { position(list, bad) }.min(ready);
        let mut lane = self.shard().lane();
        for gone in state.in_flight.drain(first + taken..) {
            lane.cancel(gone.ticket);
        }
        if let Some(ticket) = gated {
            lane.cancel(ticket);
        }
        drop(lane);
        self.launched(state, first);
        if atomic && taken > 0 {
            // All or none, and some are out: the others follow, in their own time.
            // SAFETY: upheld by the caller.
            return unsafe { self.defer(state, bad, None, true) };
        }
        Err((error, bad))
    }
}

impl State {
    /// Bytes that went ahead and that a flow can stand for; `None` if it can for none.
    fn ahead_of(&self, flow: &Flow) -> Option<u64> {
        let anonymous = flow.batch == 0 && flow.request == 0 && flow.deadline_ns == 0;
        match &self.ahead {
            _ if !anonymous => None,
            None => Some(0),
            Some(ahead) => (ahead.key() == flow.key()).then_some(ahead.bytes),
        }
    }
}
