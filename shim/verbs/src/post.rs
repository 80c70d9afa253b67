//! `ibv_post_send`, in place of the provider's.

use core::ffi::c_int;

use laxity_ibverbs::{ibv_qp, ibv_send_wr};

use crate::contexts;
use crate::list::pass;

/// What `context->ops.post_send` leads to.
///
/// # Safety
/// As for `ibv_post_send`.
pub(crate) unsafe extern "C" fn post_send(
    ibv: *mut ibv_qp,
    list: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: upheld by the caller.
    unsafe {
        let Some(context) = contexts::find((*ibv).context) else {
            // A context that was closed: nothing can be posted there.
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
