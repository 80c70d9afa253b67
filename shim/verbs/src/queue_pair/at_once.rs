//! Posts while nothing waits: what has leave goes to the provider in the caller's own list.

use laxity_ibverbs::{ibv_qp, ibv_send_wr};

use super::{IN_FLIGHT_MAX, InFlight, QueuePair, State};
use crate::contexts::PostSend;
use crate::list::{Posted, call, call_prefix, position};
use crate::{classify, work};

impl QueuePair {
    /// Posts a single one of which the daemon need not hear now. `None`: nothing happened.
    ///
    /// # Safety
    /// As for [`QueuePair::post`]; `one` is not null.
    #[inline]
    pub(super) unsafe fn post_ahead(
        &'static self,
        state: &mut State,
        real: PostSend,
        ibv: *mut ibv_qp,
        one: *mut ibv_send_wr,
    ) -> Option<Posted> {
        // SAFETY: upheld by the caller, here and below.
        let wr = unsafe { &*one };
        // SAFETY: as above.
        let bytes = unsafe { state.ahead.takes(wr) }?;
        let (wr_id, signaled) = (wr.wr_id, state.signals_all || work::is_signaled(wr));
        // SAFETY: as above.
        let result = unsafe { call(real, ibv, one) };
        if result.is_ok() {
            state.ahead.went(bytes);
            self.one_launched(state, InFlight::untold(wr_id, signaled), bytes);
        }
        Some(result)
    }

    /// [`QueuePair::post_at_once`] of a single one, the way most go.
    ///
    /// # Safety
    /// As for [`QueuePair::post`]; `one` is not null.
    pub(super) unsafe fn post_one(
        &'static self,
        state: &mut State,
        real: PostSend,
        ibv: *mut ibv_qp,
        one: *mut ibv_send_wr,
    ) -> Posted {
        // SAFETY: upheld by the caller, here and below.
        let wr = unsafe { &*one };
        let signaled = state.signals_all || work::is_signaled(wr);
        let (opcode, mut flight) = (wr.opcode, InFlight::untold(wr.wr_id, signaled));
        // SAFETY: as above.
        let mut flow = unsafe { classify::flow(wr, state.peer) };
        if let Some(flow) = &mut flow {
            let mut lane = self.shard().lane();
            // Those before it first.
            state.ahead.repay(&mut lane);
            if !lane.submit_whole_into(flow, || state.nic(), &mut flight.ticket) {
                drop(lane);
                self.shard().is_full();
                // SAFETY: as above.
                return unsafe { self.defer(state, one, None, false) };
            }
            flight.bytes = flow.bytes;
            if lane.poll(&mut flight.ticket).is_none() {
                drop(lane);
                // SAFETY: as above.
                return unsafe { self.defer(state, one, Some(flight.ticket), false) };
            }
        }
        // SAFETY: as above.
        let result = unsafe { call(real, ibv, one) };
        if result.is_err() {
            self.shard().lane().cancel(flight.ticket);
            return result;
        }
        let bytes = flow.map_or(0, |flow| flow.bytes);
        if let Some(flow) = &flow {
            let mut lane = self.shard().lane();
            state.ahead.follow(&mut lane, opcode, flow);
            if !signaled {
                // Nobody can tell when it is complete.
                self.land(&mut lane, &flight.ticket, flight.bytes);
                flight = InFlight::untold(flight.wr_id, false);
            }
        }
        self.one_launched(state, flight, bytes);
        result
    }

    /// The provider has taken one more.
    #[inline]
    fn one_launched(&'static self, state: &mut State, flight: InFlight, bytes: u64) {
        if flight.ticket.is_known() && !state.watched {
            self.be_watched(state);
        }
        state.in_flight.push_back(flight);
        state.counts.posted += 1;
        state.counts.posted_bytes += bytes;
        if state.in_flight.len() > IN_FLIGHT_MAX {
            self.assume_completed(state);
        }
    }

    /// Nothing goes ahead any more; the daemon hears of what went.
    pub(super) fn end_ahead(&self, state: &mut State) {
        if state.ahead.is_idle() {
            return;
        }
        let mut lane = self.shard().lane();
        state.ahead.repay(&mut lane);
        if lane.owes() {
            self.shard().owe();
        }
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
        let mut at = list;
        let mut gated = None;
        let mut lane = self.shard().lane();
        // SAFETY: upheld by the caller: a list that ends.
        while let Some(wr) = unsafe { at.as_ref() } {
            // SAFETY: as above.
            let flow = unsafe { classify::flow(wr, state.peer) };
            let signaled = state.signals_all || work::is_signaled(wr);
            let mut flight = InFlight::untold(wr.wr_id, signaled);
            if let Some(mut flow) = flow {
                flight.bytes = flow.bytes;
                if !lane.submit_whole_into(&mut flow, || state.nic(), &mut flight.ticket) {
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
