//! The `ibv_wr_*` interface. Work requests that are built by calls between `wr_start` and
//! `wr_complete` are recorded as `ibv_post_send` would take them, and posted as such.
//!
//! Only queue pairs whose operations are all known here are hooked. An unknown operation would
//! reach a provider whose `wr_start` was never called.
//!
//! # Safety
//! Unless a function says otherwise, its callers uphold the conditions of the libibverbs function
//! that it replaces or is a part of.

use core::ffi::{c_int, c_void};
use core::ptr;

use laxity_ibverbs::{
    atomic_t, bind_mw_t, ibv_context, ibv_data_buf, ibv_mw, ibv_mw_bind_info, ibv_qp, ibv_qp_ex,
    ibv_qp_init_attr_ex, ibv_qp_init_attr_mask, ibv_qp_type, ibv_send_wr, ibv_sge,
    ibv_wr_opcode as op, rdma_t,
};
use parking_lot::lock_api::RawMutex as _;

use crate::bundle::candidate;
use crate::contexts::{self, HookedContext};
use crate::exports;
use crate::list::pass;
use crate::queue_pair::QueuePair;
use crate::work::{self, DeferredRequest, SendLimits};

/// The work requests built since `wr_start`.
#[derive(Debug, Default)]
pub(crate) struct Builder {
    works: Vec<DeferredRequest>,
}

/// Operations known here (`IBV_QP_EX_WITH_*`): RDMA WRITE and its immediate, SEND and its
/// immediate, RDMA READ, the two atomics, LOCAL_INV, BIND_MW, SEND_WITH_INV.
const KNOWN: u64 = 0x3ff;

/// Replaces `verbs_context.create_qp_ex`.
pub(crate) unsafe extern "C" fn create_qp_ex(
    ibv: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: upheld by the caller.
    unsafe {
        let Some((context, real)) =
            contexts::find(ibv).and_then(|context| Some((context, context.create_qp_ex()?)))
        else {
            return ptr::null_mut();
        };
        if !context.is_ours() {
            return real(ibv, attr);
        }
        let cap = &raw mut (*attr).cap;
        let is_admitted = context.may_bundle() && admits(&*attr);
        let (qp, is_candidate) = exports::create_with_room(is_admitted, cap, || real(ibv, attr));
        if qp.is_null() {
            return qp;
        }
        let attr = &*attr;
        let limits = SendLimits::of(&attr.cap);
        // The wrapper around this call sets the queue pair's context only after the call.
        let queue_pair = context.queue_pairs.make((*qp).qp_num);
        queue_pair.open(context, qp, Some((limits, attr.sq_sig_all != 0)));
        if is_candidate {
            queue_pair.be_candidate();
        }
        let with = ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        let scheduled = matches!((*qp).qp_type, ibv_qp_type::IBV_QPT_RC | ibv_qp_type::IBV_QPT_UC);
        if scheduled && attr.comp_mask & with != 0 && attr.send_ops_flags & !KNOWN == 0 {
            hook(qp.cast());
        }
        qp
    }
}

/// Reports whether a queue pair with these attributes may get a bundle. Unknown attributes may
/// change what its work requests do, and unknown operations are not seen here.
fn admits(attr: &ibv_qp_init_attr_ex) -> bool {
    let pd = ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_PD;
    let with = ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    attr.comp_mask & !(pd | with) == 0
        && attr.comp_mask & pd != 0
        && (attr.comp_mask & with == 0 || attr.send_ops_flags & !KNOWN == 0)
        && candidate::admit(
            attr.pd,
            [attr.send_cq, attr.recv_cq],
            attr.qp_type,
            attr.sq_sig_all != 0,
            &attr.cap,
        )
}

/// # Safety
/// `qp` was just made, with operations for building.
unsafe fn hook(qp: *mut ibv_qp_ex) {
    // SAFETY: upheld by the caller.
    let qp = unsafe { &mut *qp };
    qp.wr_start = Some(start);
    qp.wr_complete = Some(complete);
    qp.wr_abort = Some(abort);
    qp.wr_rdma_write = Some(rdma_write);
    qp.wr_rdma_write_imm = Some(rdma_write_imm);
    qp.wr_rdma_read = Some(rdma_read);
    qp.wr_send = Some(send);
    qp.wr_send_imm = Some(send_imm);
    qp.wr_send_inv = Some(send_inv);
    qp.wr_atomic_cmp_swp = Some(atomic_cmp_swp);
    qp.wr_atomic_fetch_add = Some(atomic_fetch_add);
    qp.wr_local_inv = Some(local_inv);
    qp.wr_bind_mw = Some(bind_mw);
    qp.wr_set_sge = Some(set_sge);
    qp.wr_set_sge_list = Some(set_sge_list);
    qp.wr_set_inline_data = Some(set_inline_data);
    qp.wr_set_inline_data_list = Some(set_inline_data_list);
}

/// # Safety
/// `qp` is a queue pair of the program.
unsafe fn of(qp: *mut ibv_qp_ex) -> Option<(&'static HookedContext, &'static QueuePair)> {
    // SAFETY: upheld by the caller.
    let (ibv, number) = unsafe { ((*qp).qp_base.context, (*qp).qp_base.qp_num) };
    let context = contexts::find(ibv)?;
    Some((context, context.queue_pairs.find(number)?))
}

/// # Safety
/// The calling thread is between `start` and `complete` or `abort`, and owns the builder.
unsafe fn works(qp: *mut ibv_qp_ex) -> Option<&'static mut Vec<DeferredRequest>> {
    // SAFETY: upheld by the caller.
    let (_, queue_pair) = unsafe { of(qp) }?;
    // SAFETY: this thread has held the lock since `start`.
    Some(unsafe { &mut (*queue_pair.builder.data_ptr()).works })
}

unsafe extern "C" fn start(qp: *mut ibv_qp_ex) {
    // SAFETY: upheld by the program.
    if let Some((_, queue_pair)) = unsafe { of(qp) } {
        // SAFETY: `complete` or `abort` unlocks it. One of them must follow in this thread.
        unsafe {
            queue_pair.builder.raw().lock();
            // mlx5 replaces `wr_complete` with each change to RTS or RESET, and would post nothing
            // of what is built here.
            (*qp).wr_complete = Some(complete);
            (*qp).wr_abort = Some(abort);
            (*queue_pair.builder.data_ptr()).works.clear();
        }
    }
}

unsafe extern "C" fn abort(qp: *mut ibv_qp_ex) {
    // SAFETY: upheld by the program, which called `start` before in this thread.
    unsafe {
        if let Some((_, queue_pair)) = of(qp) {
            (*queue_pair.builder.data_ptr()).works.clear();
            queue_pair.builder.force_unlock();
        }
    }
}

unsafe extern "C" fn complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: upheld by the program, which called `start` before in this thread.
    unsafe {
        let Some((context, queue_pair)) = of(qp) else { return libc::EINVAL };
        let works = &mut (*queue_pair.builder.data_ptr()).works;
        let result = post(context, queue_pair, qp, works);
        works.clear();
        queue_pair.builder.force_unlock();
        result
    }
}

unsafe fn post(
    context: &'static HookedContext,
    queue_pair: &'static QueuePair,
    qp: *mut ibv_qp_ex,
    works: &mut [DeferredRequest],
) -> c_int {
    let Some(real) = context.post_send() else { return libc::EINVAL };
    let mut next = ptr::null_mut();
    for work in works.iter_mut().rev() {
        let request = work.request();
        request.next = next;
        next = request;
    }
    if next.is_null() {
        return 0;
    }
    // SAFETY: upheld by the caller. The list lives in `works`.
    let posted = unsafe {
        if context.is_ours() {
            queue_pair.post(real, qp.cast(), next, true)
        } else {
            pass(real, qp.cast(), next)
        }
    };
    posted.map_or_else(|(error, _)| error, |()| 0)
}

unsafe fn record(qp: *mut ibv_qp_ex, opcode: op::Type, fill: impl FnOnce(&mut ibv_send_wr)) {
    // SAFETY: upheld by the caller. A work request of zeros is valid.
    unsafe {
        let Some(works) = works(qp) else { return };
        let mut wr = core::mem::zeroed::<ibv_send_wr>();
        wr.wr_id = (*qp).wr_id;
        wr.send_flags = (*qp).wr_flags;
        wr.opcode = opcode;
        fill(&mut wr);
        works.push(DeferredRequest::new(wr));
    }
}

/// Returns the last recorded work request.
unsafe fn last(qp: *mut ibv_qp_ex) -> Option<&'static mut DeferredRequest> {
    // SAFETY: upheld by the caller.
    unsafe { works(qp) }?.last_mut()
}

/// Defines functions that record a work request: arguments, opcode, and the fields that they set.
macro_rules! operations {
    ($(
        fn $name:ident($($argument:ident: $type:ty),*) = $opcode:ident, |$wr:ident| $fill:block
    )*) => {$(
        unsafe extern "C" fn $name(qp: *mut ibv_qp_ex, $($argument: $type),*) {
            // SAFETY: upheld by the program.
            unsafe { record(qp, op::$opcode, |$wr| $fill) }
        }
    )*};
}

operations! {
    fn rdma_write(rkey: u32, remote_addr: u64) = IBV_WR_RDMA_WRITE, |wr| {
        wr.wr.rdma = rdma_t { remote_addr, rkey };
    }
    fn rdma_write_imm(rkey: u32, remote_addr: u64, imm: u32) = IBV_WR_RDMA_WRITE_WITH_IMM, |wr| {
        wr.wr.rdma = rdma_t { remote_addr, rkey };
        wr.imm_data_invalidated_rkey_union.imm_data = imm;
    }
    fn rdma_read(rkey: u32, remote_addr: u64) = IBV_WR_RDMA_READ, |wr| {
        wr.wr.rdma = rdma_t { remote_addr, rkey };
    }
    fn send() = IBV_WR_SEND, |_wr| {}
    fn send_imm(imm: u32) = IBV_WR_SEND_WITH_IMM, |wr| {
        wr.imm_data_invalidated_rkey_union.imm_data = imm;
    }
    fn send_inv(rkey: u32) = IBV_WR_SEND_WITH_INV, |wr| {
        wr.imm_data_invalidated_rkey_union.invalidated_rkey = rkey;
    }
    fn local_inv(rkey: u32) = IBV_WR_LOCAL_INV, |wr| {
        wr.imm_data_invalidated_rkey_union.invalidated_rkey = rkey;
    }
    fn bind_mw(mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info) = IBV_WR_BIND_MW, |wr| {
        let bind_info = *info;
        wr.bind_mw_tso_union.bind_mw = bind_mw_t { mw, rkey, bind_info };
    }
    fn atomic_cmp_swp(rkey: u32, remote_addr: u64, compare_add: u64, swap: u64)
        = IBV_WR_ATOMIC_CMP_AND_SWP, |wr| {
        wr.wr.atomic = atomic_t { remote_addr, compare_add, swap, rkey };
    }
    fn atomic_fetch_add(rkey: u32, remote_addr: u64, add: u64) = IBV_WR_ATOMIC_FETCH_AND_ADD, |wr| {
        wr.wr.atomic = atomic_t { remote_addr, compare_add: add, swap: 0, rkey };
    }
}

unsafe extern "C" fn set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: upheld by the program.
    if let Some(work) = unsafe { last(qp) } {
        work.set_sges(&[ibv_sge { addr, length, lkey }]);
    }
}

unsafe extern "C" fn set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    // SAFETY: upheld by the program. The list has `count` entries, unless `count` is 0.
    unsafe {
        if let Some(work) = last(qp) {
            let sges = if count == 0 { &[] } else { core::slice::from_raw_parts(list, count) };
            work.set_sges(sges);
        }
    }
}

unsafe extern "C" fn set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    // SAFETY: upheld by the program. `length` bytes are readable.
    unsafe {
        if let Some(work) = last(qp) {
            work.set_inline(work::bytes(addr.cast(), length).into());
        }
    }
}

unsafe extern "C" fn set_inline_data_list(
    qp: *mut ibv_qp_ex,
    count: usize,
    list: *const ibv_data_buf,
) {
    // SAFETY: upheld by the program. The list has `count` pieces of readable memory.
    unsafe {
        if let Some(work) = last(qp) {
            let mut inline = work::Inline::new();
            for index in 0..count {
                let piece = &*list.add(index);
                inline.extend_from_slice(work::bytes(piece.addr.cast(), piece.length));
            }
            work.set_inline(inline);
        }
    }
}
