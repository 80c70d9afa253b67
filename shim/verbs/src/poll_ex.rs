//! Extended completion queues: the same through `ibv_start_poll` and `ibv_next_poll`.

use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::AtomicPtr;
use std::collections::HashMap;

use parking_lot::RwLock;
use rdma_sys::{
    ibv_context, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_create_cq_wc_flags, ibv_poll_cq_attr,
    ibv_wc_status,
};

use crate::contexts::{self, Context};
use crate::{lanes, poll};

type StartPoll = unsafe extern "C" fn(*mut ibv_cq_ex, *mut ibv_poll_cq_attr) -> c_int;
type NextPoll = unsafe extern "C" fn(*mut ibv_cq_ex) -> c_int;

/// What a completion queue's operations were. Providers choose them per queue.
#[derive(Clone, Copy)]
struct Before {
    context: &'static Context,
    start_poll: StartPoll,
    next_poll: NextPoll,
}

/// By address. An entry stays when its queue is destroyed: the next one there replaces it.
static QUEUES: AtomicPtr<RwLock<HashMap<usize, Before>>> = AtomicPtr::new(ptr::null_mut());

fn queues() -> &'static RwLock<HashMap<usize, Before>> {
    lanes::get_or_leak(&QUEUES, || RwLock::new(HashMap::new()))
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
        with_number.wc_flags |= u64::from(ibv_create_cq_wc_flags::IBV_WC_EX_WITH_QP_NUM.0);
        let cq = real(ibv, &mut with_number);
        if cq.is_null() {
            return real(ibv, attr);
        }
        if let (Some(start_poll), Some(next_poll), Some(_)) =
            ((*cq).start_poll, (*cq).next_poll, (*cq).read_qp_num)
        {
            let before = Before {
                context,
                start_poll,
                next_poll,
            };
            queues().write().insert(cq as usize, before);
            (*cq).start_poll = Some(start);
            (*cq).next_poll = Some(next);
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
        if !received
            && let Some(status) = poll::account(before.context, number, (*cq).wr_id, (*cq).status)
        {
            (*cq).status = status;
        }
    }
}
