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

use crate::bundle::candidate;
use crate::contexts::{self, HookedContext};
use crate::exempt;
use crate::exports::{self, interpose};

#[repr(C)]
#[derive(Debug)]
pub struct VerbsContextOps {
    _private: [u8; 0],
}

interpose! { None;
    /// Sets the operations of a context, as a provider does by `verbs_set_ops`. A provider may set
    /// some operations at a time, and must find its own between the calls.
    fn verbs_set_ops(verbs: *mut verbs_context, ops: *const VerbsContextOps) |set_ops| {
        let ibv = &raw mut (*verbs).context;
        contexts::unhook(ibv);
        set_ops(verbs, ops);
        contexts::hook(ibv);
    }

    /// Closes a context, as a provider does by `verbs_uninit_context`.
    fn verbs_uninit_context(verbs: *mut verbs_context) |uninit| {
        contexts::forget_context(&raw mut (*verbs).context);
        exempt::forget(&raw mut (*verbs).context);
        uninit(verbs);
    }

    /// Makes the kernel change a queue pair, as a provider does by `ibv_cmd_modify_qp`.
    fn ibv_cmd_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int,
        command: *mut c_void, bytes: usize) -> c_int, libc::ENOSYS,
    |real| {
        exports::modify(qp, attr, mask, |attr| real(qp, attr, mask, command, bytes))
    }

    /// Makes the kernel change a queue pair with newer attributes, as a provider does by
    /// `ibv_cmd_modify_qp_ex`. Some providers always use this function.
    fn ibv_cmd_modify_qp_ex(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int,
        command: *mut c_void, bytes: usize, response: *mut c_void, response_bytes: usize)
        -> c_int, libc::ENOSYS,
    |real| {
        exports::modify(qp, attr, mask, |attr| {
            real(qp, attr, mask, command, bytes, response, response_bytes)
        })
    }

    /// Allocates a protection domain like `ibv_cmd_alloc_pd`, which programs call first on a
    /// context. libibverbs sets some operations after the provider has set its own, and by now all
    /// are set.
    fn ibv_cmd_alloc_pd(context: *mut ibv_context, pd: *mut ibv_pd, command: *mut c_void,
        bytes: usize, response: *mut c_void, response_bytes: usize) -> c_int, libc::ENOSYS,
    |real| {
        // Fields with this library's functions stay unchanged.
        if contexts::find(context).is_some_and(HookedContext::is_ours) {
            contexts::hook(context);
        }
        let error = real(context, pd, command, bytes, response, response_bytes);
        if error == 0 {
            candidate::note_domain(pd);
        }
        error
    }

    /// Frees a protection domain like `ibv_cmd_dealloc_pd`. The provider frees its memory later.
    fn ibv_cmd_dealloc_pd(pd: *mut ibv_pd) -> c_int, libc::ENOSYS, |real| {
        let error = real(pd);
        if error == 0 {
            candidate::forget_domain(pd);
        }
        error
    }

    /// Makes the kernel destroy a queue pair, as a provider does by `ibv_cmd_destroy_qp`.
    fn ibv_cmd_destroy_qp(qp: *mut ibv_qp) -> c_int, libc::ENOSYS, |destroy| {
        exports::forget(qp);
        destroy(qp)
    }
}
