//! Extended completion queues, polled by `ibv_start_poll` and `ibv_next_poll`.
//!
//! Between start and end, a provider may hold the queue's lock. It also takes that lock in a post
//! that finds its send queue full. Nothing here therefore waits for a queue pair that another
//! thread posts to. A completion of such a queue pair is kept until the poll has ended.
//!
//! # Safety
//! Unless a function says otherwise, its callers uphold the conditions of the libibverbs function
//! that it replaces.

use core::ffi::c_int;
use core::ptr;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use laxity_ibverbs::{
    ibv_context, ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_create_cq_wc_flags, ibv_poll_cq_attr,
    ibv_wc_status,
};
use laxity_job::fork::PerProcess;
use parking_lot::RwLock;

use crate::bundle::candidate;
use crate::contexts::{self, HookedContext};
use crate::exports::within;
use crate::queue_pair::QueuePair;
use crate::{lanes, poll};

type StartPoll = unsafe extern "C" fn(*mut ibv_cq_ex, *mut ibv_poll_cq_attr) -> c_int;
type NextPoll = unsafe extern "C" fn(*mut ibv_cq_ex) -> c_int;
type EndPoll = unsafe extern "C" fn(*mut ibv_cq_ex);

/// Fields of a completion that `ibv_poll_cq` returns, too (`IBV_WC_STANDARD_FLAGS`).
const STANDARD_FLAGS: u64 = 0x7f;

/// The original operations of a completion queue. Providers choose them per queue.
#[derive(Clone, Copy)]
struct OriginalPoll {
    context: &'static HookedContext,
    start_poll: StartPoll,
    next_poll: NextPoll,
    end_poll: EndPoll,
    /// Whether the queue is known to be polled by this interface.
    is_noted: bool,
}

/// A completion that could not be reported to its queue pair at once.
struct LateCompletion {
    queue_pair: &'static QueuePair,
    cq: usize,
    wr_id: u64,
    status: ibv_wc_status::Type,
}

thread_local! {
    /// The kept completions of this thread's current poll.
    static KEPT: RefCell<Vec<LateCompletion>> = const { RefCell::new(Vec::new()) };
}

/// The queues by address. The next queue at an address replaces the entry.
static QUEUES: PerProcess<RwLock<HashMap<usize, OriginalPoll>>> = PerProcess::none();

fn queues() -> &'static RwLock<HashMap<usize, OriginalPoll>> {
    QUEUES.get_or_make(RwLock::default)
}

/// Replaces `verbs_context.create_cq_ex`.
pub(crate) unsafe extern "C" fn create_cq_ex(
    ibv: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: upheld by the caller. The attributes are plain data, of which a copy is changed.
    unsafe {
        let Some((context, real)) =
            contexts::find(ibv).and_then(|context| Some((context, context.create_cq_ex()?)))
        else {
            return ptr::null_mut();
        };
        // A completion can't be assigned without its queue pair's number.
        let mut with_number = ptr::read(attr);
        with_number.wc_flags |= u64::from(ibv_create_cq_wc_flags::IBV_WC_EX_WITH_QP_NUM);
        let cq = real(ibv, &mut with_number);
        if cq.is_null() {
            let cq = real(ibv, attr);
            if !cq.is_null() {
                candidate::note_new_queue(cq.cast());
                candidate::note_extended(cq.cast());
            }
            return cq;
        }
        candidate::note_new_queue(cq.cast());
        if let (Some(start_poll), Some(next_poll), Some(end_poll), Some(_)) =
            ((*cq).start_poll, (*cq).next_poll, (*cq).end_poll, (*cq).read_qp_num)
        {
            let is_noted = (*attr).wc_flags & !STANDARD_FLAGS != 0;
            if is_noted {
                candidate::note_extended(cq.cast());
            }
            let before = OriginalPoll { context, start_poll, next_poll, end_poll, is_noted };
            queues().write().insert(cq as usize, before);
            (*cq).start_poll = Some(start);
            (*cq).next_poll = Some(next);
            (*cq).end_poll = Some(end);
        } else {
            candidate::note_extended(cq.cast());
        }
        cq
    }
}

fn before(cq: *mut ibv_cq_ex) -> Option<OriginalPoll> {
    queues().read().get(&(cq as usize)).copied()
}

/// Prints the first refusal of a process.
#[cold]
fn warn_of_bundle() {
    static WARNED: AtomicBool = AtomicBool::new(false);
    // Relaxed, because only one thread has to print.
    if !WARNED.swap(true, Ordering::Relaxed) {
        eprintln!(
            "laxity: ibv_start_poll is refused for a completion queue with bundles, which \
             ibv_poll_cq polled before; run the program without LAXITY_BUNDLES"
        );
    }
}

unsafe extern "C" fn start(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    let Some(before) = before(cq) else { return libc::EINVAL };
    if !before.is_noted {
        if !candidate::note_extended(cq.cast()) {
            warn_of_bundle();
            return libc::EOPNOTSUPP;
        }
        if let Some(known) = queues().write().get_mut(&(cq as usize)) {
            known.is_noted = true;
        }
    }
    if before.context.is_ours() {
        before.context.note_poll(cq.cast());
        lanes::pump_all();
    }
    // SAFETY: upheld by the caller.
    unsafe {
        let result = within(|| (before.start_poll)(cq, attr));
        account(cq, &before, result);
        result
    }
}

unsafe extern "C" fn end(cq: *mut ibv_cq_ex) {
    let Some(before) = before(cq) else { return };
    // SAFETY: upheld by the caller.
    within(|| unsafe { (before.end_poll)(cq) });
    // The list is gone if an exit handler polls, after the thread's own data were destroyed.
    for kept in KEPT.try_with(RefCell::take).unwrap_or_default() {
        kept.queue_pair.completed(kept.cq as *const ibv_cq, kept.wr_id, kept.status);
    }
}

unsafe extern "C" fn next(cq: *mut ibv_cq_ex) -> c_int {
    let Some(before) = before(cq) else { return libc::EINVAL };
    // SAFETY: upheld by the caller.
    unsafe {
        let result = within(|| (before.next_poll)(cq));
        account(cq, &before, result);
        result
    }
}

/// # Safety
/// If `result` is 0, `cq` has a current completion.
unsafe fn account(cq: *mut ibv_cq_ex, before: &OriginalPoll, result: c_int) {
    if result != 0 || !before.context.is_ours() {
        return;
    }
    // SAFETY: upheld by the caller. The queue was made with these readers.
    unsafe {
        let success = (*cq).status == ibv_wc_status::IBV_WC_SUCCESS;
        let received = success && (*cq).read_opcode.is_some_and(|read| poll::is_receive(read(cq)));
        let Some(number) = (*cq).read_qp_num.map(|read| read(cq)) else { return };
        let Some(queue_pair) = before.context.queue_pairs.find(number).filter(|_| !received) else {
            return;
        };
        let (wr_id, status) = ((*cq).wr_id, (*cq).status);
        match queue_pair.try_completed(cq.cast(), wr_id, status) {
            Some(Some(other)) => (*cq).status = other,
            Some(None) => {}
            None => {
                let late = LateCompletion { queue_pair, cq: cq as usize, wr_id, status };
                // In an exit handler the list may be gone. The flow then ends with the process.
                let _ = KEPT.try_with(|kept| kept.borrow_mut().push(late));
            }
        }
    }
}
