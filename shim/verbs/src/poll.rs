//! The replacement of the provider's `ibv_poll_cq`.

use core::ffi::c_int;

use laxity_ibverbs::{ibv_cq, ibv_wc, ibv_wc_opcode, ibv_wc_status};

use crate::contexts;
use crate::lanes;

/// Replaces `context->ops.poll_cq`.
///
/// # Safety
/// The conditions of `ibv_poll_cq` hold.
pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: upheld by the caller.
    unsafe {
        let Some(context) = contexts::find((*cq).context) else { return -libc::EINVAL };
        let Some(real) = context.poll_cq() else { return -libc::EINVAL };
        if !context.is_ours() {
            return real(cq, entries, wc);
        }
        context.note_poll(cq);
        lanes::pump_all();
        let got = real(cq, entries, wc);
        for index in 0..usize::try_from(got).unwrap_or(0) {
            let wc = &mut *wc.add(index);
            // A failed completion has no opcode.
            let received = wc.status == ibv_wc_status::IBV_WC_SUCCESS && is_receive(wc.opcode);
            if !received
                && let Some(queue_pair) = context.queue_pairs.find(wc.qp_num)
                && let Some(status) = queue_pair.completed(cq, wc.wr_id, wc.status)
            {
                wc.status = status;
            }
        }
        got
    }
}

pub(crate) const fn is_receive(opcode: ibv_wc_opcode::Type) -> bool {
    opcode & ibv_wc_opcode::IBV_WC_RECV != 0
}
