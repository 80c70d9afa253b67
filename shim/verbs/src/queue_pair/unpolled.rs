//! What is in flight and nobody polls for.
//!
//! A program that waits for something else, and polls for completions later, would wait for ever if
//! that depends on what waits in the queue pair, and would hold the port's window against all other
//! processes. So what is in flight of a queue pair is taken for complete once its completion queue
//! was not polled for [`UNPOLLED_TICKS`]. The pump thread of the lane looks after that
//! ([`crate::lanes::Shard::watch`]), since the program may neither post nor poll meanwhile.

use laxity_client::Ticket;

use super::{QueuePair, State};
use crate::lanes;

/// About 100 ms: longer than a program that polls lets pass, and short for one that waits.
const UNPOLLED_TICKS: u32 = 6;

impl QueuePair {
    /// Something is in flight that the daemon counts.
    #[cold]
    pub(super) fn be_watched(&'static self, state: &mut State) {
        lanes::advance_tick();
        state.progress = lanes::tick();
        state.watched = true;
        self.shard().watch(self);
    }

    /// Looks after what is in flight; false if nothing is that the daemon counts, and no more looks
    /// are needed.
    pub(crate) fn look(&'static self) -> bool {
        // Whoever has it is at it right now.
        let Some(mut state) = self.state.try_lock() else {
            return true;
        };
        self.settle_unpolled(&mut state);
        state.watched = state
            .in_flight
            .iter()
            .any(|flight| flight.ticket.is_known());
        state.watched
    }

    /// What is in flight is complete for all that can be known, if nobody looks.
    pub(super) fn settle_unpolled(&self, state: &mut State) {
        let now = lanes::tick();
        let passed = |since: u32| now.wrapping_sub(since) >= UNPOLLED_TICKS;
        let Some(context) = state.context.filter(|_| passed(state.progress)) else {
            return;
        };
        // SAFETY: a queue pair that is alive: `close` comes before its end.
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
                self.land(&mut lane, &flight.ticket, flight.bytes);
                flight.ticket = Ticket::default();
            }
        }
    }
}
