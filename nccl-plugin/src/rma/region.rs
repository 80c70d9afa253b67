//! A region: memory that every rank of a group has registered.
//!
//! The service thread reads and writes regions at any time. It does so only under the region's
//! lock, so memory that was deregistered is not touched any more.

use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};

use crate::backend::Memory;
use crate::fault::{Fault, Result};
use crate::verbs::RegionKeys;

/// A rank's part of a region, as all ranks know it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RemotePart {
    pub(super) bytes: u64,
    /// Address and key for RDMA. Without RDMA they mean nothing.
    pub(super) address: u64,
    pub(super) key: u32,
}

/// A region with this rank's part of it.
#[derive(Debug)]
pub struct RmaRegion {
    /// The region's number, the same on all ranks.
    pub(super) id: u32,
    /// This rank's part.
    pub(super) memory: Memory,
    /// The key for this host's work requests. 0 without RDMA.
    local_key: u32,
    /// The registration for RDMA, until it ends.
    keys: Mutex<Option<RegionKeys>>,
    /// All ranks' parts, once they are known.
    pub(super) parts: OnceLock<Vec<RemotePart>>,
    is_registered: RwLock<bool>,
}

/// A place in this rank's part of a region.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    region: Arc<RmaRegion>,
    address: usize,
}

/// A place in another rank's part of a region, or in this rank's own as a target.
#[derive(Clone, Debug)]
pub(crate) struct Far {
    pub(super) region: Arc<RmaRegion>,
    pub(super) offset: u64,
}

impl RmaRegion {
    pub(super) fn new(id: u32, memory: Memory, keys: Option<RegionKeys>) -> Self {
        Self {
            id,
            memory,
            local_key: keys.as_ref().map_or(0, RegionKeys::local),
            keys: Mutex::new(keys),
            parts: OnceLock::new(),
            is_registered: RwLock::new(true),
        }
    }

    fn part(&self, rank: usize) -> RemotePart {
        let parts = self.parts.get();
        parts.and_then(|parts| parts.get(rank)).copied().unwrap_or_default()
    }

    pub(super) fn place(self: &Arc<Self>, offset: u64, bytes: u64) -> Result<Place> {
        self.check(self.memory.bytes as u64, offset, bytes)?;
        let address = self.memory.address + offset as usize;
        Ok(Place { region: Arc::clone(self), address })
    }

    /// Checks that `bytes` at `offset` are within a rank's part.
    pub(super) fn check_remote(&self, rank: usize, offset: u64, bytes: u64) -> Result<()> {
        self.check(self.part(rank).bytes, offset, bytes)
    }

    fn check(&self, size: u64, offset: u64, bytes: u64) -> Result<()> {
        if offset.checked_add(bytes).is_some_and(|end| end <= size) {
            return Ok(());
        }
        Err(Fault::Argument(format!(
            "{bytes} bytes at {offset} are outside of region {}, which has {size} bytes there",
            self.id
        )))
    }

    /// Ends the registration, after the current access to the memory.
    pub(crate) fn end(&self) {
        *self.is_registered.write() = false;
        drop(self.keys.lock().take());
    }
}

impl Far {
    /// Returns the address and the key at that rank.
    pub(crate) fn remote(&self, rank: usize) -> (u64, u32) {
        let part = self.region.part(rank);
        (part.address.wrapping_add(self.offset), part.key)
    }
}

impl Place {
    /// Returns the address, its key and the memory's kind. Returns `None` if the region was
    /// deregistered.
    pub(crate) fn registered(&self) -> Option<(u64, u32, i32)> {
        let (key, kind) = (self.region.local_key, self.region.memory.kind);
        self.with(0, |address| (address as u64, key, kind))
    }

    /// Calls `access` with the address `skip` bytes behind this place. Returns `None` if the region
    /// was deregistered.
    pub(super) fn with<T>(&self, skip: u64, access: impl FnOnce(usize) -> T) -> Option<T> {
        // Recursive, since a copy holds two locks, and a writer between them must not stop it.
        let is_registered = self.region.is_registered.read_recursive();
        is_registered.then(|| access(self.address + skip as usize))
    }

    /// Returns the place `skip` bytes behind this one.
    pub(super) fn behind(&self, skip: u64) -> Self {
        Self { region: Arc::clone(&self.region), address: self.address + skip as usize }
    }

    /// Adds to the 64-bit word at this place, after all that was written before.
    pub(super) fn add(&self, value: u64) -> Result<()> {
        let at = self.address;
        if !at.is_multiple_of(8) {
            return Err(Fault::Argument(format!("a signal at {at:#x} is not aligned")));
        }
        self.with(0, |address| {
            // SAFETY: the word is within a registered region, aligned, and shared only by atomic
            // access and by GPUs. Release, so that whoever sees the signal sees the data.
            let word = unsafe { core::sync::atomic::AtomicU64::from_ptr(address as *mut u64) };
            word.fetch_add(value, core::sync::atomic::Ordering::Release);
        });
        Ok(())
    }

    /// Copies `bytes` from this place to another one of this process. Reports whether both regions
    /// are registered.
    pub(super) fn copy_to(&self, to: &Self, bytes: u64) -> bool {
        let copied = self.with(0, |from| {
            // SAFETY: `RmaRegion::place` checked both ranges, and the locks keep them registered.
            // They may overlap.
            let copy = |to| unsafe {
                core::ptr::copy(from as *const u8, to as *mut u8, bytes as usize);
            };
            if Arc::ptr_eq(&self.region, &to.region) {
                copy(to.address);
                return true;
            }
            to.with(0, copy).is_some()
        });
        copied == Some(true)
    }
}
