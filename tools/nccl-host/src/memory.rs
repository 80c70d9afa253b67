//! Memory that is registered with a communicator.
//!
//! It is kept as a raw pointer, for the plugin has one too: a `Box` that moved while the plugin
//! writes through its own pointer would claim to be the only one.

use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::rc::Rc;

use crate::comm::Comm;
use crate::error::HostError;

/// An allocation, and what the plugin calls its registration. Freed when dropped, which is for who
/// holds it to time.
pub(crate) struct Memory {
    start: NonNull<u8>,
    len: usize,
    pub(crate) registration: *mut c_void,
}

impl Memory {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        let bytes = Box::leak(bytes.into_boxed_slice());
        Self {
            len: bytes.len(),
            start: NonNull::from(bytes).cast(),
            registration: ptr::null_mut(),
        }
    }

    pub(crate) const fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Never frees it.
    pub(crate) fn leak(self) {
        let _ = std::mem::ManuallyDrop::new(self);
    }

    /// The allocation back.
    fn into_vec(self) -> Vec<u8> {
        let this = std::mem::ManuallyDrop::new(self);
        let slice = ptr::slice_from_raw_parts_mut(this.start.as_ptr(), this.len);
        // SAFETY: the box that `new` leaked, taken back once, since `self` is not dropped.
        unsafe { Box::from_raw(slice) }.into_vec()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let slice = ptr::slice_from_raw_parts_mut(self.start.as_ptr(), self.len);
        // SAFETY: the box that `new` leaked, once. Nobody else has a use for it: regions and
        // requests hand their memory to the communicator, or deregister it, before they let go of
        // it.
        drop(unsafe { Box::from_raw(slice) });
    }
}

/// Registered memory that no request has: the caller's, to fill and to read.
pub struct Region {
    pub(crate) comm: Rc<Comm>,
    /// There until the region is taken apart.
    pub(crate) memory: Option<Memory>,
}

impl Region {
    /// Deregisters the memory and gives it back.
    ///
    /// # Errors
    /// The plugin refuses, and may go on using it: it stays until the communicator is closed.
    pub fn into_vec(mut self) -> Result<Vec<u8>, HostError> {
        let Some(memory) = self.memory.take() else {
            return Ok(Vec::new());
        };
        match self.comm.deregister(&memory) {
            Ok(()) => Ok(memory.into_vec()),
            Err(error) => {
                self.comm.park(memory);
                Err(error)
            }
        }
    }
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
            // SAFETY: the allocation is whole and initialised; no request has it, so the plugin
            // does not touch it.
            Some(memory) => unsafe { std::slice::from_raw_parts(memory.start(), memory.len) },
            None => &[],
        }
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &self.memory {
            // SAFETY: as for `deref`, and this borrow is the only one.
            Some(memory) => unsafe { std::slice::from_raw_parts_mut(memory.start(), memory.len) },
            None => &mut [],
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else {
            return;
        };
        if let Err(error) = self.comm.deregister(&memory) {
            crate::log::note(error.to_string());
            self.comm.park(memory);
        }
    }
}
