//! A region: one sealed memfd per client process. The daemon creates it, and both map it.
//!
//! Before it hands the region over, the daemon sets its size, reserves its pages and seals it
//! against shrinking and growing, because a client that truncated it could kill the daemon with
//! SIGBUS. The client refuses a file that is not sealed, has another size than announced, or has
//! another version, and then runs unscheduled.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::fstat;
use nix::unistd::ftruncate;

use crate::layout::{Geometry, HEADER_BYTES, Header, LaneHeader, MAGIC, Slot, VERSION};

/// The error of a region that cannot be created or mapped.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the texts say what the fields are")]
pub enum RegionError {
    /// Lanes, slots or colour are out of range.
    #[error("{0:?} is no valid geometry: see the limits in laxity_shm::layout")]
    Geometry(Geometry),
    /// A system call failed. Daemon: refuse the client. Client: run unscheduled.
    #[error("{call} of a shared region failed: {source}")]
    System { call: &'static str, source: io::Error },
    /// The file could be truncated while it is mapped. Client: run unscheduled.
    #[error("the region is not sealed against shrinking (seals {0:#x}): not made by laxityd")]
    Unsealed(i32),
    /// The file has another size than announced. Client: run unscheduled.
    #[error("the region has {found} bytes where {expected} were announced")]
    Size { expected: u64, found: u64 },
    /// The region's header has another shape than announced. Client: run unscheduled.
    #[error("the region has the shape {0:?}, which is not the one announced")]
    Shape(Geometry),
    /// The region is of another version. Client: run unscheduled; restart it with the new library.
    #[error("the region's magic {magic:#x}, version {version} are not {MAGIC:#x}, {VERSION}")]
    Version { magic: u64, version: u32 },
}

fn system<E: Into<io::Error>>(call: &'static str) -> impl FnOnce(E) -> RegionError {
    move |source| RegionError::System { call, source: source.into() }
}

/// A mapped region.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    bytes: usize,
    geometry: Geometry,
    fd: OwnedFd,
}

// SAFETY: `Region` owns its mapping. Everything in it is accessed as atomics only, through shared
// references, which any thread may do.
unsafe impl Send for Region {}
// SAFETY: `&Region` gives out references to atomics only, which threads may share.
unsafe impl Sync for Region {}

/// Seals that the daemon sets. `F_SEAL_WRITE` is not among them, because both sides write.
const SEALS: SealFlag =
    SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW).union(SealFlag::F_SEAL_SEAL);

impl Region {
    /// Daemon: creates, reserves, seals and maps a region.
    ///
    /// # Errors
    /// [`RegionError::Geometry`] or [`RegionError::System`]: refuse the client.
    pub fn create(geometry: Geometry) -> Result<Arc<Self>, RegionError> {
        if !geometry.is_valid() {
            return Err(RegionError::Geometry(geometry));
        }
        let bytes = geometry.region_bytes();
        let fd = memfd()?;
        let length = bytes as libc::off_t;
        ftruncate(&fd, length).map_err(system("ftruncate"))?;
        // Reserved now, so that a host without memory refuses the client here. A client can still
        // punch holes into its own region. If the host is then out of memory, the kernel may kill
        // the daemon at its next access, as it may kill any process.
        fallocate(&fd, FallocateFlags::empty(), 0, length).map_err(system("fallocate"))?;
        fcntl(&fd, FcntlArg::F_ADD_SEALS(SEALS)).map_err(system("fcntl(F_ADD_SEALS)"))?;
        let region = Self::map_fd(fd, bytes, geometry)?;
        let identity = &region.header().identity;
        identity.lanes.store(geometry.lanes, Ordering::Relaxed);
        identity.slots.store(geometry.slots, Ordering::Relaxed);
        identity.colour.store(geometry.colour, Ordering::Relaxed);
        identity.region_bytes.store(bytes as u64, Ordering::Relaxed);
        identity.daemon_pid.store(std::process::id(), Ordering::Relaxed);
        identity.version.store(VERSION, Ordering::Relaxed);
        region.header().set_daemon_cpu(None);
        // The system call that hands the region over orders these stores anyway.
        identity.magic.store(MAGIC, Ordering::Release);
        Ok(Arc::new(region))
    }

    /// Client: checks and maps a region that was received with the `geometry` of the welcome.
    ///
    /// # Errors
    /// Every [`RegionError`]: run unscheduled.
    pub fn map(fd: OwnedFd, geometry: Geometry) -> Result<Arc<Self>, RegionError> {
        if !geometry.is_valid() {
            return Err(RegionError::Geometry(geometry));
        }
        let seals = fcntl(&fd, FcntlArg::F_GET_SEALS).unwrap_or(-1);
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return Err(RegionError::Unsealed(seals));
        }
        let expected = geometry.region_bytes() as u64;
        let found = fstat(&fd).map_err(system("fstat"))?.st_size as u64;
        if found != expected {
            return Err(RegionError::Size { expected, found });
        }
        let region = Self::map_fd(fd, geometry.region_bytes(), geometry)?;
        let identity = &region.header().identity;
        let magic = identity.magic.load(Ordering::Acquire);
        let version = identity.version.load(Ordering::Relaxed);
        if magic != MAGIC || version != VERSION {
            return Err(RegionError::Version { magic, version });
        }
        let found = Geometry {
            lanes: identity.lanes.load(Ordering::Relaxed),
            slots: identity.slots.load(Ordering::Relaxed),
            colour: identity.colour.load(Ordering::Relaxed),
        };
        if found != geometry {
            return Err(RegionError::Shape(found));
        }
        let stated = identity.region_bytes.load(Ordering::Relaxed);
        if stated != expected {
            return Err(RegionError::Size { expected, found: stated });
        }
        Ok(Arc::new(region))
    }

    fn map_fd(fd: OwnedFd, bytes: usize, geometry: Geometry) -> Result<Self, RegionError> {
        // SAFETY: a new mapping at an address of the kernel's choice; nothing else refers to it.
        let base = unsafe {
            libc::mmap(
                core::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(base.cast::<u8>()) {
            Some(base) if base.as_ptr().cast() != libc::MAP_FAILED => {
                Ok(Self { base, bytes, geometry, fd })
            }
            _ => Err(system("mmap")(io::Error::last_os_error())),
        }
    }

    /// Returns the header page.
    #[inline]
    pub fn header(&self) -> &Header {
        // SAFETY: the mapping is page-aligned, at least `HEADER_BYTES` long and lives as long as
        // `self`; `Header` consists of atomics, for which every bit pattern is valid.
        unsafe { self.base.cast::<Header>().as_ref() }
    }

    /// Returns this process's own copy of the shape, which is never read back from the region.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Returns the size of the mapping in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the memfd, for sending it to the client.
    pub fn memfd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Daemon: frees the memory of a detached client, which may keep the file. No part of the
    /// region may be read afterwards. The client sees zeros, which permit nothing. Pages that it
    /// writes again count as the client's own memory.
    pub fn discard(&self) {
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        // Mappings stay valid and read zero, as any client could bring about itself. If it fails,
        // the pages live as long as the file.
        let _ = fallocate(&self.fd, flags, 0, self.bytes as libc::off_t);
    }

    /// Returns the address of the mapping, for [`crate::fork`].
    pub(crate) fn address(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// Returns the header and the slots of lane `index`, or `None` if there is no such lane.
    pub(crate) fn lane_parts(&self, index: u16) -> Option<(NonNull<LaneHeader>, NonNull<[Slot]>)> {
        if index >= self.geometry.lanes {
            return None;
        }
        let offset = self.geometry.lane_offset(index);
        let slots_at = offset + size_of::<LaneHeader>();
        debug_assert!(offset >= HEADER_BYTES);
        debug_assert!(slots_at + usize::from(self.geometry.slots) * 64 <= self.bytes);
        // SAFETY: `Geometry::region_bytes` covers every lane (tested), so both offsets lie inside
        // the mapping; both are multiples of 64 from a page-aligned base.
        unsafe {
            let header = self.base.add(offset).cast::<LaneHeader>();
            let slots = self.base.add(slots_at).cast::<Slot>();
            Some((header, NonNull::slice_from_raw_parts(slots, usize::from(self.geometry.slots))))
        }
    }
}

/// A reference to the header of a region that needs one pointer to read.
#[derive(Clone, Debug)]
pub struct HeaderRef {
    header: NonNull<Header>,
    _region: Arc<Region>,
}

// SAFETY: a pointer to atomics in a mapping that `_region` keeps alive.
unsafe impl Send for HeaderRef {}
// SAFETY: `&HeaderRef` gives out `&Header` only, which consists of atomics.
unsafe impl Sync for HeaderRef {}

impl HeaderRef {
    /// Creates a reference to the header of `region`.
    pub fn new(region: &Arc<Region>) -> Self {
        Self { header: NonNull::from(region.header()), _region: Arc::clone(region) }
    }
}

impl core::ops::Deref for HeaderRef {
    type Target = Header;

    #[inline]
    fn deref(&self) -> &Header {
        // SAFETY: `new` took it from a live region, which `_region` keeps mapped.
        unsafe { self.header.as_ref() }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `base` and `bytes` are those of our own mapping, and nobody holds a reference
        // into it: `LaneMemory` keeps the region alive.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

fn memfd() -> Result<OwnedFd, RegionError> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let open = |flags| memfd_create(c"laxity-region", flags);
    // Older kernels (before 6.3) do not know this flag.
    let no_exec = MFdFlags::from_bits_retain(libc::MFD_NOEXEC_SEAL);
    open(flags | no_exec).or_else(|_| open(flags)).map_err(system("memfd_create"))
}
