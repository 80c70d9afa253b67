//! Completion queues, and the queue of arrivals that a connection's queue pairs share.

use core::ffi::c_int;
use core::mem;
use core::ptr;
use std::sync::Arc;

use laxity_ibverbs::{ibv_cq, ibv_recv_wr, ibv_srq, ibv_srq_attr, ibv_srq_init_attr, ibv_wc};

use super::library::os_error;
use super::nic::Nic;
use crate::fault::{Fault, Result};

/// Completions taken at a time.
pub(super) const BATCH: usize = 16;

/// Of one work request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Completion {
    /// The work request's own number.
    pub(super) id: u64,
    /// `IBV_WC_*`.
    pub(super) status: u32,
    /// `IBV_WC_*`; not to be believed if the status is bad.
    pub(super) opcode: u32,
    /// Of arrivals.
    pub(super) immediate: u32,
    /// Queue pair.
    pub(super) number: u32,
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct Completions {
    pub(super) cq: *mut ibv_cq,
    nic: Arc<Nic>,
}

// SAFETY: libibverbs takes it in any thread.
unsafe impl Send for Completions {}

impl Completions {
    /// With room for that many.
    ///
    /// # Errors
    /// The device refused.
    pub(super) fn new(nic: &Arc<Nic>, entries: u32) -> Result<Self> {
        let entries = entries.min(nic.completions_max) as c_int;
        // SAFETY: open; no event channel.
        let cq = unsafe {
            (nic.library.create_cq)(nic.context, entries, ptr::null_mut(), ptr::null_mut(), 0)
        };
        if cq.is_null() {
            return Err(nic.refused("gives no completion queue", os_error()));
        }
        Ok(Self {
            cq,
            nic: Arc::clone(nic),
        })
    }

    /// Those that are there, up to a batch.
    ///
    /// # Errors
    /// The device is broken.
    pub(super) fn poll(&self, into: &mut [Completion; BATCH]) -> Result<usize> {
        // SAFETY: plain data that may be zero.
        let mut found: [ibv_wc; BATCH] = unsafe { mem::zeroed() };
        // SAFETY: alive, with its context's table of operations; the array is as long as is said.
        let count = unsafe {
            let Some(poll) = (*(*self.cq).context).ops.poll_cq else {
                return Err(Fault::Internal(String::from("the provider can't poll")));
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
                // SAFETY: 32 bits, whichever of its forms the union was written in.
                immediate: u32::from_be(unsafe { found.imm_data_invalidated_rkey_union.imm_data }),
                number: found.qp_num,
            };
        }
        Ok(count.min(BATCH))
    }
}

impl Completion {
    /// Nothing.
    pub(super) const NONE: Self = Self {
        id: 0,
        status: 0,
        opcode: 0,
        immediate: 0,
        number: 0,
    };
}

impl Drop for Completions {
    fn drop(&mut self) {
        if self.nic.is_ours() {
            // SAFETY: alive; the queue pairs of it are gone, since whoever holds both drops those
            // first.
            unsafe { (self.nic.library.destroy_cq)(self.cq) };
        }
    }
}

/// Where arrivals take the work requests that announce them, whichever queue pair they come by.
#[derive(Debug)]
pub(super) struct SharedReceive {
    pub(super) srq: *mut ibv_srq,
    nic: Arc<Nic>,
}

// SAFETY: libibverbs takes it in any thread.
unsafe impl Send for SharedReceive {}

impl SharedReceive {
    /// With room for that many.
    ///
    /// # Errors
    /// The device refused.
    pub(super) fn new(nic: &Arc<Nic>, work_requests: u32) -> Result<Self> {
        let mut attr = ibv_srq_init_attr {
            srq_context: ptr::null_mut(),
            attr: ibv_srq_attr {
                max_wr: work_requests,
                max_sge: 1,
                srq_limit: 0,
            },
        };
        // SAFETY: alive; the struct is ours.
        let srq = unsafe { (nic.library.create_srq)(nic.pd, &mut attr) };
        if srq.is_null() {
            return Err(nic.refused("gives no shared receive queue", os_error()));
        }
        Ok(Self {
            srq,
            nic: Arc::clone(nic),
        })
    }

    /// One more arrival may come.
    ///
    /// # Errors
    /// The device refused.
    pub(super) fn post(&self) -> Result<()> {
        let mut request = ibv_recv_wr {
            wr_id: 0,
            next: ptr::null_mut(),
            sg_list: ptr::null_mut(),
            num_sge: 0,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: alive, with its context's table of operations; the request is read before the
        // call returns.
        let result = unsafe {
            let Some(post) = (*(*self.srq).context).ops.post_srq_recv else {
                return Err(Fault::Internal(String::from("the provider can't receive")));
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
            // SAFETY: alive; the queue pairs of it are gone, since whoever holds both drops those
            // first.
            unsafe { (self.nic.library.destroy_srq)(self.srq) };
        }
    }
}
