//! Work requests in flight, and their completion.

use core::ptr;

use laxity_client::{Lane, Ticket};
use laxity_ibverbs::{ibv_cq, ibv_wc_status};

use super::{IN_FLIGHT_MAX, QueuePair, QueuePairState};
use crate::lanes;

impl QueuePair {
    #[inline]
    pub(super) fn report_delivered(&self, lane: &mut Lane, ticket: &Ticket, bytes: u64) {
        lane.complete(ticket, bytes);
        if lane.has_unsent() {
            self.shard().request_flush();
        }
    }

    /// Completes the oldest work requests if more are in flight than any queue holds.
    #[cold]
    pub(super) fn assume_completed(&self, state: &mut QueuePairState) {
        let mut lane = self.shard().lane();
        while state.in_flight.len() > IN_FLIGHT_MAX {
            if let Some(oldest) = state.in_flight.pop_front() {
                self.report_delivered(&mut lane, &oldest.ticket, oldest.bytes);
            }
        }
    }

    /// Records that the provider took all work requests in flight from index `first` on.
    #[inline]
    pub(super) fn launched(&'static self, state: &mut QueuePairState, first: usize) {
        let count = state.in_flight.len() - first;
        state.counts.posted += count as u64;
        let mut bytes = 0;
        let (mut covered, mut counted) = (false, false);
        let mut lane = None;
        for flight in state.in_flight.range_mut(first..).rev() {
            covered |= flight.signaled;
            bytes += flight.bytes;
            if !covered {
                let lane = lane.get_or_insert_with(|| self.shard().lane());
                self.report_delivered(lane, &flight.ticket, flight.bytes);
                flight.ticket = Ticket::default();
            }
            counted |= flight.ticket.is_known();
        }
        state.counts.posted_bytes += bytes;
        drop(lane);
        if counted && !state.watched {
            self.be_watched(state);
        }
        if state.in_flight.len() > IN_FLIGHT_MAX {
            self.assume_completed(state);
        }
    }

    /// Handles a completion. Returns the status for the program if it differs from the provider's.
    #[inline]
    pub(crate) fn completed(
        &self,
        cq: *const ibv_cq,
        wr_id: u64,
        status: ibv_wc_status::Type,
    ) -> Option<ibv_wc_status::Type> {
        self.note(&mut self.state.lock(), cq, wr_id, status)
    }

    /// Does the same as [`QueuePair::completed`] for a caller that may hold a lock that the
    /// provider takes in posts. Returns `None` if another thread holds the queue pair.
    pub(crate) fn try_completed(
        &self,
        cq: *const ibv_cq,
        wr_id: u64,
        status: ibv_wc_status::Type,
    ) -> Option<Option<ibv_wc_status::Type>> {
        let mut state = self.state.try_lock()?;
        Some(self.note(&mut state, cq, wr_id, status))
    }

    #[inline]
    fn note(
        &self,
        state: &mut QueuePairState,
        cq: *const ibv_cq,
        wr_id: u64,
        status: ibv_wc_status::Type,
    ) -> Option<ibv_wc_status::Type> {
        state.counts.completions += 1;
        state.progress = lanes::tick();
        state.unseen = false;
        let success = status == ibv_wc_status::IBV_WC_SUCCESS;
        // The usual case comes first.
        if success
            && let Some(front) = state.in_flight.front()
            && front.wr_id == wr_id
            && front.signaled
        {
            if front.bytes > 0 {
                self.report_delivered(&mut self.shard().lane(), &front.ticket, front.bytes);
            }
            state.in_flight.pop_front();
            state.has_polled = true;
            return None;
        }
        // The queue decides, since a failed completion has no opcode that distinguishes receives.
        // SAFETY: the queue pair is alive, since it completes work requests.
        if !success && !state.ibv.0.is_null() && !ptr::eq(unsafe { (*state.ibv.0).send_cq }, cq) {
            return None;
        }
        // In error, unsignaled work requests complete, too.
        let last = state
            .in_flight
            .iter()
            .position(|flight| flight.wr_id == wr_id && (flight.signaled || !success))?;
        self.settle(state, last, success)
    }

    /// Ends the work requests in flight up to `last`, which completed. Returns the status for the
    /// program if it differs from the provider's.
    pub(super) fn settle(
        &self,
        state: &mut QueuePairState,
        last: usize,
        success: bool,
    ) -> Option<ibv_wc_status::Type> {
        let mut failed = false;
        let mut lane = self.shard().lane();
        for flight in state.in_flight.drain(..=last) {
            failed = flight.failed;
            self.report_delivered(&mut lane, &flight.ticket, flight.bytes);
        }
        (failed && !success).then_some(ibv_wc_status::IBV_WC_LOC_QP_OP_ERR)
    }
}
