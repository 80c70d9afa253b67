//! Extended completion queues: the same through `ibv_start_poll` and `ibv_next_poll`.
//!
//! Between start and end a provider may hold the queue's lock, which it also takes in a post that
//! finds its send queue full. So nothing here waits for a queue pair that another thread posts to:
//! what it can't be told at once is kept until the poll has ended.

use core::ffi::c_int;
use core::ptr;
use std::cell::RefCell;
use std::collections::HashMap;

use laxity_ibverbs::{
    ibv_context, ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_create_cq_wc_flags, ibv_poll_cq_attr,
    ibv_wc_status,
};
use laxity_job::fork::PerProcess;
use parking_lot::RwLock;

use crate::contexts::{self, Context};
use crate::queue_pair::QueuePair;
use crate::{lanes, poll};

type StartPoll = unsafe extern "C" fn(*mut ibv_cq_ex, *mut ibv_poll_cq_attr) -> c_int;
type NextPoll = unsafe extern "C" fn(*mut ibv_cq_ex) -> c_int;
type EndPoll = unsafe extern "C" fn(*mut ibv_cq_ex);

/// What a completion queue's operations were. Providers choose them per queue.
#[derive(Clone, Copy)]
struct Before {
    context: &'static Context,
    start_poll: StartPoll,
    next_poll: NextPoll,
    end_poll: EndPoll,
}

/// A completion that its queue pair could not be told of.
struct Kept {
    queue_pair: &'static QueuePair,
    cq: usize,
    wr_id: u64,
    status: ibv_wc_status::Type,
}

thread_local! {
    /// Those of the poll that this thread is in.
    static KEPT: RefCell<Vec<Kept>> = const { RefCell::new(Vec::new()) };
}

/// By address. An entry stays when its queue is destroyed: the next one there replaces it.
static QUEUES: PerProcess<RwLock<HashMap<usize, Before>>> = PerProcess::none();

fn queues() -> &'static RwLock<HashMap<usize, Before>> {
    QUEUES.get_or_make(RwLock::default)
}

/// What `verbs_context.create_cq_ex` leads to.
///
/// # Safety
/// As for `ibv_create_cq_ex`.
pub(crate) unsafe extern "C" fn create_cq_ex(
    ibv: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: upheld by the caller; the attributes are plain data, of which a copy is changed.
    unsafe {
        let Some((context, real)) =
            contexts::find(ibv).and_then(|context| Some((context, context.create_cq_ex()?)))
        else {
            return ptr::null_mut();
        };
        // Without the number of the queue pair a completion tells nothing.
        let mut with_number = ptr::read(attr);
        with_number.wc_flags |= u64::from(ibv_create_cq_wc_flags::IBV_WC_EX_WITH_QP_NUM);
        let cq = real(ibv, &mut with_number);
        if cq.is_null() {
            return real(ibv, attr);
        }
        if let (Some(start_poll), Some(next_poll), Some(end_poll), Some(_)) = (
            (*cq).start_poll,
            (*cq).next_poll,
            (*cq).end_poll,
            (*cq).read_qp_num,
        ) {
            let before = Before {
                context,
                start_poll,
                next_poll,
                end_poll,
            };
            queues().write().insert(cq as usize, before);
            (*cq).start_poll = Some(start);
            (*cq).next_poll = Some(next);
            (*cq).end_poll = Some(end);
        }
        cq
    }
}

fn before(cq: *mut ibv_cq_ex) -> Option<Before> {
    queues().read().get(&(cq as usize)).copied()
}

/// # Safety
/// As for `ibv_start_poll`.
unsafe extern "C" fn start(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    let Some(before) = before(cq) else {
        return libc::EINVAL;
    };
    if before.context.is_ours() {
        before.context.polls(cq.cast());
        lanes::pump_all();
    }
    // SAFETY: upheld by the caller.
    unsafe {
        let result = (before.start_poll)(cq, attr);
        account(cq, &before, result);
        result
    }
}

/// # Safety
/// As for `ibv_end_poll`.
unsafe extern "C" fn end(cq: *mut ibv_cq_ex) {
    let Some(before) = before(cq) else { return };
    // SAFETY: upheld by the caller.
    unsafe { (before.end_poll)(cq) };
    for kept in KEPT.take() {
        kept.queue_pair
            .completed(kept.cq as *const ibv_cq, kept.wr_id, kept.status);
    }
}

/// # Safety
/// As for `ibv_next_poll`.
unsafe extern "C" fn next(cq: *mut ibv_cq_ex) -> c_int {
    let Some(before) = before(cq) else {
        return libc::EINVAL;
    };
    // SAFETY: upheld by the caller.
    unsafe {
        let result = (before.next_poll)(cq);
        account(cq, &before, result);
        result
    }
}

/// # Safety
/// `cq` stands at a completion, if `result` is 0.
unsafe fn account(cq: *mut ibv_cq_ex, before: &Before, result: c_int) {
    if result != 0 || !before.context.is_ours() {
        return;
    }
    // SAFETY: upheld by the caller; the readers were asked for when the queue was made.
    unsafe {
        let success = (*cq).status == ibv_wc_status::IBV_WC_SUCCESS;
        let received = success
            && (*cq)
                .read_opcode
                .is_some_and(|read| poll::is_receive(read(cq)));
        let Some(number) = (*cq).read_qp_num.map(|read| read(cq)) else {
            return;
        };
        let Some(queue_pair) = before
            .context
            .queue_pairs
            .find(number)
            .filter(|_| !received)
        else {
            return;
        };
        let (wr_id, status) = ((*cq).wr_id, (*cq).status);
        match queue_pair.try_completed(cq.cast(), wr_id, status) {
            Some(Some(other)) => (*cq).status = other,
            Some(None) => {}
            None => KEPT.with_borrow_mut(|kept| {
                kept.push(Kept {
                    queue_pair,
                    cq: cq as usize,
                    wr_id,
                    status,
                });
            }),
        }
    }
}
