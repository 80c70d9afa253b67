//! One queue pair: its waiting work requests, those in flight, and the order of both.
//!
//! # Order
//! Work requests leave in the order in which they were posted. Each is a flow of its own, so the
//! daemon sees all that wait. If one is permitted behind others that are not, the others go, too
//! (they are *pulled*). They block it, so they are as urgent.
//!
//! # How much waits
//! A program may have `max_send_wr` work requests outstanding. Waiting ones count, so that the
//! program is refused exactly where the provider would refuse it. While none waits, the provider
//! counts.
//!
//! # Completions
//! A completion stands for all work requests up to its own. An unsignaled work request without a
//! signaled one behind it in the same post is reported complete as soon as it is posted. Its
//! completion can't be observed, and the permit of the next signaled one may depend on it.
//!
//! Work requests that nobody polls for count as complete after a while, see [`unpolled`].
//!
//! While nothing waits on any port, small work requests are reported together, see [`ahead`].

mod ahead;
mod at_once;
mod bundle_control;
mod bundled;
mod completion;
mod deferred;
#[cfg(test)]
pub(crate) mod model;
mod unpolled;
mod waiting;

use core::ffi::c_int;
use core::ptr;
use std::collections::VecDeque;

use ahead::QueuePairLoan;
use deferred::{Deferred, PermitState};
use laxity_client::{Ticket, peers};
use laxity_ibverbs::{
    ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type, ibv_send_wr,
};
use laxity_job::real;
use laxity_job::symbol::Symbol;
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::builder::Builder;
use crate::bundle::candidate::BundleCandidate;
use crate::bundle::{QueuePairBundle, SIBLINGS_MAX};
use crate::contexts::{HookedContext, PostSend};
use crate::exports::of_libibverbs;
use crate::lanes::{self, LANES, LaneShard};
use crate::list::{PostResult, pass};
use crate::report::COUNTERS;
use crate::table;
use crate::work::{self, SendLimits};

/// Largest number of submitted work requests of a queue pair. The daemon sees what comes next, and
/// many queue pairs fit into a lane.
const AHEAD: usize = 32;
/// Largest number of work requests in flight before the oldest is assumed complete. A program that
/// polls past this library exceeds it.
const IN_FLIGHT_MAX: usize = 1 << 16;
/// Longest wait for a lock at the process's end.
pub(crate) const END_PATIENCE: core::time::Duration = core::time::Duration::from_millis(100);

static QUERY_QP: Symbol = of_libibverbs("ibv_query_qp\0", Some(c"IBVERBS_1.1"));

/// Whether the program may post.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum SendReadiness {
    /// The program may not post yet, or the state is unknown, so the provider decides.
    #[default]
    Unknown,
    /// The queue pair is ready to send.
    Ready,
    /// The queue pair is in error, and each work request completes at once with an error.
    Broken,
}

/// A work request that the provider has.
#[derive(Debug)]
struct PostedWork {
    wr_id: u64,
    signaled: bool,
    bytes: u64,
    ticket: Ticket,
    /// Whether the provider refused it after the program's post. It completes with an error.
    failed: bool,
    /// The queue pair of a bundle that has it.
    member: u8,
    /// Whether it is a barrier of a bundle, which the program doesn't know.
    is_barrier: bool,
}

impl PostedWork {
    /// Returns a work request in flight that is not part of a reported flow.
    const fn unreported(wr_id: u64, signaled: bool) -> Self {
        Self {
            wr_id,
            signaled,
            bytes: 0,
            ticket: Ticket::DONE,
            failed: false,
            member: 0,
            is_barrier: false,
        }
    }
}

#[derive(Debug, Default)]
struct QueuePairState {
    context: Option<&'static HookedContext>,
    ibv: QueuePairPointer,
    readiness: SendReadiness,
    /// Whether posting is suspended during a change of state.
    halted: bool,
    /// Whether the queue pair is scheduled. RC and UC are, and other types pass through.
    scheduled: bool,
    /// The number of the peer, 0 if unknown.
    peer: u8,
    signals_all: bool,
    limits: Option<SendLimits>,
    asked_limits: bool,
    counts: WorkCounts,
    /// Whether the completion queue was never polled through this library, so work requests in
    /// flight are unknown.
    unseen: bool,
    /// The tick of the last progress, or when a work request began to wait or be in flight.
    progress: u32,
    /// Whether the queue pair is in the list of [`LaneShard::watch`].
    watched: bool,
    ahead: QueuePairLoan,
    waiting: VecDeque<Deferred>,
    /// Whether the queue pair is in the lane's list of those with waiting work requests.
    is_listed: bool,
    /// Number of waiting work requests, from the front, that were submitted.
    submitted: usize,
    in_flight: VecDeque<PostedWork>,
    /// Whether the queue pair has a bundle or may get one.
    is_candidate: bool,
    /// Whether the program polled a completion of this queue pair through this library, so that
    /// work requests in flight are known.
    has_polled: bool,
    bundle: Option<Box<QueuePairBundle>>,
    /// Numbers of siblings whose bundle has ended, for completions that are left over.
    ended: SmallVec<[u32; SIBLINGS_MAX]>,
}

/// Counters for the report, updated while the lock is held anyway.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WorkCounts {
    /// Number and payload bytes of work requests that the provider took.
    pub(crate) posted: u64,
    pub(crate) posted_bytes: u64,
    pub(crate) completions: u64,
}

#[derive(Debug)]
struct QueuePairPointer(*mut ibv_qp);

// SAFETY: verbs on a queue pair may be called from any thread.
unsafe impl Send for QueuePairPointer {}

impl Default for QueuePairPointer {
    fn default() -> Self {
        Self(ptr::null_mut())
    }
}

/// A queue pair, which is never freed (see [`crate::table`]).
#[derive(Debug)]
pub(crate) struct QueuePair {
    shard: usize,
    state: Mutex<QueuePairState>,
    pub(crate) builder: Mutex<Builder>,
    /// What siblings copy. It is locked before `state`.
    candidate: Mutex<Option<Box<BundleCandidate>>>,
}

impl QueuePair {
    pub(crate) fn new() -> Self {
        use core::sync::atomic::{AtomicUsize, Ordering};
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        Self {
            shard: NEXT.fetch_add(1, Ordering::Relaxed) % LANES,
            state: Mutex::default(),
            builder: Mutex::default(),
            candidate: Mutex::default(),
        }
    }

    fn shard(&self) -> &'static LaneShard {
        &lanes::all().shards[self.shard]
    }

    /// Records a queue pair that was made or first seen. Known values are kept.
    pub(crate) fn open(
        &self,
        context: &'static HookedContext,
        ibv: *mut ibv_qp,
        known: Option<(SendLimits, bool)>,
    ) {
        let mut state = self.state.lock();
        // SAFETY: the caller's queue pair is alive.
        let kind = unsafe { (*ibv).qp_type };
        state.context = Some(context);
        state.ibv = QueuePairPointer(ibv);
        state.scheduled = matches!(kind, ibv_qp_type::IBV_QPT_RC | ibv_qp_type::IBV_QPT_UC);
        if let Some((limits, signals_all)) = known {
            state.limits = Some(limits);
            state.signals_all = signals_all;
            state.asked_limits = true;
        }
    }

    /// Records the peer by the GID with which the queue pair becomes ready to receive.
    pub(crate) fn set_peer(&self, gid: [u8; 16]) {
        self.state.lock().peer = peers::number(gid);
    }

    /// Closes the queue pair before it is destroyed. Waiting work requests are dropped. Reports
    /// whether it had siblings, which are left to the kernel.
    pub(crate) fn close(&'static self) -> bool {
        let had_siblings = self.abandon_bundle();
        let mut state = self.state.lock();
        self.drop_all(&mut state);
        if state.watched {
            self.shard().unwatch(self);
        }
        let counts = state.counts;
        *state = QueuePairState::default();
        state.counts = counts;
        had_siblings
    }

    /// Makes a closed and removed queue pair available for reuse. If the program destroyed it
    /// between `ibv_wr_start` and its end, it stays locked and isn't reused.
    pub(crate) fn recycle(&'static self) {
        if !self.builder.is_locked() {
            table::free().lock().push(self);
        }
    }

    /// Reports all work requests that went ahead, at the process's end. Does nothing if the queue
    /// pair is locked, or its lane for longer than `limit`: a signal handler may have called `exit`
    /// in a post.
    pub(crate) fn report_ahead(&self, limit: core::time::Duration) {
        if let Some(mut state) = self.state.try_lock()
            && !state.ahead.is_idle()
            && let Some(mut lane) = self.shard().lane_within(limit)
        {
            state.ahead.repay(&mut lane);
        }
    }

    /// Returns the queue pair's counters, over all its uses. Returns zeros if another thread holds
    /// it too long, since this is for the process's end.
    pub(crate) fn counts(&self) -> WorkCounts {
        self.state.try_lock_for(END_PATIENCE).map_or_else(WorkCounts::default, |state| state.counts)
    }

    /// Records the result of a change of state.
    pub(crate) fn after_modify(&'static self, to: ibv_qp_state::Type, success: bool) {
        let mut state = self.state.lock();
        state.halted = false;
        if !success {
            self.advance(&mut state);
            return;
        }
        match to {
            ibv_qp_state::IBV_QPS_RTS => state.readiness = SendReadiness::Ready,
            ibv_qp_state::IBV_QPS_ERR => {
                state.readiness = SendReadiness::Broken;
                self.advance(&mut state);
            }
            ibv_qp_state::IBV_QPS_RESET => {
                self.drop_all(&mut state);
                state.readiness = SendReadiness::Unknown;
                state.has_polled = false;
                state.peer = 0;
            }
            _ => {}
        }
    }

    pub(crate) fn before_modify(&'static self, to: ibv_qp_state::Type) {
        let mut state = self.state.lock();
        match to {
            // Waiting work requests are drained or complete with an error, too. They go now, since
            // not every provider takes work requests in ERR.
            ibv_qp_state::IBV_QPS_SQD | ibv_qp_state::IBV_QPS_ERR => {
                self.release_all(&mut state);
                self.advance(&mut state);
            }
            // Providers take work requests in RESET without a check, and would send them later.
            ibv_qp_state::IBV_QPS_RESET => state.halted = true,
            _ => {}
        }
    }

    fn drop_all(&'static self, state: &mut QueuePairState) {
        self.end_ahead(state);
        if state.waiting.is_empty() && state.in_flight.is_empty() {
            return;
        }
        COUNTERS.dropped.add(state.waiting.len() as u64);
        let shard = self.shard();
        let mut lane = shard.lane();
        for gone in state.waiting.drain(..) {
            if let PermitState::Waits(ticket) | PermitState::Permitted(ticket) = gone.permit {
                lane.cancel(ticket);
            }
        }
        for gone in state.in_flight.drain(..) {
            self.report_delivered(&mut lane, &gone.ticket, gone.bytes);
        }
        if lane.has_unsent() {
            shard.request_flush();
        }
        state.submitted = 0;
        drop(lane);
        self.unlist(state);
    }

    /// Posts a list of work requests, or makes them wait.
    ///
    /// With `atomic`, all of them are taken or none, as `ibv_wr_complete` promises.
    ///
    /// # Safety
    /// The conditions of `ibv_post_send` hold. `real` is the provider's function.
    pub(crate) unsafe fn post(
        &'static self,
        real: PostSend,
        ibv: *mut ibv_qp,
        list: *mut ibv_send_wr,
        atomic: bool,
    ) -> PostResult {
        let mut state = self.state.lock();
        if state.is_candidate {
            // SAFETY: upheld by the caller.
            return unsafe { self.post_candidate(state, real, ibv, list, atomic) };
        }
        // SAFETY: upheld by the caller.
        let is_one = unsafe { list.as_ref() }.is_some_and(|one| one.next.is_null());
        if is_one && state.is_clear() {
            // SAFETY: upheld by the caller.
            let posted = unsafe { self.post_ahead(&mut state, real, ibv, list) };
            if let Some(posted) = posted {
                return posted;
            }
        }
        if !state.scheduled || (state.readiness != SendReadiness::Ready && state.waiting.is_empty())
        {
            drop(state);
            // SAFETY: upheld by the caller.
            return unsafe { pass(real, ibv, list) };
        }
        state.learn(ibv);
        if !state.waiting.is_empty() {
            self.advance(&mut state);
        }
        // SAFETY: upheld by the caller.
        unsafe {
            if atomic {
                state.takes_all(list)?;
            }
            if state.is_clear() {
                if is_one {
                    return self.post_one(&mut state, real, ibv, list);
                }
                self.post_at_once(&mut state, real, ibv, list, atomic)
            } else {
                self.defer(&mut state, list, None, atomic)
            }
        }
    }
}

impl QueuePairState {
    #[inline]
    fn nic(&self) -> u8 {
        self.context.map_or(u8::MAX, HookedContext::nic)
    }

    /// Reports whether nothing waits and the queue pair is ready.
    fn is_clear(&self) -> bool {
        matches!(self.readiness, SendReadiness::Ready) && self.waiting.is_empty()
    }

    /// Returns an error if the provider would refuse this work request, the `nth` of a call.
    ///
    /// # Safety
    /// The conditions of [`work::sges`] hold.
    unsafe fn takes(&self, wr: &ibv_send_wr, nth: usize) -> Result<(), c_int> {
        // While nothing waits, the provider counts, but each queue pair of a bundle counts only its
        // own.
        let counts = !self.waiting.is_empty() || (self.is_candidate && self.has_polled);
        let outstanding = if counts { self.outstanding() } else { 0 };
        let full = self.limits.is_some_and(|l| outstanding + nth > l.work_requests);
        // SAFETY: upheld by the caller.
        let valid = unsafe { work::is_valid(wr, self.limits.as_ref()) };
        if full || !valid {
            COUNTERS.refused.add(1);
            return Err(if full { libc::ENOMEM } else { libc::EINVAL });
        }
        Ok(())
    }

    /// Returns an error if the provider would refuse a work request of the list.
    ///
    /// # Safety
    /// The list is as a caller of `ibv_post_send` makes it.
    unsafe fn takes_all(&self, list: *mut ibv_send_wr) -> PostResult {
        let (mut at, mut nth) = (list, 0);
        // SAFETY: upheld by the caller.
        while let Some(wr) = unsafe { at.as_ref() } {
            nth += 1;
            // SAFETY: upheld by the caller.
            unsafe { self.takes(wr, nth) }.map_err(|error| (error, list))?;
            at = wr.next;
        }
        Ok(())
    }

    /// Returns the number of posted work requests whose completions the program has not seen.
    fn outstanding(&self) -> usize {
        if self.unseen {
            return self.waiting.len();
        }
        let barriers = self.bundle.as_ref().is_some_and(|bundle| bundle.has_barrier());
        self.in_flight.len() - usize::from(barriers) + self.waiting.len()
    }

    /// Asks the kernel for the limits if they were not seen when the queue pair was made.
    fn learn(&mut self, ibv: *mut ibv_qp) {
        if self.asked_limits {
            return;
        }
        self.asked_limits = true;
        let Some(query) = real!(
            QUERY_QP.address(),
            fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int
        ) else {
            return;
        };
        // SAFETY: both are plain data that the call writes.
        unsafe {
            let mut attr = core::mem::zeroed::<ibv_qp_attr>();
            let mut init = core::mem::zeroed::<ibv_qp_init_attr>();
            let mask = ibv_qp_attr_mask::IBV_QP_CAP as c_int;
            if query(ibv, &mut attr, mask, &mut init) == 0 {
                self.limits = Some(SendLimits {
                    work_requests: attr.cap.max_send_wr as usize,
                    sges: attr.cap.max_send_sge,
                    inline_bytes: attr.cap.max_inline_data,
                });
                self.signals_all = init.sq_sig_all != 0;
            }
        }
    }
}
