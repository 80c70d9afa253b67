//! Work requests in flight that nobody polls for.
//!
//! Some programs wait for something else before they poll for completions. If that depends on a
//! waiting work request, such a program would wait for ever. It would also hold the port's window
//! against all other processes. The work requests in flight of a queue pair are therefore assumed
//! complete once its completion queue was not polled for [`UNPOLLED_TICKS`]. The lane's pump thread
//! checks that ([`crate::lanes::LaneShard::watch`]), since the program may not.

use laxity_client::Ticket;

use super::{QueuePair, QueuePairState};
use crate::lanes;

/// Ticks without a poll after which work requests are assumed complete, about 100 ms. Programs that
/// poll do so more often.
const UNPOLLED_TICKS: u32 = 6;

impl QueuePair {
    /// Adds the queue pair to the watched ones when a flow that the daemon counts is in flight.
    #[cold]
    pub(super) fn be_watched(&'static self, state: &mut QueuePairState) {
        lanes::advance_tick();
        state.progress = lanes::tick();
        state.watched = true;
        self.shard().watch(self);
    }

    /// Checks the work requests in flight, and ends a loan whose time is over. Returns false if the
    /// daemon counts nothing of the queue pair, so that no more checks are needed.
    pub(crate) fn check_in_flight(&'static self) -> bool {
        // The thread that holds the lock handles them.
        let Some(mut state) = self.state.try_lock() else { return true };
        self.settle_unpolled(&mut state);
        if state.ahead.is_over() {
            self.end_ahead(&mut state);
        }
        state.watched =
            !state.ahead.is_idle() || state.in_flight.iter().any(|flight| flight.ticket.is_known());
        state.watched
    }

    /// Completes the work requests in flight if nobody polls.
    pub(super) fn settle_unpolled(&self, state: &mut QueuePairState) {
        let now = lanes::tick();
        let passed = |since: u32| now.wrapping_sub(since) >= UNPOLLED_TICKS;
        let Some(context) = state.context.filter(|_| passed(state.progress)) else { return };
        // SAFETY: the queue pair is alive, because `close` comes before its end.
        let cq = unsafe { (*state.ibv.0).send_cq };
        let polled = context.last_polled(cq);
        if !passed(polled) {
            return;
        }
        state.progress = now;
        state.unseen = polled == 0;
        let mut lane = self.shard().lane();
        for flight in &mut state.in_flight {
            if flight.bytes > 0 {
                self.report_delivered(&mut lane, &flight.ticket, flight.bytes);
                flight.ticket = Ticket::default();
            }
        }
    }
}
