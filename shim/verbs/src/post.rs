//! The replacement of the provider's `ibv_post_send`.

use core::ffi::c_int;

use laxity_ibverbs::{ibv_qp, ibv_send_wr};

use crate::contexts;
use crate::list::pass;

/// Replaces `context->ops.post_send`.
///
/// # Safety
/// The conditions of `ibv_post_send` hold.
pub(crate) unsafe extern "C" fn post_send(
    ibv: *mut ibv_qp,
    list: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: upheld by the caller.
    unsafe {
        let Some(context) = contexts::find((*ibv).context) else {
            // The context is closed, so nothing can be posted.
            *bad = list;
            return libc::EINVAL;
        };
        let Some(real) = context.post_send() else {
            *bad = list;
            return libc::EINVAL;
        };
        if !context.is_ours() {
            return real(ibv, list, bad);
        }
        let posted = match context.queue_pairs.find((*ibv).qp_num) {
            Some(queue_pair) => queue_pair.post(real, ibv, list, false),
            None => pass(real, ibv, list),
        };
        match posted {
            Ok(()) => 0,
            Err((error, first)) => {
                if !bad.is_null() {
                    *bad = first;
                }
                error
            }
        }
    }
}
