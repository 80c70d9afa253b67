//! Work requests that wait in a queue pair: deferring and posting them.

use laxity_client::Ticket;
use laxity_ibverbs::ibv_send_wr;

use super::{AHEAD, Deferred, PermitState, PostedWork, QueuePair, QueuePairState, SendReadiness};
use crate::contexts::HookedContext;
use crate::list::{PostResult, call, is_full};
use crate::queue_pair::bundled::may_leave;
use crate::report::COUNTERS;
use crate::work::{self, DeferredRequest};
use crate::{classify, exports, lanes};

impl QueuePair {
    pub(super) fn release_all(&self, state: &mut QueuePairState) {
        let mut lane = self.shard().lane();
        for waits in &mut state.waiting {
            waits.pull(&mut lane);
        }
        state.submitted = state.waiting.len();
    }

    /// Defers a list. `first` is the ticket of its first work request, if that was submitted. With
    /// `accepted`, all of it was checked before, and none is refused.
    ///
    /// # Safety
    /// The conditions of [`QueuePair::post`] hold.
    pub(super) unsafe fn defer(
        &'static self,
        state: &mut QueuePairState,
        list: *mut ibv_send_wr,
        first: Option<Ticket>,
        accepted: bool,
    ) -> PostResult {
        self.end_ahead(state);
        let peer = state.peer;
        let mut first = first;
        let mut result = Ok(());
        let before = state.waiting.len();
        let mut at = list;
        // SAFETY: upheld by the caller.
        while let Some(wr) = unsafe { at.as_ref() } {
            if !accepted {
                // SAFETY: upheld by the caller.
                if let Err(error) = unsafe { state.takes(wr, 1) } {
                    result = Err((error, at));
                    break;
                }
            }
            // SAFETY: upheld by the caller.
            let (work, flow) = unsafe { (DeferredRequest::copy(wr), classify::flow(wr, peer)) };
            let permit = match (first.take(), flow) {
                (Some(ticket), _) => PermitState::Waits(ticket),
                (None, Some(flow)) => PermitState::Unasked(flow),
                (None, None) => PermitState::Free,
            };
            if matches!(permit, PermitState::Waits(_)) {
                state.submitted += 1;
            }
            let signaled = state.signals_all || work::is_signaled(wr);
            state.waiting.push_back(Deferred {
                work,
                wr_id: wr.wr_id,
                signaled,
                leaves_as: flow.map(|flow| flow.stage).filter(|_| may_leave(wr.opcode, signaled)),
                bytes: flow.map_or(0, |flow| flow.bytes),
                permit,
            });
            at = wr.next;
        }
        if let Some(ticket) = first {
            self.shard().lane().cancel(ticket);
        }
        let added = state.waiting.len() - before;
        if before == 0 && added > 0 {
            lanes::advance_tick();
            state.progress = lanes::tick();
        }
        self.advance(state);
        if !state.waiting.is_empty() && !core::mem::replace(&mut state.is_listed, true) {
            self.shard().add_waiting(self);
        }
        // All of a bundle's go through the list, and only those that are still in it were deferred.
        COUNTERS.deferred.add(match state.is_candidate {
            true => added.min(state.waiting.len()),
            false => added,
        } as u64);
        result
    }

    /// Posts all permitted work requests. Reports whether there were any. Does nothing if another
    /// thread holds the queue pair.
    pub(crate) fn pump(&'static self) -> bool {
        self.state.try_lock().is_some_and(|mut state| self.advance(&mut state))
    }

    pub(super) fn advance(&'static self, state: &mut QueuePairState) -> bool {
        if state.halted || state.waiting.is_empty() {
            return false;
        }
        let mut went = false;
        while self.collect_permits(state) && self.post_front(state) {
            went = true;
        }
        if state.waiting.is_empty() {
            self.unlist(state);
        } else if !went {
            self.settle_unpolled(state);
        }
        went
    }

    /// Removes the queue pair from the lane's list of those that wait.
    pub(super) fn unlist(&'static self, state: &mut QueuePairState) {
        if core::mem::take(&mut state.is_listed) {
            self.shard().remove_waiting(self);
        }
    }

    /// Submits waiting work requests and collects permits. Reports whether the first one may go.
    fn collect_permits(&self, state: &mut QueuePairState) -> bool {
        if state.waiting.is_empty() {
            return false;
        }
        if state.readiness == SendReadiness::Broken {
            self.release_all(state);
            return true;
        }
        let mut lane = self.shard().lane();
        // The first of each queue pair is submitted even without room, so that other waiting ones
        // don't hide it from the daemon.
        while state.submitted < AHEAD.min(state.waiting.len())
            && (state.submitted == 0 || lane.has_room())
        {
            let nic = || state.context.map_or(u8::MAX, HookedContext::nic);
            let next = &mut state.waiting[state.submitted];
            if let PermitState::Unasked(flow) = &mut next.permit {
                let mut ticket = Ticket::default();
                if !lane.submit_whole_into(flow, nic, &mut ticket) {
                    self.shard().note_full();
                    break;
                }
                next.permit = if lane.poll(&mut ticket).is_some() {
                    PermitState::Permitted(ticket)
                } else {
                    PermitState::Waits(ticket)
                };
            }
            state.submitted += 1;
        }
        // The last permitted work request pulls those before it.
        let mut permitted = None;
        for (index, waits) in state.waiting.range_mut(..state.submitted).enumerate() {
            match &mut waits.permit {
                PermitState::Waits(ticket) => {
                    if lane.poll(ticket).is_none() {
                        continue;
                    }
                    waits.permit = PermitState::Permitted(core::mem::take(ticket));
                }
                PermitState::Free if index > 0 => continue,
                _ => {}
            }
            if index == 0 {
                return true;
            }
            permitted = Some(index);
        }
        let Some(permitted) = permitted else { return false };
        for waits in state.waiting.range_mut(..permitted) {
            if waits.pull(&mut lane) {
                COUNTERS.pulled.add(1);
            }
        }
        true
    }

    /// Posts the first waiting work request, which may go. Returns false if it still waits.
    fn post_front(&'static self, state: &mut QueuePairState) -> bool {
        let Some(real) = state.context.and_then(HookedContext::post_send) else { return false };
        let Some((member, ibv)) = self.target(state, real) else { return false };
        let Some(front) = state.waiting.front_mut() else { return false };
        // SAFETY: the work request is this library's copy. The queue pair is not destroyed, because
        // `close` comes before that.
        let mut failed = match unsafe { call(real, ibv, front.work.request()) } {
            Ok(()) => false,
            // The queue has room after the program polls for completions.
            Err((error, _)) if is_full(error) => return false,
            Err(_) => true,
        };
        if failed {
            COUNTERS.failed_late.add(1);
            if state.bundle.is_some() {
                self.break_members(state);
            } else {
                state.readiness = SendReadiness::Broken;
                exports::break_queue_pair(ibv);
            }
            let Some(front) = state.waiting.front_mut() else { return false };
            front.work.clear_payload();
            // SAFETY: the work request is this library's copy. In error, the provider takes and
            // completes it.
            if let Err((error, _)) = unsafe { call(real, ibv, front.work.request()) }
                && is_full(error)
            {
                // The next attempt posts it as a failed work request.
                return false;
            }
            failed = true;
        }
        let first = state.in_flight.len();
        let Some(gone) = state.waiting.pop_front() else { return false };
        state.submitted = state.submitted.saturating_sub(1);
        let ticket = match gone.permit {
            PermitState::Waits(ticket) | PermitState::Permitted(ticket) => ticket,
            PermitState::Unasked(_) | PermitState::Free => Ticket::default(),
        };
        state.in_flight.push_back(PostedWork {
            wr_id: gone.wr_id,
            signaled: gone.signaled || failed,
            bytes: gone.bytes,
            ticket,
            failed,
            member,
            is_barrier: false,
        });
        if member != 0 {
            COUNTERS.by_siblings.add(1);
        }
        self.launched(state, first);
        true
    }
}
