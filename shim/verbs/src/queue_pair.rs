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
mod unpolled;

use core::ffi::c_int;
use core::ptr;
use std::collections::VecDeque;

use ahead::Ahead;
use laxity_client::{Flow, Lane, Ticket, peers};
use laxity_ibverbs::{
    ibv_cq, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type,
    ibv_send_wr, ibv_wc_status,
};
use laxity_job::real;
use laxity_job::symbol::Symbol;
use parking_lot::Mutex;

use crate::builder::Builder;
use crate::contexts::{Context, PostSend};
use crate::exports::{self, of_libibverbs};
use crate::lanes::{self, LANES, Shard};
use crate::list::{Posted, call, is_full, pass};
use crate::report::COUNTERS;
use crate::work::{self, Limits, Work};
use crate::{classify, table};

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

    /// Bytes of a ticket are complete.
    #[inline]
    fn land(&self, lane: &mut Lane, ticket: &Ticket, bytes: u64) {
        lane.complete(ticket, bytes);
        if lane.owes() {
            self.shard().owe();
        }
    }

    fn release_all(&self, state: &mut State) {
        let mut lane = self.shard().lane();
        for waits in &mut state.waiting {
            waits.pull(&mut lane);
        }
        state.submitted = state.waiting.len();
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

    /// More completions are missing than any queue holds.
    #[cold]
    fn assume_completed(&self, state: &mut State) {
        let mut lane = self.shard().lane();
        while state.in_flight.len() > IN_FLIGHT_MAX {
            if let Some(oldest) = state.in_flight.pop_front() {
                self.land(&mut lane, &oldest.ticket, oldest.bytes);
            }
        }
    }

    /// The provider has taken all in flight from `first` on.
    #[inline]
    fn launched(&'static self, state: &mut State, first: usize) {
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

    /// Has a list wait. `first` is the ticket of its first, if that was submitted. If all of it was
    /// found acceptable before (`accepted`), none is refused.
    ///
    /// # Safety
    /// As for [`QueuePair::post`].
    unsafe fn defer(
        &'static self,
        state: &mut State,
        list: *mut ibv_send_wr,
        first: Option<Ticket>,
        accepted: bool,
    ) -> Posted {
        self.end_ahead(state);
        let peer = state.peer;
        let mut first = first;
        let mut result = Ok(());
        let before = state.waiting.len();
        let mut at = list;
        // SAFETY: upheld by the caller, here and below.
        while let Some(wr) = unsafe { at.as_ref() } {
            if !accepted {
                // SAFETY: as above.
                if let Err(error) = unsafe { state.takes(wr, 1) } {
                    result = Err((error, at));
                    break;
                }
            }
            // SAFETY: as above.
            let (work, flow) = unsafe { (Work::copy(wr), classify::flow(wr, peer)) };
            let permit = match (first.take(), flow) {
                (Some(ticket), _) => PermitState::Waits(ticket),
                (None, Some(flow)) => PermitState::Unasked(flow),
                (None, None) => PermitState::Permitted(Ticket::default()),
            };
            if matches!(permit, PermitState::Waits(_)) {
                state.submitted += 1;
            }
            state.waiting.push_back(Deferred {
                work,
                wr_id: wr.wr_id,
                signaled: state.signals_all || work::is_signaled(wr),
                bytes: flow.map_or(0, |flow| flow.bytes),
                permit,
            });
            at = wr.next;
        }
        if let Some(ticket) = first {
            self.shard().lane().cancel(ticket);
        }
        COUNTERS.deferred.add((state.waiting.len() - before) as u64);
        if before == 0 && !state.waiting.is_empty() {
            lanes::advance_tick();
            state.progress = lanes::tick();
            self.shard().enlist(self);
        }
        self.advance(state);
        result
    }

    /// Posts what may go by now; whether anything went. Does nothing if another thread is at it.
    pub(crate) fn pump(&'static self) -> bool {
        self.state
            .try_lock()
            .is_some_and(|mut state| self.advance(&mut state))
    }

    fn advance(&'static self, state: &mut State) -> bool {
        if state.halted || state.waiting.is_empty() {
            return false;
        }
        let mut went = false;
        while self.collect_permits(state) && self.post_front(state) {
            went = true;
        }
        if state.waiting.is_empty() {
            self.shard().strike(self);
        } else if !went {
            self.settle_unpolled(state);
        }
        went
    }

    /// Submits what can be, collects permits; whether the first that waits may go.
    fn collect_permits(&self, state: &mut State) -> bool {
        if state.waiting.is_empty() {
            return false;
        }
        if state.readiness == SendReadiness::Broken {
            self.release_all(state);
            return true;
        }
        let mut lane = self.shard().lane();
        // The first of each queue pair in any case: others that wait must not hide it from the
        // daemon.
        while state.submitted < AHEAD.min(state.waiting.len())
            && (state.submitted == 0 || lane.has_room())
        {
            let nic = || state.context.map_or(u8::MAX, Context::nic);
            let next = &mut state.waiting[state.submitted];
            if let PermitState::Unasked(flow) = &mut next.permit {
                let mut ticket = Ticket::default();
                if !lane.submit_whole_into(flow, nic, &mut ticket) {
                    self.shard().is_full();
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
        // The last one that may go takes along what is in front of it.
        let mut permitted = None;
        for (index, waits) in state.waiting.range_mut(..state.submitted).enumerate() {
            if let PermitState::Waits(ticket) = &mut waits.permit {
                if lane.poll(ticket).is_none() {
                    continue;
                }
                waits.permit = PermitState::Permitted(core::mem::take(ticket));
            }
            if index == 0 {
                return true;
            }
            permitted = Some(index);
        }
        let Some(permitted) = permitted else {
            return false;
        };
        for waits in state.waiting.range_mut(..permitted) {
            if waits.pull(&mut lane) {
                COUNTERS.pulled.add(1);
            }
        }
        true
    }

    /// Posts the first that waits, which may go; whether the provider took it, or refused it for
    /// good.
    fn post_front(&'static self, state: &mut State) -> bool {
        let Some(real) = state.context.and_then(Context::post_send) else {
            return false;
        };
        let ibv = state.ibv.0;
        let Some(front) = state.waiting.front_mut() else {
            return false;
        };
        // SAFETY: our own copy, on a queue pair that is not destroyed: `close` comes before that.
        let mut failed = match unsafe { call(real, ibv, front.work.request()) } {
            Ok(()) => false,
            // The program has not polled the completions that make room for it.
            Err((error, _)) if is_full(error) => return false,
            Err(_) => true,
        };
        if failed {
            COUNTERS.failed_late.add(1);
            state.readiness = SendReadiness::Broken;
            exports::break_queue_pair(ibv);
            front.work.hollow();
            // SAFETY: as above. In error, the provider takes it and completes it in its turn.
            if let Err((error, _)) = unsafe { call(real, ibv, front.work.request()) }
                && is_full(error)
            {
                // Tried again, and then as what it is: one that fails.
                return false;
            }
            failed = true;
        }
        let first = state.in_flight.len();
        let Some(gone) = state.waiting.pop_front() else {
            return false;
        };
        state.submitted = state.submitted.saturating_sub(1);
        let ticket = match gone.permit {
            PermitState::Waits(ticket) | PermitState::Permitted(ticket) => ticket,
            PermitState::Unasked(_) => Ticket::default(),
        };
        state.in_flight.push_back(InFlight {
            wr_id: gone.wr_id,
            signaled: gone.signaled || failed,
            bytes: gone.bytes,
            ticket,
            failed,
        });
        self.launched(state, first);
        true
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
