//! Completion queues, and the shared receive queue of a connection's queue pairs.

use core::ffi::c_int;
use core::mem;
use core::ptr;
use std::sync::Arc;

use laxity_ibverbs::{ibv_cq, ibv_recv_wr, ibv_srq, ibv_srq_attr, ibv_srq_init_attr, ibv_wc};

use super::library::os_error;
use super::nic::Nic;
use crate::fault::{Fault, Result};

/// Largest number of completions taken at a time.
pub(super) const BATCH: usize = 16;

#[derive(Clone, Copy, Debug)]
pub(super) struct Completion {
    pub(super) id: u64,
    /// The status, `IBV_WC_*`.
    pub(super) status: u32,
    /// The operation, `IBV_WC_*`. It is invalid if the status is an error.
    pub(super) opcode: u32,
    pub(super) immediate: u32,
    pub(super) number: u32,
}

#[derive(Debug)]
pub(super) struct Completions {
    pub(super) cq: *mut ibv_cq,
    nic: Arc<Nic>,
}

// SAFETY: libibverbs takes a completion queue in any thread.
unsafe impl Send for Completions {}

impl Completions {
    /// Creates a queue for `entries` completions.
    pub(super) fn new(nic: &Arc<Nic>, entries: u32) -> Result<Self> {
        let entries = entries.min(nic.completions_max) as c_int;
        // SAFETY: the context is open, and there is no event channel.
        let cq = unsafe {
            (nic.library.create_cq)(nic.context, entries, ptr::null_mut(), ptr::null_mut(), 0)
        };
        if cq.is_null() {
            return Err(nic.refused("gives no completion queue", os_error()));
        }
        Ok(Self { cq, nic: Arc::clone(nic) })
    }

    /// Takes completions, up to a batch. Returns their number.
    pub(super) fn poll(&self, into: &mut [Completion; BATCH]) -> Result<usize> {
        // SAFETY: plain data that may be zero.
        let mut found: [ibv_wc; BATCH] = unsafe { mem::zeroed() };
        // SAFETY: the queue is alive, with its table of operations. The array has `BATCH` entries.
        let count = unsafe {
            let Some(poll) = (*(*self.cq).context).ops.poll_cq else {
                return Err(Fault::Internal("the provider can't poll".into()));
            };
            poll(self.cq, BATCH as c_int, found.as_mut_ptr())
        };
        let count = usize::try_from(count).map_err(|_| {
            Fault::System(format!("{}: the completion queue is broken", self.nic.name))
        })?;
        for (into, found) in into.iter_mut().zip(&found[..count.min(BATCH)]) {
            *into = Completion {
                id: found.wr_id,
                status: found.status,
                opcode: found.opcode,
                // SAFETY: each form of the union has 32 bits.
                immediate: u32::from_be(unsafe { found.imm_data_invalidated_rkey_union.imm_data }),
                number: found.qp_num,
            };
        }
        Ok(count.min(BATCH))
    }
}

impl Completion {
    pub(super) const NONE: Self = Self { id: 0, status: 0, opcode: 0, immediate: 0, number: 0 };
}

impl Drop for Completions {
    fn drop(&mut self) {
        if self.nic.is_ours() {
            // SAFETY: the queue is alive. Its queue pairs are gone, since their owner drops them
            // first.
            unsafe { (self.nic.library.destroy_cq)(self.cq) };
        }
    }
}

/// A queue of work requests for arrivals on all queue pairs of a connection.
#[derive(Debug)]
pub(super) struct SharedReceive {
    pub(super) srq: *mut ibv_srq,
    nic: Arc<Nic>,
}

// SAFETY: libibverbs takes a shared receive queue in any thread.
unsafe impl Send for SharedReceive {}

impl SharedReceive {
    /// Creates a queue for `work_requests` arrivals.
    pub(super) fn new(nic: &Arc<Nic>, work_requests: u32) -> Result<Self> {
        let mut attr = ibv_srq_init_attr {
            srq_context: ptr::null_mut(),
            attr: ibv_srq_attr { max_wr: work_requests, max_sge: 1, srq_limit: 0 },
        };
        // SAFETY: the domain is alive. The struct is this function's own.
        let srq = unsafe { (nic.library.create_srq)(nic.pd, &mut attr) };
        if srq.is_null() {
            return Err(nic.refused("gives no shared receive queue", os_error()));
        }
        Ok(Self { srq, nic: Arc::clone(nic) })
    }

    /// Posts a work request for one more arrival.
    pub(super) fn post(&self) -> Result<()> {
        let mut request =
            ibv_recv_wr { wr_id: 0, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: 0 };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue is alive, with its context's table of operations. The call reads the
        // request before it returns.
        let result = unsafe {
            let Some(post) = (*(*self.srq).context).ops.post_srq_recv else {
                return Err(Fault::Internal("the provider can't receive".into()));
            };
            post(self.srq, &mut request, &mut bad)
        };
        if result == 0 {
            return Ok(());
        }
        let error = std::io::Error::from_raw_os_error(result.abs());
        Err(self.nic.refused("takes no buffer", error))
    }
}

impl Drop for SharedReceive {
    fn drop(&mut self) {
        if self.nic.is_ours() {
            // SAFETY: the queue is alive. Its queue pairs are gone, since their owner drops them
            // first.
            unsafe { (self.nic.library.destroy_srq)(self.srq) };
        }
    }
}
