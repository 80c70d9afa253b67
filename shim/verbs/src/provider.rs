//! The boundary between libibverbs and its providers. Providers call these functions through the
//! dynamic linker. Programs that use libibverbs by `dlopen` pass this boundary, too.
//!
//! The symbols are private and have the number of their release in their version. These few have
//! kept their arguments since rdma-core 15. Exports without a version match all.
//!
//! # Safety
//! Callers of each function here uphold the conditions that libibverbs sets for its providers.

#![allow(clippy::missing_safety_doc, reason = "said above, once for all functions")]

use core::ffi::{c_int, c_void};

use laxity_ibverbs::{ibv_context, ibv_pd, ibv_qp, ibv_qp_attr, verbs_context};
use laxity_job::real;
use laxity_job::symbol::Symbol;

use crate::contexts::{self, HookedContext};
use crate::exempt;
use crate::exports::{self, of_libibverbs};

static SET_OPS: Symbol = of_libibverbs(c"verbs_set_ops", None);
static UNINIT_CONTEXT: Symbol = of_libibverbs(c"verbs_uninit_context", None);
static CMD_MODIFY_QP: Symbol = of_libibverbs(c"ibv_cmd_modify_qp", None);
static CMD_MODIFY_QP_EX: Symbol = of_libibverbs(c"ibv_cmd_modify_qp_ex", None);
static CMD_ALLOC_PD: Symbol = of_libibverbs(c"ibv_cmd_alloc_pd", None);
static CMD_DESTROY_QP: Symbol = of_libibverbs(c"ibv_cmd_destroy_qp", None);

#[repr(C)]
#[derive(Debug)]
pub struct VerbsContextOps {
    _private: [u8; 0],
}

/// Sets the operations of a context, as a provider does by `verbs_set_ops`. A provider may set some
/// operations at a time, and must find its own between the calls.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn verbs_set_ops(verbs: *mut verbs_context, ops: *const VerbsContextOps) {
    let Some(set_ops) = real!(SET_OPS.address(), fn(*mut verbs_context, *const VerbsContextOps))
    else {
        return;
    };
    // SAFETY: upheld by the caller.
    unsafe {
        let ibv = &raw mut (*verbs).context;
        contexts::unhook(ibv);
        set_ops(verbs, ops);
        contexts::hook(ibv);
    }
}

/// Closes a context, as a provider does by `verbs_uninit_context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn verbs_uninit_context(verbs: *mut verbs_context) {
    // SAFETY: upheld by the caller.
    unsafe {
        contexts::let_go(&raw mut (*verbs).context);
        exempt::forget(&raw mut (*verbs).context);
        if let Some(uninit) = real!(UNINIT_CONTEXT.address(), fn(*mut verbs_context)) {
            uninit(verbs);
        }
    }
}

/// Makes the kernel change a queue pair, as a provider does by `ibv_cmd_modify_qp`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_cmd_modify_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
    command: *mut c_void,
    bytes: usize,
) -> c_int {
    let Some(real) = real!(
        CMD_MODIFY_QP.address(),
        fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut c_void, usize) -> c_int
    ) else {
        return libc::ENOSYS;
    };
    // SAFETY: upheld by the caller.
    unsafe { exports::modify(qp, attr, mask, |attr| real(qp, attr, mask, command, bytes)) }
}

/// Makes the kernel change a queue pair with newer attributes, as a provider does by
/// `ibv_cmd_modify_qp_ex`. Some providers always use this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_cmd_modify_qp_ex(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
    command: *mut c_void,
    bytes: usize,
    response: *mut c_void,
    response_bytes: usize,
) -> c_int {
    let Some(real) = real!(
        CMD_MODIFY_QP_EX.address(),
        fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut c_void, usize, *mut c_void, usize) -> c_int
    ) else {
        return libc::ENOSYS;
    };
    // SAFETY: upheld by the caller.
    unsafe {
        exports::modify(qp, attr, mask, |attr| {
            real(qp, attr, mask, command, bytes, response, response_bytes)
        })
    }
}

/// Allocates a protection domain like `ibv_cmd_alloc_pd`, which programs call first on a context.
/// libibverbs sets some operations after the provider has set its own, and by now all are set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_cmd_alloc_pd(
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    command: *mut c_void,
    bytes: usize,
    response: *mut c_void,
    response_bytes: usize,
) -> c_int {
    let Some(real) = real!(
        CMD_ALLOC_PD.address(),
        fn(*mut ibv_context, *mut ibv_pd, *mut c_void, usize, *mut c_void, usize) -> c_int
    ) else {
        return libc::ENOSYS;
    };
    // SAFETY: upheld by the caller. Fields with this library's functions stay unchanged.
    unsafe {
        if contexts::find(context).is_some_and(HookedContext::is_ours) {
            contexts::hook(context);
        }
        real(context, pd, command, bytes, response, response_bytes)
    }
}

/// Makes the kernel destroy a queue pair, as a provider does by `ibv_cmd_destroy_qp`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_cmd_destroy_qp(qp: *mut ibv_qp) -> c_int {
    let Some(destroy) = real!(CMD_DESTROY_QP.address(), fn(*mut ibv_qp) -> c_int) else {
        return libc::ENOSYS;
    };
    // SAFETY: upheld by the caller.
    unsafe {
        exports::forget(qp);
        destroy(qp)
    }
}
