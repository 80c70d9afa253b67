//! A connection's own memory, which the device reads, or the peer's NIC writes at any moment.

use core::ffi::c_int;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU64;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::sync::Arc;

use laxity_ibverbs::{ibv_access_flags as access, ibv_mr};

use super::library::os_error;
use super::nic::Nic;
use crate::fault::{Fault, Result};

/// Also where a system's own pages are larger: what matters is that nothing else shares the memory.
const PAGE: usize = 65536;

/// Page-aligned memory that the device knows, zero at first.
#[derive(Debug)]
pub(super) struct Pinned {
    memory: NonNull<u8>,
    layout: Layout,
    mr: *mut ibv_mr,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
    nic: Arc<Nic>,
}

// SAFETY: owned memory, and a registration that only libibverbs follows, which takes it in any
// thread.
unsafe impl Send for Pinned {}

impl Pinned {
    /// `bytes` of it, which `remote` lets the peer write. With strict ordering, whatever the
    /// settings say.
    ///
    /// # Errors
    /// The device refused.
    pub(super) fn new(nic: &Arc<Nic>, bytes: usize, remote: bool) -> Result<Self> {
        // Whole pages: a fork may take registered ones from the child, and with them whatever else
        // is on them.
        let layout = Layout::from_size_align(bytes, PAGE)
            .map(|layout| layout.pad_to_align())
            .map_err(|error| Fault::Internal(error.to_string()))?;
        // SAFETY: not of size zero: all callers ask for constants.
        let Some(memory) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            handle_alloc_error(layout);
        };
        let mut flags = access::IBV_ACCESS_LOCAL_WRITE;
        if remote {
            flags |= access::IBV_ACCESS_REMOTE_WRITE;
        }
        // SAFETY: memory of that size, which stays until `drop` has taken the registration back.
        let mr =
            unsafe { (nic.library.reg_mr)(nic.pd, memory.as_ptr().cast(), bytes, flags as c_int) };
        if mr.is_null() {
            let error = os_error();
            // SAFETY: allocated above, with this layout.
            unsafe { dealloc(memory.as_ptr(), layout) };
            return Err(nic.refused(
                "refuses to register a connection's own memory (ulimit -l?)",
                error,
            ));
        }
        // SAFETY: it was just made.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        Ok(Self {
            memory,
            layout,
            mr,
            lkey,
            rkey,
            nic: Arc::clone(nic),
        })
    }

    /// Where it is.
    pub(super) fn address(&self) -> u64 {
        self.memory.as_ptr() as u64
    }

    /// As words, which a NIC may write or read at any moment: so all access is atomic.
    pub(super) fn words(&self) -> &[AtomicU64] {
        // SAFETY: aligned, initialized, as long as `self`; shared with the NIC only, in words that
        // are only ever accessed atomically.
        unsafe {
            core::slice::from_raw_parts(
                self.memory.as_ptr().cast::<AtomicU64>(),
                self.layout.size() / 8,
            )
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.nic.is_ours() {
            // SAFETY: registered in `new`; the queue pairs that used it are gone, since whoever
            // holds both drops those first.
            unsafe { (self.nic.library.dereg_mr)(self.mr) };
        }
        // SAFETY: allocated in `new`, with this layout.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) };
    }
}
