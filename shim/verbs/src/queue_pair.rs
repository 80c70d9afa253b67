//! One queue pair: what waits in it, what is on the wire, and the order of both.
//!
//! # Order
//! Work requests leave in the order in which they were posted. Each is a flow of its own,
//! so that the daemon sees how much waits and for whom. If one is permitted behind others that are
//! not, those go too (*pulled*): they stand in its way, so its urgency is theirs.
//!
//! # How much waits
//! A program may have `max_send_wr` outstanding; what waits here counts, so that
//! it is refused exactly where the provider would refuse it. Only as long as something waits:
//! otherwise the provider itself counts, and knows better.
//!
//! # Completions
//! One completion stands for all work requests up to its own. What was posted without
//! a signal and has no signaled one behind it in the same post is reported complete as soon as it
//! is posted: nobody can tell when it is, and the permit for the one that would tell may have to
//! wait for it.
//!
//! What nobody polls for counts as complete after a while, see [`unpolled`].
//!
//! While nothing waits on any port, small ones are not told of one by one, see [`ahead`].

mod ahead;
mod at_once;
mod completion;
mod unpolled;
mod waiting;

use core::ffi::c_int;
use core::ptr;
use std::collections::VecDeque;

use ahead::Ahead;
use laxity_client::{Flow, Lane, Ticket, peers};
use laxity_ibverbs::{
    ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type, ibv_send_wr,
};
use laxity_job::real;
use laxity_job::symbol::Symbol;
use parking_lot::Mutex;

use crate::builder::Builder;
use crate::contexts::{Context, PostSend};
use crate::exports::of_libibverbs;
use crate::lanes::{self, LANES, Shard};
use crate::list::{Posted, pass};
use crate::report::COUNTERS;
use crate::table;
use crate::work::{self, Limits, Work};

/// Work requests of one queue pair that are submitted to the daemon at a time. Enough that it sees
/// what comes, few enough that many queue pairs fit in a lane.
const AHEAD: usize = 32;
/// Completions that may be missing before the oldest is assumed completed: of a program that polls
/// past us.
const IN_FLIGHT_MAX: usize = 1 << 16;

static QUERY_QP: Symbol = of_libibverbs(c"ibv_query_qp", Some(c"IBVERBS_1.1"));

/// What the program may post.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum SendReadiness {
    /// Nothing so far, or it isn't known: the provider decides.
    #[default]
    Unknown,
    /// Ready to send.
    Ready,
    /// In error: everything completes at once, with an error.
    Broken,
}

/// Whether a work request that waits is permitted.
#[derive(Debug)]
enum PermitState {
    /// Its flow was not submitted so far.
    Unasked(Flow),
    /// It was, and waits.
    Waits(Ticket),
    /// It may go. Bytes of the ticket are to be completed.
    Permitted(Ticket),
}

#[derive(Debug)]
struct Deferred {
    work: Work,
    wr_id: u64,
    signaled: bool,
    bytes: u64,
    permit: PermitState,
}

impl Deferred {
    /// It goes whether it is permitted or not; true if it was not.
    fn pull(&mut self, lane: &mut Lane) -> bool {
        match &mut self.permit {
            PermitState::Permitted(_) => return false,
            PermitState::Waits(ticket) => lane.cancel(core::mem::take(ticket)),
            PermitState::Unasked(_) => {}
        }
        self.permit = PermitState::Permitted(Ticket::default());
        true
    }
}

/// A work request that the provider has.
#[derive(Debug)]
struct InFlight {
    wr_id: u64,
    signaled: bool,
    bytes: u64,
    ticket: Ticket,
    /// The provider refused it after the program had been told that all is well; it completes with
    /// an error.
    failed: bool,
}

impl InFlight {
    /// One that no flow stands for so far.
    const fn untold(wr_id: u64, signaled: bool) -> Self {
        Self {
            wr_id,
            signaled,
            bytes: 0,
            ticket: Ticket::DONE,
            failed: false,
        }
    }
}

/// Everything about a queue pair that changes.
#[derive(Debug, Default)]
struct State {
    context: Option<&'static Context>,
    ibv: Handle,
    readiness: SendReadiness,
    /// Nothing is posted now: its state is being changed.
    halted: bool,
    /// RC or UC: others pass.
    scheduled: bool,
    /// The other end, 0 if unknown.
    peer: u8,
    signals_all: bool,
    limits: Option<Limits>,
    asked_limits: bool,
    counts: Counts,
    /// Its completion queue was not polled through us so far: what is in flight cannot be known.
    unseen: bool,
    /// When it last made progress, or something began to wait or to be in flight, in ticks.
    progress: u32,
    /// It is in the list of [`Shard::watch`].
    watched: bool,
    ahead: Ahead,
    waiting: VecDeque<Deferred>,
    /// How many of them, from the front, were submitted.
    submitted: usize,
    in_flight: VecDeque<InFlight>,
}

/// What passed through, for the report: counted where the lock is held anyway.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    /// Work requests that the provider took from us, and their payload.
    pub(crate) posted: u64,
    pub(crate) posted_bytes: u64,
    /// Completions seen.
    pub(crate) completions: u64,
}

/// The program's queue pair.
#[derive(Debug)]
struct Handle(*mut ibv_qp);

// SAFETY: verbs on a queue pair may be called from any thread.
unsafe impl Send for Handle {}

impl Default for Handle {
    fn default() -> Self {
        Self(ptr::null_mut())
    }
}

/// A queue pair. Never freed, see [`crate::table`].
#[derive(Debug)]
pub(crate) struct QueuePair {
    shard: usize,
    state: Mutex<State>,
    pub(crate) builder: Mutex<Builder>,
}

impl QueuePair {
    pub(crate) fn new() -> Self {
        use core::sync::atomic::{AtomicUsize, Ordering};
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        Self {
            shard: NEXT.fetch_add(1, Ordering::Relaxed) % LANES,
            state: Mutex::default(),
            builder: Mutex::default(),
        }
    }

    fn shard(&self) -> &'static Shard {
        &lanes::all().shards[self.shard]
    }

    /// A queue pair was made, or was seen for the first time. What is known of it already is not
    /// forgotten.
    pub(crate) fn open(
        &self,
        context: &'static Context,
        ibv: *mut ibv_qp,
        known: Option<(Limits, bool)>,
    ) {
        let mut state = self.state.lock();
        // SAFETY: the caller's queue pair, which is alive.
        let kind = unsafe { (*ibv).qp_type };
        state.context = Some(context);
        state.ibv = Handle(ibv);
        state.scheduled = matches!(kind, ibv_qp_type::IBV_QPT_RC | ibv_qp_type::IBV_QPT_UC);
        if let Some((limits, signals_all)) = known {
            state.limits = Some(limits);
            state.signals_all = signals_all;
            state.asked_limits = true;
        }
    }

    /// Its other end is known: the GID with which it becomes ready to receive.
    pub(crate) fn connects(&self, gid: [u8; 16]) {
        self.state.lock().peer = peers::number(gid);
    }

    /// The queue pair is destroyed: what waits is dropped, as the provider drops what it has.
    pub(crate) fn close(&'static self) {
        let mut state = self.state.lock();
        self.drop_all(&mut state);
        if state.watched {
            self.shard().unwatch(self);
        }
        let counts = state.counts;
        *state = State::default();
        state.counts = counts;
    }

    /// Closed and named by nothing any more: it may become another. Not if the program destroyed it
    /// between `ibv_wr_start` and its end: then its builder stays locked.
    pub(crate) fn recycle(&'static self) {
        if !self.builder.is_locked() {
            table::free().lock().push(self);
        }
    }

    /// The daemon hears of what went ahead. Not if another thread is at it.
    pub(crate) fn tell(&self) {
        if let Some(mut state) = self.state.try_lock() {
            self.end_ahead(&mut state);
        }
    }

    /// What it has counted, in all its lives. Not if another thread is at it: this is for the end.
    pub(crate) fn counts(&self) -> Counts {
        let patience = core::time::Duration::from_millis(100);
        self.state
            .try_lock_for(patience)
            .map_or_else(Counts::default, |state| state.counts)
    }

    /// Its state was changed, or not.
    pub(crate) fn moved(&'static self, to: ibv_qp_state::Type, success: bool) {
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
                state.peer = 0;
            }
            _ => {}
        }
    }

    /// Its state is about to be changed.
    pub(crate) fn moves(&'static self, to: ibv_qp_state::Type) {
        let mut state = self.state.lock();
        match to {
            // What waits is to be drained, too, or to complete with an error: not every provider
            // takes work requests in ERR.
            ibv_qp_state::IBV_QPS_SQD | ibv_qp_state::IBV_QPS_ERR => {
                self.release_all(&mut state);
                self.advance(&mut state);
            }
            // Providers take work requests in RESET without a look at the state, and would send
            // them after it.
            ibv_qp_state::IBV_QPS_RESET => state.halted = true,
            _ => {}
        }
    }

    fn drop_all(&'static self, state: &mut State) {
        self.end_ahead(state);
        if state.waiting.is_empty() && state.in_flight.is_empty() {
            return;
        }
        COUNTERS.dropped.add(state.waiting.len() as u64);
        let shard = self.shard();
        let mut lane = shard.lane();
        let waited = !state.waiting.is_empty();
        for gone in state.waiting.drain(..) {
            if let PermitState::Waits(ticket) | PermitState::Permitted(ticket) = gone.permit {
                lane.cancel(ticket);
            }
        }
        for gone in state.in_flight.drain(..) {
            self.land(&mut lane, &gone.ticket, gone.bytes);
        }
        if lane.owes() {
            shard.owe();
        }
        state.submitted = 0;
        drop(lane);
        if waited {
            shard.strike(self);
        }
    }

    /// Posts a list of work requests, or has them wait.
    ///
    /// `atomic`: all of them or none, as `ibv_wr_complete` promises.
    ///
    /// # Safety
    /// As for `ibv_post_send`; `real` is the provider's.
    pub(crate) unsafe fn post(
        &'static self,
        real: PostSend,
        ibv: *mut ibv_qp,
        list: *mut ibv_send_wr,
        atomic: bool,
    ) -> Posted {
        let mut state = self.state.lock();
        // SAFETY: upheld by the caller, here and below.
        let is_one = unsafe { list.as_ref() }.is_some_and(|one| one.next.is_null());
        if is_one && state.is_clear() {
            // SAFETY: as above.
            let posted = unsafe { self.post_ahead(&mut state, real, ibv, list) };
            if let Some(posted) = posted {
                return posted;
            }
        }
        if !state.scheduled || (state.readiness != SendReadiness::Ready && state.waiting.is_empty())
        {
            drop(state);
            // SAFETY: as above.
            return unsafe { pass(real, ibv, list) };
        }
        state.learn(ibv);
        if !state.waiting.is_empty() {
            self.advance(&mut state);
        }
        // SAFETY: as above.
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

impl State {
    /// By which number the daemon knows the NIC.
    #[inline]
    fn nic(&self) -> u8 {
        self.context.map_or(u8::MAX, Context::nic)
    }

    /// Nothing waits, and the provider takes what comes.
    fn is_clear(&self) -> bool {
        matches!(self.readiness, SendReadiness::Ready) && self.waiting.is_empty()
    }

    /// Whether one more work request, the `nth` of a call, is what the provider would take.
    ///
    /// # Safety
    /// As for [`work::sges`].
    unsafe fn takes(&self, wr: &ibv_send_wr, nth: usize) -> Result<(), c_int> {
        // While nothing waits, the provider counts.
        let outstanding = if self.waiting.is_empty() {
            0
        } else {
            self.outstanding()
        };
        let full = self
            .limits
            .is_some_and(|l| outstanding + nth > l.work_requests);
        // SAFETY: upheld by the caller.
        let valid = unsafe { work::is_valid(wr, self.limits.as_ref()) };
        if full || !valid {
            COUNTERS.refused.add(1);
            return Err(if full { libc::ENOMEM } else { libc::EINVAL });
        }
        Ok(())
    }

    /// Whether all of a list is.
    ///
    /// # Safety
    /// A list as a caller of `ibv_post_send` makes it.
    unsafe fn takes_all(&self, list: *mut ibv_send_wr) -> Posted {
        let (mut at, mut nth) = (list, 0);
        // SAFETY: upheld by the caller, here and below.
        while let Some(wr) = unsafe { at.as_ref() } {
            nth += 1;
            // SAFETY: as above.
            unsafe { self.takes(wr, nth) }.map_err(|error| (error, list))?;
            at = wr.next;
        }
        Ok(())
    }

    /// Work requests that the program has posted and not seen completed.
    fn outstanding(&self) -> usize {
        if self.unseen {
            return self.waiting.len();
        }
        self.in_flight.len() + self.waiting.len()
    }

    /// Asks the kernel for what was not seen when the queue pair was made.
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
        // SAFETY: both are plain data that the call fills.
        unsafe {
            let mut attr = core::mem::zeroed::<ibv_qp_attr>();
            let mut init = core::mem::zeroed::<ibv_qp_init_attr>();
            let mask = ibv_qp_attr_mask::IBV_QP_CAP as c_int;
            if query(ibv, &mut attr, mask, &mut init) == 0 {
                self.limits = Some(Limits {
                    work_requests: attr.cap.max_send_wr as usize,
                    sges: attr.cap.max_send_sge,
                    inline_bytes: attr.cap.max_inline_data,
                });
                self.signals_all = init.sq_sig_all != 0;
            }
        }
    }
}
