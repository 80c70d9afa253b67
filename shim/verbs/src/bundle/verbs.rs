//! The control calls of libibverbs that bundles need, past this library's own.
//!
//! # Safety
//! The conditions of the call's manual page hold. Null stands for a failure, and so does an error
//! code where the function returns one. A function that this libibverbs lacks fails.

#![allow(clippy::missing_safety_doc, reason = "said above, once for all functions")]

use core::ffi::{c_int, c_void};
use core::ptr;

use laxity_ibverbs::{
    ibv_comp_channel, ibv_context, ibv_cq, ibv_gid, ibv_mr, ibv_pd, ibv_qp, ibv_qp_attr,
    ibv_qp_attr_mask, ibv_qp_init_attr, ibv_qp_state,
};
use laxity_job::real;
use laxity_job::symbol::Symbol;

use crate::exports::{of_libibverbs, within};

/// Defines calls: `fn name(arguments) -> result, otherwise, "symbol"`.
macro_rules! calls {
    ($(
        fn $name:ident($($argument:ident: $type:ty),*)
            -> $result:ty, $otherwise:expr, $symbol:literal
    )*) => {$(
        pub(super) unsafe fn $name($($argument: $type),*) -> $result {
            static REAL: Symbol =
                of_libibverbs(concat!($symbol, "\0"), Some(c"IBVERBS_1.1"));
            let Some(real) = real!(REAL.address(), fn($($type),*) -> $result) else {
                return $otherwise;
            };
            // Providers call hooked functions, which must not take a sibling for a program's.
            // SAFETY: upheld by the caller.
            within(|| unsafe { real($($argument),*) })
        }
    )*};
}

calls! {
    fn create_cq(context: *mut ibv_context, entries: c_int, user: *mut c_void,
        channel: *mut ibv_comp_channel, vector: c_int)
        -> *mut ibv_cq, ptr::null_mut(), "ibv_create_cq"
    fn destroy_cq(cq: *mut ibv_cq) -> c_int, libc::ENOSYS, "ibv_destroy_cq"
    fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr)
        -> *mut ibv_qp, ptr::null_mut(), "ibv_create_qp"
    fn destroy_qp(qp: *mut ibv_qp) -> c_int, libc::ENOSYS, "ibv_destroy_qp"
    fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int)
        -> c_int, libc::ENOSYS, "ibv_modify_qp"
    fn reg_mr(pd: *mut ibv_pd, address: *mut c_void, length: usize, access: c_int)
        -> *mut ibv_mr, ptr::null_mut(), "ibv_reg_mr"
    fn dereg_mr(mr: *mut ibv_mr) -> c_int, libc::ENOSYS, "ibv_dereg_mr"
    fn query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid)
        -> c_int, libc::ENOSYS, "ibv_query_gid"
}

/// Changes the state of a queue pair. Returns false if it is refused.
pub(crate) unsafe fn change_state(qp: *mut ibv_qp, to: ibv_qp_state::Type) -> bool {
    #[cfg(test)]
    if let Some(fake) = crate::queue_pair::model::fake_state(qp, to) {
        return fake;
    }
    // SAFETY: upheld by the caller. Plain data, for which zeroes are a value.
    unsafe {
        let mut attr = core::mem::zeroed::<ibv_qp_attr>();
        attr.qp_state = to;
        modify_qp(qp, &raw mut attr, ibv_qp_attr_mask::IBV_QP_STATE as c_int) == 0
    }
}

/// Returns the GID of a port that a connection uses.
pub(crate) unsafe fn gid(qp: *mut ibv_qp, attr: &ibv_qp_attr) -> Option<[u8; 16]> {
    let mut gid = ibv_gid { raw: [0; 16] };
    let (port, index) = (attr.ah_attr.port_num, c_int::from(attr.ah_attr.grh.sgid_index));
    // SAFETY: upheld by the caller. Each form of the union is plain bytes.
    unsafe { (query_gid((*qp).context, port, index, &raw mut gid) == 0).then_some(gid.raw) }
}
