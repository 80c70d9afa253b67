//! Memory that is registered with a communicator.
//!
//! It is a raw pointer, because the plugin has a pointer to it, too. A `Box` would claim to be the
//! only pointer while the plugin writes.

use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::rc::Rc;

use crate::comm::Comm;

/// An allocation and the plugin's handle of its registration. Freed when dropped by its owner.
pub(crate) struct Memory {
    start: NonNull<u8>,
    len: usize,
    pub(crate) registration: *mut c_void,
}

impl Memory {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        let bytes = Box::leak(bytes.into_boxed_slice());
        Self { len: bytes.len(), start: NonNull::from(bytes).cast(), registration: ptr::null_mut() }
    }

    pub(crate) const fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn leak(self) {
        let _ = std::mem::ManuallyDrop::new(self);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let slice = ptr::slice_from_raw_parts_mut(self.start.as_ptr(), self.len);
        // SAFETY: `new` leaked this box, and it is taken back once. Nobody else uses it: regions
        // and requests park their memory in the communicator, or deregister it, before they drop
        // it.
        drop(unsafe { Box::from_raw(slice) });
    }
}

/// Registered memory that no request uses, so the caller may read and write it.
pub struct Region {
    pub(crate) comm: Rc<Comm>,
    /// `None` only while the region is taken apart.
    pub(crate) memory: Option<Memory>,
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region").field("len", &self.len()).finish()
    }
}

impl Deref for Region {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.memory {
            // SAFETY: the allocation is whole and initialised. No request uses it, so the plugin
            // does not access it.
            Some(memory) => unsafe { std::slice::from_raw_parts(memory.start(), memory.len) },
            None => &[],
        }
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &self.memory {
            // SAFETY: the allocation is whole and initialised, and no request uses it. This borrow
            // is the only one.
            Some(memory) => unsafe { std::slice::from_raw_parts_mut(memory.start(), memory.len) },
            None => &mut [],
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        if let Err(error) = self.comm.deregister(&memory) {
            crate::log::note(error.to_string());
            self.comm.park(memory);
        }
    }
}
