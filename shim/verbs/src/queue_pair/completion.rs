//! What of a queue pair is on the wire, and how it comes to be complete.

use core::ptr;

use laxity_client::{Lane, Ticket};
use laxity_ibverbs::{ibv_cq, ibv_wc_status};

use super::{IN_FLIGHT_MAX, QueuePair, State};
use crate::lanes;

impl QueuePair {
    /// Bytes of a ticket are complete.
    #[inline]
    pub(super) fn land(&self, lane: &mut Lane, ticket: &Ticket, bytes: u64) {
        lane.complete(ticket, bytes);
        if lane.owes() {
            self.shard().owe();
        }
    }

    /// More completions are missing than any queue holds.
    #[cold]
    pub(super) fn assume_completed(&self, state: &mut State) {
        let mut lane = self.shard().lane();
        while state.in_flight.len() > IN_FLIGHT_MAX {
            if let Some(oldest) = state.in_flight.pop_front() {
                self.land(&mut lane, &oldest.ticket, oldest.bytes);
            }
        }
    }

    /// The provider has taken all in flight from `first` on.
    #[inline]
    pub(super) fn launched(&'static self, state: &mut State, first: usize) {
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
                self.land(lane, &flight.ticket, flight.bytes);
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

    /// A completion came; the status that the program should see, if it is another.
    #[inline]
    pub(crate) fn completed(
        &self,
        cq: *const ibv_cq,
        wr_id: u64,
        status: ibv_wc_status::Type,
    ) -> Option<ibv_wc_status::Type> {
        self.note(&mut self.state.lock(), cq, wr_id, status)
    }

    /// [`QueuePair::completed`] for a caller that may hold a lock that the provider takes in posts:
    /// `None` if another thread has the queue pair.
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
        state: &mut State,
        cq: *const ibv_cq,
        wr_id: u64,
        status: ibv_wc_status::Type,
    ) -> Option<ibv_wc_status::Type> {
        state.counts.completions += 1;
        state.progress = lanes::tick();
        state.unseen = false;
        let success = status == ibv_wc_status::IBV_WC_SUCCESS;
        // What it mostly is.
        if success
            && let Some(front) = state.in_flight.front()
            && front.wr_id == wr_id
            && front.signaled
        {
            if front.bytes > 0 {
                self.land(&mut self.shard().lane(), &front.ticket, front.bytes);
            }
            state.in_flight.pop_front();
            return None;
        }
        // With an error no opcode says whether a receive has completed.
        // SAFETY: a queue pair that is alive: it completes.
        if !success && !state.ibv.0.is_null() && !ptr::eq(unsafe { (*state.ibv.0).send_cq }, cq) {
            return None;
        }
        // In error each work request completes, and not only those that are signaled.
        let last = state
            .in_flight
            .iter()
            .position(|flight| flight.wr_id == wr_id && (flight.signaled || !success))?;
        let mut failed = false;
        let mut lane = self.shard().lane();
        for flight in state.in_flight.drain(..=last) {
            failed = flight.failed;
            self.land(&mut lane, &flight.ticket, flight.bytes);
        }
        (failed && !success).then_some(ibv_wc_status::IBV_WC_LOC_QP_OP_ERR)
    }
}
