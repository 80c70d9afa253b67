//! Whether a provider takes work requests in the error state, and completes them.
//!
//! A work request that waits in a bundle is posted after a failure, so that it completes with an
//! error. Some providers refuse that (mana, erdma, older bnxt_re), and the program would wait for
//! ever. Each context is tried once, with a queue pair that nothing else uses.

use core::ffi::c_int;
use core::ptr;
use std::thread;
use std::time::Duration;

use laxity_ibverbs::{
    ibv_context, ibv_cq, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask as mask, ibv_qp_init_attr,
    ibv_qp_state, ibv_qp_type, ibv_send_wr, ibv_wc, ibv_wc_status, ibv_wr_opcode,
};
use laxity_job::fork::PerProcess;
use parking_lot::Mutex;

use super::{BARRIER_ID, verbs};
use crate::contexts::{HookedContext, PollCq, PostSend};

/// Polls for the completion, and the pause between two.
const POLLS: u32 = 500;
const PAUSE: Duration = Duration::from_millis(1);

/// What is known about contexts, by their address. An entry ends with its context.
static KNOWN: PerProcess<Mutex<Vec<(usize, bool)>>> = PerProcess::none();

pub(crate) fn forget(ibv: *mut ibv_context) {
    if let Some(known) = KNOWN.get() {
        known.lock().retain(|(context, _)| *context != ibv as usize);
    }
}

/// Reports whether work requests in the error state complete on this device. The first call for a
/// context takes some milliseconds.
///
/// # Safety
/// `pd` is a live protection domain of the context, and stays alive.
pub(crate) unsafe fn completes_in_error(
    context: &HookedContext,
    pd: *mut ibv_pd,
    port: u8,
) -> bool {
    let known = KNOWN.get_or_make(Mutex::default);
    // SAFETY: upheld by the caller.
    let ibv = unsafe { (*pd).context };
    let before = known.lock().iter().find(|(of, _)| *of == ibv as usize).map(|(_, ok)| *ok);
    before.unwrap_or_else(|| {
        let (Some(post), Some(poll)) = (context.post_send(), context.poll_cq()) else {
            return false;
        };
        // SAFETY: upheld by the caller.
        let completes = unsafe { attempt(ibv, pd, port, post, poll) };
        known.lock().push((ibv as usize, completes));
        completes
    })
}

/// # Safety
/// The conditions of [`completes_in_error`] hold.
unsafe fn attempt(
    ibv: *mut ibv_context,
    pd: *mut ibv_pd,
    port: u8,
    post: PostSend,
    poll: PollCq,
) -> bool {
    // SAFETY: upheld by the caller. Plain data, for which zeroes are a value.
    unsafe {
        let cq = verbs::create_cq(ibv, 2, ptr::null_mut(), ptr::null_mut(), 0);
        if cq.is_null() {
            return false;
        }
        let mut attr = core::mem::zeroed::<ibv_qp_init_attr>();
        attr.send_cq = cq;
        attr.recv_cq = cq;
        attr.qp_type = ibv_qp_type::IBV_QPT_RC;
        attr.cap.max_send_wr = 1;
        attr.cap.max_recv_wr = 1;
        attr.cap.max_send_sge = 1;
        attr.cap.max_recv_sge = 1;
        let qp = verbs::create_qp(pd, &raw mut attr);
        let completes = !qp.is_null() && fails(qp, port) && completes(qp, cq, post, poll);
        if !qp.is_null() {
            verbs::destroy_qp(qp);
        }
        verbs::destroy_cq(cq);
        completes
    }
}

/// Moves a new queue pair to the error state.
///
/// # Safety
/// `qp` is a new queue pair.
unsafe fn fails(qp: *mut ibv_qp, port: u8) -> bool {
    // SAFETY: upheld by the caller. Plain data, for which zeroes are a value.
    unsafe {
        let mut attr = core::mem::zeroed::<ibv_qp_attr>();
        attr.qp_state = ibv_qp_state::IBV_QPS_INIT;
        attr.port_num = port;
        let given = mask::IBV_QP_STATE
            | mask::IBV_QP_PKEY_INDEX
            | mask::IBV_QP_PORT
            | mask::IBV_QP_ACCESS_FLAGS;
        verbs::modify_qp(qp, &raw mut attr, given as c_int) == 0
            && verbs::change_state(qp, ibv_qp_state::IBV_QPS_ERR)
    }
}

/// # Safety
/// `qp` is in the error state and completes in `cq`.
unsafe fn completes(qp: *mut ibv_qp, cq: *mut ibv_cq, post: PostSend, poll: PollCq) -> bool {
    // SAFETY: upheld by the caller. Plain data, for which zeroes are a value.
    unsafe {
        let mut wr = core::mem::zeroed::<ibv_send_wr>();
        wr.wr_id = BARRIER_ID;
        // Not signaled, like a barrier: in the error state all of them complete.
        wr.opcode = ibv_wr_opcode::IBV_WR_SEND;
        let mut bad = ptr::null_mut();
        if post(qp, &raw mut wr, &raw mut bad) != 0 {
            return false;
        }
        for _ in 0..POLLS {
            let mut wc = core::mem::zeroed::<ibv_wc>();
            match poll(cq, 1, &raw mut wc) {
                0 => thread::sleep(PAUSE),
                got => {
                    return got == 1
                        && wc.wr_id == BARRIER_ID
                        && wc.status != ibv_wc_status::IBV_WC_SUCCESS;
                }
            }
        }
        false
    }
}
