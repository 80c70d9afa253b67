//! Protection of a process's regions from its forked children.
//!
//! A child inherits shared mappings and sockets. If the child used the parent's lanes, two
//! processes would write them. If it only kept the registration socket open, the daemon would not
//! see the parent's death. So a `pthread_atfork` handler runs in the child before `fork` returns
//! there. It replaces each region by private zero pages whose attention word is
//! [`attention::LOST`], and the socket and the eventfd by a dead descriptor. The usual check then
//! shows each lane of the child that it is detached, at no cost to the parent's hot path, and the
//! child attaches again under its own pid.
//!
//! A socket whose registration has no answer yet is guarded in the same way. Otherwise the child's
//! copy would keep the connection open after the parent ended, and a daemon that answers later
//! would not notice the end.
//!
//! The handler makes only async-signal-safe calls and takes no lock: the table is fixed and
//! lock-free. Children made by `vfork` or `posix_spawn` run no handler and need none (they only
//! exec). A raw `clone` of a process without exec is not covered.

use core::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use crate::layout::{Header, attention};
use crate::region::Region;

struct GuardEntry {
    /// Address of the mapping, or [`FREE`], [`FILLING`] or [`NO_REGION`].
    address: AtomicUsize,
    bytes: AtomicUsize,
    socket: AtomicI32,
    eventfd: AtomicI32,
}

const FREE: usize = 0;
const FILLING: usize = 1;
const NO_REGION: usize = 2;
/// Stands for no descriptor.
const NONE: i32 = -1;
/// Maximum number of guarded regions and sockets in one process. Each client has its current
/// region, a socket for the next registration, and old regions that a thread still uses. A process
/// has few clients, so the table is large enough. It takes 24 KiB, which are zero until they are
/// used.
const ENTRIES: usize = 1024;

static TABLE: [GuardEntry; ENTRIES] = [const {
    GuardEntry {
        address: AtomicUsize::new(FREE),
        bytes: AtomicUsize::new(0),
        // Not read while the entry is free. Zero, so that the table takes no room in the binary.
        socket: AtomicI32::new(0),
        eventfd: AtomicI32::new(0),
    }
}; ENTRIES];

/// The region cannot be guarded: the table is full, or the handler is not installed. Do not use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot guard the region against fork: run unscheduled")]
pub struct Unguarded;

/// Hides a region, or a socket alone, from forked children. Drop it before the region and the
/// descriptors.
#[derive(Debug)]
pub struct ForkGuard {
    entry: usize,
    /// Keeps the mapping alive while the table names it.
    _region: Option<Arc<Region>>,
}

impl ForkGuard {
    /// Hides the region, its registration socket and its eventfd from future children.
    pub fn new(
        region: &Arc<Region>,
        socket: BorrowedFd<'_>,
        eventfd: BorrowedFd<'_>,
    ) -> Result<Self, Unguarded> {
        let (socket, eventfd) = (socket.as_raw_fd(), eventfd.as_raw_fd());
        let entry = enter(region.address(), region.bytes(), socket, eventfd)?;
        Ok(Self { entry, _region: Some(Arc::clone(region)) })
    }

    /// Hides a registration socket from future children.
    pub fn socket(socket: BorrowedFd<'_>) -> Result<Self, Unguarded> {
        let entry = enter(NO_REGION, 0, socket.as_raw_fd(), NONE)?;
        Ok(Self { entry, _region: None })
    }
}

/// Adds an entry to the table and returns its index.
fn enter(address: usize, bytes: usize, socket: i32, eventfd: i32) -> Result<usize, Unguarded> {
    // Not `Once`: another thread may fork while this one is in `pthread_atfork`, and the child
    // would wait for ever. If two threads install the handler, it hides everything twice.
    static IS_INSTALLED: AtomicBool = AtomicBool::new(false);
    if !IS_INSTALLED.load(Ordering::Relaxed) {
        // SAFETY: `in_child` is async-signal-safe and stays loaded: a library that installs
        // a handler is never unloaded by glibc before the handler is removed.
        if unsafe { libc::pthread_atfork(None, None, Some(in_child)) } != 0 {
            return Err(Unguarded);
        }
        IS_INSTALLED.store(true, Ordering::Relaxed);
    }
    for (index, entry) in TABLE.iter().enumerate() {
        let taken =
            entry.address.compare_exchange(FREE, FILLING, Ordering::Acquire, Ordering::Relaxed);
        if taken.is_ok() {
            entry.bytes.store(bytes, Ordering::Relaxed);
            entry.socket.store(socket, Ordering::Relaxed);
            entry.eventfd.store(eventfd, Ordering::Relaxed);
            // Release: a handler that sees the address also sees the other fields.
            entry.address.store(address, Ordering::Release);
            return Ok(index);
        }
    }
    Err(Unguarded)
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        TABLE[self.entry].address.store(FREE, Ordering::Release);
    }
}

/// Hides all guarded regions and sockets. It runs in the child of a fork.
extern "C" fn in_child() {
    let mut dead = DeadDescriptor::make();
    for entry in &TABLE {
        let address = entry.address.load(Ordering::Acquire);
        if address == FREE || address == FILLING {
            continue;
        }
        if address != NO_REGION {
            blank(address, entry.bytes.load(Ordering::Relaxed));
        }
        for fd in [&entry.socket, &entry.eventfd] {
            let fd = fd.load(Ordering::Relaxed);
            if fd != NONE {
                dead.replace(fd);
            }
        }
    }
    dead.close();
}

/// An eventfd that nobody uses. It replaces the guarded descriptors. Their numbers stay taken, so
/// that their owners can close them as usual, and close nothing else. If the kernel can make no
/// descriptor at all, the guarded ones are closed.
struct DeadDescriptor {
    /// The descriptor, or [`NONE`].
    fd: i32,
    /// Whether it has the number of a guarded descriptor.
    is_in_place: bool,
}

impl DeadDescriptor {
    fn make() -> Self {
        // SAFETY: plain integers; a failure is handled by `replace`.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        Self { fd, is_in_place: false }
    }

    /// Replaces `fd`, a guarded descriptor.
    fn replace(&mut self, fd: i32) {
        if self.fd < 0 {
            // All descriptors are in use. Closing `fd` makes room, and the new one gets its number.
            // SAFETY: nobody closes it while the table names it.
            unsafe { libc::close(fd) };
            *self = Self::make();
            self.is_in_place = self.fd == fd;
        }
        if self.fd >= 0 && self.fd != fd {
            // SAFETY: both are open, and nobody closes the second while the table names it.
            unsafe { libc::dup3(self.fd, fd, libc::O_CLOEXEC) };
        }
    }

    fn close(self) {
        if self.fd >= 0 && !self.is_in_place {
            // SAFETY: ours, and not used any more.
            unsafe { libc::close(self.fd) };
        }
    }
}

/// Replaces a region by zero pages with [`attention::LOST`].
fn blank(address: usize, bytes: usize) {
    // SAFETY: the table names a live mapping of ours of that size (the guard holds the
    // region), and the only thread of this process is in this handler, so nobody holds
    // anything but references to atomics into it. The new pages are zero, which is valid.
    let pages = unsafe {
        libc::mmap(
            address as *mut libc::c_void,
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if pages == libc::MAP_FAILED {
        // The child must not continue, because it would write its parent's lanes.
        // SAFETY: abort is always allowed.
        unsafe { libc::abort() };
    }
    // SAFETY: the pages just made are aligned, large enough for a header and never unmapped
    // before the guard is dropped.
    let header = unsafe { &*(address as *const Header) };
    header.raise(attention::LOST);
}
