//! Work requests and completions of a queue pair with a bundle ([`crate::bundle`]).
//!
//! With bundles on, all work requests of a queue pair that may get one go through the list of
//! waiting ones, and the number of outstanding ones is compared with what the program asked for:
//! each queue pair of a bundle has room of its own.
//!
//! # Failure
//! A queue pair that fails completes all that it has, in order. The others are moved to the error
//! state before the program sees the first failed completion. What waits is then posted to the
//! current queue pair, where it completes after the rest. A barrier that fails is never shown: its
//! completion becomes that of the work request that waited for it, which has no other then.

use core::ffi::c_int;
use core::ptr;
use std::collections::VecDeque;

use laxity_ibverbs::{
    ibv_access_flags, ibv_cq, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask as mask, ibv_qp_state,
    ibv_send_wr, ibv_wc, ibv_wc_status, ibv_wr_opcode as op,
};
use parking_lot::MutexGuard;

use super::{PermitState, PostedWork, QueuePair, QueuePairState, SendReadiness};
use crate::bundle::{self, BARRIER_ID, BundleRoute, HeldCompletion, barrier_place, verbs};
use crate::contexts::PostSend;
use crate::lanes;
use crate::list::{PostResult, call, is_full, pass};
use crate::poll::is_receive;

/// Reports whether a work request may leave the first queue pair. The others need its receive
/// queue, or its order with other work of the responder.
pub(super) fn may_leave(opcode: op::Type, signaled: bool) -> bool {
    signaled && matches!(opcode, op::IBV_WR_RDMA_WRITE | op::IBV_WR_RDMA_READ)
}

impl QueuePair {
    /// Posts to a queue pair that has a bundle or may get one.
    ///
    /// # Safety
    /// The conditions of [`QueuePair::post`] hold.
    pub(super) unsafe fn post_candidate(
        &'static self,
        mut state: MutexGuard<'_, QueuePairState>,
        real: PostSend,
        ibv: *mut ibv_qp,
        list: *mut ibv_send_wr,
        atomic: bool,
    ) -> PostResult {
        // Where there is a bundle, the provider takes work requests in the error state.
        let passes = match state.readiness {
            SendReadiness::Ready => false,
            SendReadiness::Unknown => true,
            SendReadiness::Broken => state.bundle.is_none(),
        };
        if passes && state.waiting.is_empty() {
            drop(state);
            // SAFETY: upheld by the caller.
            return unsafe { pass(real, ibv, list) };
        }
        self.advance(&mut state);
        // SAFETY: upheld by the caller.
        unsafe {
            if atomic {
                state.takes_all(list)?;
            }
            self.defer(&mut state, list, None, atomic)
        }
    }

    /// Returns the queue pair for the first waiting work request, or `None` if it has to wait for a
    /// barrier.
    pub(super) fn target(
        &'static self,
        state: &mut QueuePairState,
        real: PostSend,
    ) -> Option<(u8, *mut ibv_qp)> {
        let stage = state.waiting.front()?.leaves_as;
        let Some(bundle) = &mut state.bundle else { return Some((0, state.ibv.0)) };
        if bundle.settle_barrier() {
            remove_barrier(&mut state.in_flight);
        }
        let wanted = if state.has_polled { bundle.wanted(stage) } else { 0 };
        let tail_is_signaled = state.in_flight.back().is_none_or(|last| last.signaled);
        match bundle.route(wanted, tail_is_signaled) {
            BundleRoute::Post => return Some(bundle.current()),
            BundleRoute::Wait => {}
            BundleRoute::Barrier => {
                let (member, _) = bundle.current();
                // SAFETY: siblings live as long as the first queue pair, and the work request lives
                // during the call.
                let posted = bundle.post_barrier(|ibv, wr| unsafe { call(real, ibv, wr) });
                match posted {
                    Ok(()) => {
                        let barrier = PostedWork::unreported(BARRIER_ID, false);
                        state.in_flight.push_back(PostedWork {
                            member,
                            is_barrier: true,
                            ..barrier
                        });
                    }
                    // There is room after the program polls.
                    Err((error, _)) if is_full(error) => {}
                    // The queue pair is in error, or as good as that.
                    Err(_) => {
                        self.break_members(state);
                        return state.bundle.as_ref().map(|bundle| bundle.current());
                    }
                }
            }
        }
        // The lane's thread looks again soon, because no permit will wake it.
        self.shard().note_full();
        None
    }

    /// Moves the siblings to the error state. Reports whether they were not in it.
    fn break_siblings(&self, state: &mut QueuePairState) -> bool {
        let Some(bundle) = &mut state.bundle else { return false };
        if core::mem::replace(&mut bundle.is_broken, true) {
            return false;
        }
        for member in &bundle.members[1..] {
            // SAFETY: siblings live as long as the bundle. One that refuses is in error already.
            unsafe { verbs::change_state(member.ibv, ibv_qp_state::IBV_QPS_ERR) };
        }
        true
    }

    /// Moves all queue pairs of the bundle to the error state.
    pub(super) fn break_members(&self, state: &mut QueuePairState) {
        if self.break_siblings(state) {
            state.readiness = SendReadiness::Broken;
            // SAFETY: the queue pair is not destroyed, because `close` comes before. If it refuses,
            // it is in error already.
            unsafe { verbs::change_state(state.ibv.0, ibv_qp_state::IBV_QPS_ERR) };
        }
    }

    /// Moves all queue pairs of a bundle to the error state after one failed, and posts what waits.
    pub(crate) fn fail_bundle(&'static self) {
        self.fail_locked(&mut self.state.lock());
    }

    fn fail_locked(&'static self, state: &mut QueuePairState) {
        if state.bundle.as_ref().is_none_or(|bundle| bundle.is_broken) {
            return;
        }
        self.break_members(state);
        self.release_all(state);
        self.advance(state);
    }

    /// Passes a completion on, with others that waited for it. `out` gets what the program may see,
    /// in order, and at most `limit` of them if any are held. Returns false if it is not of a
    /// bundle, and leaves it unchanged.
    pub(crate) fn complete_bundled(
        &'static self,
        cq: *const ibv_cq,
        wc: &mut ibv_wc,
        (out, limit): (&mut Vec<ibv_wc>, usize),
    ) -> bool {
        let mut state = self.state.lock();
        let Some(bundle) = &mut state.bundle else { return state.pass_left_over(cq, wc, out) };
        let Some(member) = bundle.member(wc.qp_num) else { return false };
        let mut wc = *wc;
        wc.qp_num = state.number();
        let success = wc.status == ibv_wc_status::IBV_WC_SUCCESS;
        let is_send_queue = state.sends_to(cq);
        let barrier = barrier_place(wc.wr_id).filter(|_| {
            is_send_queue && !success && state.position(member, wc.wr_id, false).is_none()
        });
        if (success && is_receive(wc.opcode)) || !is_send_queue {
            out.push(wc);
        } else if barrier
            .is_some_and(|place| !self.replace_barrier(&mut state, (member, place), &mut wc))
        {
            // The program doesn't know of barriers.
        } else if state.has_held(member) || state.must_hold(member, wc.wr_id, success) {
            if let Some(bundle) = &mut state.bundle {
                bundle.hold(member, wc);
            }
        } else {
            self.pass_on(&mut state, member, wc, out);
        }
        self.pass_on_held(&mut state, out, limit);
        if !success {
            self.fail_locked(&mut state);
        }
        true
    }

    /// Passes on what is held in this queue, if nothing is missing before it any more.
    pub(crate) fn release_held(
        &'static self,
        cq: *const ibv_cq,
        out: &mut Vec<ibv_wc>,
        limit: usize,
    ) {
        let mut state = self.state.lock();
        if state.bundle.is_some() && state.sends_to(cq) {
            self.pass_on_held(&mut state, out, limit);
        }
    }

    fn pass_on_held(
        &'static self,
        state: &mut QueuePairState,
        out: &mut Vec<ibv_wc>,
        limit: usize,
    ) {
        while out.len() < limit
            && let Some(at) = state.first_released()
            && let Some(bundle) = &mut state.bundle
            && let Some(HeldCompletion(member, wc)) = bundle.take_held(at)
        {
            self.pass_on(state, member, wc, out);
        }
    }

    fn pass_on(
        &'static self,
        state: &mut QueuePairState,
        member: u8,
        mut wc: ibv_wc,
        out: &mut Vec<ibv_wc>,
    ) {
        let success = wc.status == ibv_wc_status::IBV_WC_SUCCESS;
        state.counts.completions += 1;
        state.progress = lanes::tick();
        state.unseen = false;
        if let Some(last) = state.position(member, wc.wr_id, success) {
            state.has_polled |= success;
            if let Some(status) = self.settle(state, last, success) {
                wc.status = status;
            }
        }
        out.push(wc);
    }

    /// Gives the completion of a barrier that failed to the work request that waited for it.
    /// Returns false if that one has a completion of its own, because the barrier's data arrived.
    fn replace_barrier(
        &'static self,
        state: &mut QueuePairState,
        (member, place): (u8, usize),
        wc: &mut ibv_wc,
    ) -> bool {
        if state.bundle.as_ref().is_none_or(|bundle| !bundle.is_outstanding(member, place)) {
            return false;
        }
        let has_failed = state.bundle.as_mut().is_some_and(|bundle| bundle.end_barrier());
        let barrier = remove_barrier(&mut state.in_flight);
        let (true, Some(barrier)) = (has_failed, barrier) else { return false };
        let Some(waited) = state.waiting.pop_front() else { return false };
        state.submitted = state.submitted.saturating_sub(1);
        if let PermitState::Waits(ticket) | PermitState::Permitted(ticket) = waited.permit {
            let mut lane = self.shard().lane();
            lane.cancel(ticket);
            if lane.has_unsent() {
                self.shard().request_flush();
            }
        }
        if state.waiting.is_empty() {
            self.unlist(state);
        }
        wc.wr_id = waited.wr_id;
        let replaced = PostedWork::unreported(waited.wr_id, true);
        // Nothing was posted after the barrier.
        state.in_flight.push_back(PostedWork { member: barrier.member, ..replaced });
        true
    }

    /// Refuses a change that bundles can't follow, and changes the siblings before the first queue
    /// pair. Returns the error for the program.
    pub(crate) fn before_bundled(
        &'static self,
        attr: &ibv_qp_attr,
        given: u32,
    ) -> Result<(), c_int> {
        if !bundle::is_on() {
            return Ok(());
        }
        let mut state = self.state.lock();
        if state.bundle.is_none() {
            return Ok(());
        }
        match (given & mask::IBV_QP_STATE != 0).then_some(attr.qp_state) {
            // The drained event would come from the first queue pair alone.
            Some(ibv_qp_state::IBV_QPS_SQD) => Err(libc::EINVAL),
            // The peer's next barrier would fail, and all of the bundle with it.
            None | Some(ibv_qp_state::IBV_QPS_RTS) if revokes_reads(attr, given) => {
                Err(libc::EINVAL)
            }
            // The siblings stop first, so that the peer changes no memory after this call.
            Some(ibv_qp_state::IBV_QPS_ERR) => {
                self.break_siblings(&mut state);
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Reports whether a change takes the peer's right to READ.
const fn revokes_reads(attr: &ibv_qp_attr, given: u32) -> bool {
    given & mask::IBV_QP_ACCESS_FLAGS != 0
        && attr.qp_access_flags & ibv_access_flags::IBV_ACCESS_REMOTE_READ == 0
}

/// Removes the entry of the only outstanding barrier, and returns it.
fn remove_barrier(in_flight: &mut VecDeque<PostedWork>) -> Option<PostedWork> {
    let at = in_flight.iter().rposition(|flight| flight.is_barrier)?;
    in_flight.remove(at)
}

impl QueuePairState {
    /// Drops the bundle. Its siblings' numbers are kept for completions that are left over.
    pub(super) fn end_bundle(&mut self) {
        if let Some(bundle) = self.bundle.take() {
            self.ended = bundle.sibling_numbers();
        }
    }

    /// Passes a completion on after the bundle has ended, if it is of a former sibling. A barrier's
    /// is dropped. Returns false for others, which are left unchanged.
    fn pass_left_over(&self, cq: *const ibv_cq, wc: &mut ibv_wc, out: &mut Vec<ibv_wc>) -> bool {
        let (number, is_ended) = (self.number(), self.ended.contains(&wc.qp_num));
        if !is_ended && wc.qp_num != number {
            return false;
        }
        let may_be_barrier = barrier_place(wc.wr_id).is_some()
            && wc.status != ibv_wc_status::IBV_WC_SUCCESS
            && self.sends_to(cq);
        if may_be_barrier && (is_ended || self.position(0, wc.wr_id, false).is_none()) {
            return true;
        }
        if is_ended {
            wc.qp_num = number;
            out.push(*wc);
        }
        is_ended
    }

    /// Reports whether the queue pair completes its work requests in this queue.
    fn sends_to(&self, cq: *const ibv_cq) -> bool {
        // SAFETY: a queue pair in the table is alive.
        unsafe { self.ibv.0.as_ref() }.is_some_and(|ibv| ptr::eq(ibv.send_cq, cq))
    }

    /// Returns the number of the program's queue pair, which is alive.
    pub(super) fn number(&self) -> u32 {
        // SAFETY: a queue pair in the table is alive.
        unsafe { self.ibv.0.as_ref() }.map_or(0, |ibv| ibv.qp_num)
    }

    /// Returns the place of the work request that a completion belongs to.
    fn position(&self, member: u8, wr_id: u64, success: bool) -> Option<usize> {
        // In error, unsignaled work requests complete, too.
        self.in_flight.iter().position(|flight| {
            flight.member == member
                && flight.wr_id == wr_id
                && !flight.is_barrier
                && (flight.signaled || !success)
        })
    }

    /// Reports whether a completion of this queue pair is held.
    fn has_held(&self, member: u8) -> bool {
        self.bundle.as_ref().is_some_and(|bundle| bundle.held.iter().any(|it| it.0 == member))
    }

    /// Returns the place of a held completion that may be passed on: nothing is missing before it,
    /// and none of its queue pair is held before it.
    fn first_released(&self) -> Option<usize> {
        let held = &self.bundle.as_ref()?.held;
        held.iter().enumerate().position(|(at, HeldCompletion(member, wc))| {
            let success = wc.status == ibv_wc_status::IBV_WC_SUCCESS;
            !held.range(..at).any(|before| before.0 == *member)
                && !self.must_hold(*member, wc.wr_id, success)
        })
    }

    /// Reports whether a completion came before one of an earlier work request, which another queue
    /// pair of the bundle completes.
    fn must_hold(&self, member: u8, wr_id: u64, success: bool) -> bool {
        self.position(member, wr_id, success).is_some_and(|at| {
            self.in_flight.range(..at).any(|flight| flight.signaled && flight.member != member)
        })
    }
}
