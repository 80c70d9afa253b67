//! What a forked child sees of its parent's regions: nothing.
//!
//! A child inherits shared mappings and sockets. If it went on using the parent's lanes, two
//! processes would write them; if it merely held the registration socket, the daemon would not
//! see the parent's death. So a `pthread_atfork` handler, in the child, before `fork` returns
//! there, replaces each region by private zero pages whose attention word says
//! [`attention::LOST`], and the socket and the eventfd by a dead descriptor. Every lane of the
//! child then finds itself detached by the check it makes anyway, at no cost to the parent's hot
//! path, and attaches anew under its own pid.
//!
//! A socket on which a daemon was asked and has not answered yet is guarded in the same way: a
//! daemon that answers later would otherwise take the child's copy for a parent that is still
//! there.
//!
//! Only calls that are async-signal-safe are made, and no lock is taken: the table is fixed and
//! lock-free. Children made by `vfork` or `posix_spawn` run no handler and need none (they only
//! exec). A raw `clone` of a process without exec is not covered.

use core::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Once};

use crate::layout::{Header, attention};
use crate::region::Region;

struct Entry {
    /// Address of the mapping; 0 free, 1 being filled, 2 a socket without one.
    address: AtomicUsize,
    bytes: AtomicUsize,
    socket: AtomicI32,
    eventfd: AtomicI32,
}

const FREE: usize = 0;
const FILLING: usize = 1;
const NO_REGION: usize = 2;
/// In place of a descriptor.
const NONE: i32 = -1;
/// Regions and sockets of one process at a time: of each of its clients the current region, the
/// socket on which the next one is asked for, and old ones that a thread still holds. A process has
/// one client or a few; the table is large enough that nobody counts them: 24 KiB that are zero
/// until they are used.
const ENTRIES: usize = 1024;

static TABLE: [Entry; ENTRIES] = [const {
    Entry {
        address: AtomicUsize::new(FREE),
        bytes: AtomicUsize::new(0),
        // Not read while the entry is free. Zero, so that the table takes no room in the binary.
        socket: AtomicI32::new(0),
        eventfd: AtomicI32::new(0),
    }
}; ENTRIES];

/// Too many regions are mapped, or the handler cannot be installed. Do not use the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot guard the region against fork: run unscheduled")]
pub struct Unguarded;

/// A region, or a socket alone, that a forked child will not see. Drop it before the region and the
/// descriptors.
#[derive(Debug)]
pub struct ForkGuard {
    entry: usize,
    /// Keeps the mapping alive while the table names it.
    _region: Option<Arc<Region>>,
}

impl ForkGuard {
    /// Takes the region, its registration socket and its eventfd away from future children.
    ///
    /// # Errors
    /// [`Unguarded`].
    pub fn new(
        region: &Arc<Region>,
        socket: BorrowedFd<'_>,
        eventfd: BorrowedFd<'_>,
    ) -> Result<Self, Unguarded> {
        let (socket, eventfd) = (socket.as_raw_fd(), eventfd.as_raw_fd());
        let entry = enter(region.address(), region.bytes(), socket, eventfd)?;
        Ok(Self {
            entry,
            _region: Some(Arc::clone(region)),
        })
    }

    /// Takes a registration socket away from future children.
    ///
    /// # Errors
    /// [`Unguarded`].
    pub fn socket(socket: BorrowedFd<'_>) -> Result<Self, Unguarded> {
        let entry = enter(NO_REGION, 0, socket.as_raw_fd(), NONE)?;
        Ok(Self {
            entry,
            _region: None,
        })
    }
}

/// Makes an entry of the table; its index.
fn enter(address: usize, bytes: usize, socket: i32, eventfd: i32) -> Result<usize, Unguarded> {
    static INSTALL: Once = Once::new();
    static INSTALLED: AtomicI32 = AtomicI32::new(-1);
    INSTALL.call_once(|| {
        // SAFETY: `in_child` is async-signal-safe and stays loaded: a library that installs
        // a handler is never unloaded by glibc before the handler is removed.
        let rc = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        INSTALLED.store(rc, Ordering::Relaxed);
    });
    if INSTALLED.load(Ordering::Relaxed) != 0 {
        return Err(Unguarded);
    }
    for (index, entry) in TABLE.iter().enumerate() {
        let taken =
            entry
                .address
                .compare_exchange(FREE, FILLING, Ordering::Acquire, Ordering::Relaxed);
        if taken.is_ok() {
            entry.bytes.store(bytes, Ordering::Relaxed);
            entry.socket.store(socket, Ordering::Relaxed);
            entry.eventfd.store(eventfd, Ordering::Relaxed);
            // Release: the handler that sees the address sees the rest.
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

/// Runs in the child of a fork.
extern "C" fn in_child() {
    // SAFETY: plain integers; a failure is handled below.
    let dead = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
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
            if fd == NONE {
                continue;
            }
            // SAFETY: both are descriptors of the guarded session, which nobody closes while the
            // table names them. The number stays taken, so its owner can close it as usual.
            unsafe {
                if dead >= 0 {
                    libc::dup3(dead, fd, libc::O_CLOEXEC);
                } else {
                    // A number without a file: the owner's close will fail, which is harmless.
                    libc::close(fd);
                }
            }
        }
    }
    if dead >= 0 {
        // SAFETY: ours, and not used any more.
        unsafe { libc::close(dead) };
    }
}

/// Replaces a region by empty pages that say that it is lost.
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
        // No memory for a child that would otherwise write its parent's lanes.
        // SAFETY: abort is always allowed.
        unsafe { libc::abort() };
    }
    // SAFETY: the pages just made are aligned, large enough for a header and never unmapped
    // before the guard is dropped.
    let header = unsafe { &*(address as *const Header) };
    header.raise(attention::LOST);
}
