//! A connection's own memory, which the device may read and the peer's NIC may write at any moment.

use core::ffi::c_int;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU64;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::sync::Arc;

use laxity_ibverbs::{ibv_access_flags as access, ibv_mr};

use super::library::os_error;
use super::nic::Nic;
use crate::fault::{Fault, Result};

/// Alignment in bytes, whatever a system's page size is. No other data shares these pages.
const PAGE: usize = 65536;

/// Page-aligned, registered memory, which is zero at first.
#[derive(Debug)]
pub(super) struct Pinned {
    memory: NonNull<u8>,
    layout: Layout,
    mr: *mut ibv_mr,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
    nic: Arc<Nic>,
}

// SAFETY: the memory is owned. Only libibverbs follows the registration, in any thread.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Allocates and registers `bytes` of memory. With `remote`, the peer may write it. Ordering is
    /// strict, whatever the settings are.
    pub(super) fn new(nic: &Arc<Nic>, bytes: usize, remote: bool) -> Result<Self> {
        // A fork may remove registered pages from the child, so no other data may be on them.
        let layout = Layout::from_size_align(bytes, PAGE)
            .map(|layout| layout.pad_to_align())
            .map_err(|error| Fault::Internal(error.to_string()))?;
        // SAFETY: the size is not zero, because all callers pass constants.
        let Some(memory) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            handle_alloc_error(layout);
        };
        let mut flags = access::IBV_ACCESS_LOCAL_WRITE;
        if remote {
            flags |= access::IBV_ACCESS_REMOTE_WRITE;
        }
        // SAFETY: the memory has this size and stays until `drop` has ended the registration.
        let mr =
            unsafe { (nic.library.reg_mr)(nic.pd, memory.as_ptr().cast(), bytes, flags as c_int) };
        if mr.is_null() {
            let error = os_error();
            // SAFETY: allocated above, with this layout.
            unsafe { dealloc(memory.as_ptr(), layout) };
            return Err(
                nic.refused("refuses to register a connection's own memory (ulimit -l?)", error)
            );
        }
        // SAFETY: the registration was just made.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        Ok(Self { memory, layout, mr, lkey, rkey, nic: Arc::clone(nic) })
    }

    pub(super) fn address(&self) -> u64 {
        self.memory.as_ptr() as u64
    }

    /// Returns the memory as words. A NIC may access them at any moment, so all access is atomic.
    pub(super) fn words(&self) -> &[AtomicU64] {
        // SAFETY: aligned, initialized, and as long as `self`. The NIC shares the words, and the
        // process accesses them only atomically.
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
            // SAFETY: registered in `new`. The queue pairs that used it are gone, since their owner
            // drops them first.
            unsafe { (self.nic.library.dereg_mr)(self.mr) };
        }
        // SAFETY: allocated in `new`, with this layout.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) };
    }
}
