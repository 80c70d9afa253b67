//! Posts while nothing waits. Permitted work requests go to the provider in the caller's own list.

use laxity_ibverbs::{ibv_qp, ibv_send_wr};

use super::{IN_FLIGHT_MAX, PostedWork, QueuePair, QueuePairState};
use crate::contexts::PostSend;
use crate::list::{PostResult, call, call_prefix, position};
use crate::{classify, work};

impl QueuePair {
    /// Posts a single work request without a report to the daemon. Returns `None` if that is not
    /// possible, without any effect.
    ///
    /// # Safety
    /// The conditions of [`QueuePair::post`] hold. `one` is not null.
    #[inline]
    pub(super) unsafe fn post_ahead(
        &'static self,
        state: &mut QueuePairState,
        real: PostSend,
        ibv: *mut ibv_qp,
        one: *mut ibv_send_wr,
    ) -> Option<PostResult> {
        // SAFETY: upheld by the caller.
        let wr = unsafe { &*one };
        // SAFETY: upheld by the caller.
        let bytes = unsafe { state.ahead.takes(wr) }?;
        let (wr_id, signaled) = (wr.wr_id, state.signals_all || work::is_signaled(wr));
        // SAFETY: upheld by the caller.
        let result = unsafe { call(real, ibv, one) };
        if result.is_ok() {
            state.ahead.went(bytes);
            self.one_launched(state, PostedWork::unreported(wr_id, signaled), bytes);
        }
        Some(result)
    }

    /// Posts a single work request like [`QueuePair::post_at_once`]. It is the usual case.
    ///
    /// # Safety
    /// The conditions of [`QueuePair::post`] hold. `one` is not null.
    pub(super) unsafe fn post_one(
        &'static self,
        state: &mut QueuePairState,
        real: PostSend,
        ibv: *mut ibv_qp,
        one: *mut ibv_send_wr,
    ) -> PostResult {
        // SAFETY: upheld by the caller.
        let wr = unsafe { &*one };
        let signaled = state.signals_all || work::is_signaled(wr);
        let (opcode, mut flight) = (wr.opcode, PostedWork::unreported(wr.wr_id, signaled));
        // SAFETY: upheld by the caller.
        let mut flow = unsafe { classify::flow(wr, state.peer) };
        if let Some(flow) = &mut flow {
            let mut lane = self.shard().lane();
            // Work requests that went ahead are reported first.
            state.ahead.repay(&mut lane);
            if !lane.submit_whole_into(flow, || state.nic(), &mut flight.ticket) {
                drop(lane);
                self.shard().note_full();
                // SAFETY: upheld by the caller.
                return unsafe { self.defer(state, one, None, false) };
            }
            flight.bytes = flow.bytes;
            if lane.poll(&mut flight.ticket).is_none() {
                drop(lane);
                // SAFETY: upheld by the caller.
                return unsafe { self.defer(state, one, Some(flight.ticket), false) };
            }
        }
        // SAFETY: upheld by the caller.
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
                // The completion of an unsignaled work request can't be observed.
                self.report_delivered(&mut lane, &flight.ticket, flight.bytes);
                flight = PostedWork::unreported(flight.wr_id, false);
            }
        }
        if !state.ahead.is_idle() && !state.watched {
            // The program may post nothing more, and the loan has to end.
            self.be_watched(state);
        }
        self.one_launched(state, flight, bytes);
        result
    }

    /// Records a work request that the provider took.
    #[inline]
    fn one_launched(&'static self, state: &mut QueuePairState, flight: PostedWork, bytes: u64) {
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

    /// Ends the loan and reports the work requests that went ahead.
    pub(super) fn end_ahead(&self, state: &mut QueuePairState) {
        if state.ahead.is_idle() {
            return;
        }
        let mut lane = self.shard().lane();
        state.ahead.repay(&mut lane);
        if lane.has_unsent() {
            self.shard().request_flush();
        }
    }

    /// Posts the permitted part of a list while nothing waits, and defers the rest.
    ///
    /// # Safety
    /// The conditions of [`QueuePair::post`] hold.
    #[inline]
    pub(super) unsafe fn post_at_once(
        &'static self,
        state: &mut QueuePairState,
        real: PostSend,
        ibv: *mut ibv_qp,
        list: *mut ibv_send_wr,
        atomic: bool,
    ) -> PostResult {
        let first = state.in_flight.len();
        let mut at = list;
        let mut gated = None;
        let mut lane = self.shard().lane();
        // SAFETY: upheld by the caller. The list ends.
        while let Some(wr) = unsafe { at.as_ref() } {
            // SAFETY: upheld by the caller.
            let flow = unsafe { classify::flow(wr, state.peer) };
            let signaled = state.signals_all || work::is_signaled(wr);
            let mut flight = PostedWork::unreported(wr.wr_id, signaled);
            if let Some(mut flow) = flow {
                flight.bytes = flow.bytes;
                if !lane.submit_whole_into(&mut flow, || state.nic(), &mut flight.ticket) {
                    self.shard().note_full();
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
            if at.is_null() { call(real, ibv, list) } else { call_prefix(real, ibv, list, ready) }
        };
        let Err((error, bad)) = result else {
            self.launched(state, first);
            if at.is_null() {
                return Ok(());
            }
            // SAFETY: upheld by the caller. `at` is the first work request that has to wait.
            return unsafe { self.defer(state, at, gated, atomic) };
        };
        // The provider took some of them, or none.
        // SAFETY: `bad` is in the list.
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
            // The call promises all or none, and some are posted, so the others are deferred.
            // SAFETY: upheld by the caller.
            return unsafe { self.defer(state, bad, None, true) };
        }
        Err((error, bad))
    }
}
