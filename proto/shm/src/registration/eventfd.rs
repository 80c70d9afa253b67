//! The eventfd of a client, by which it wakes a daemon that sleeps.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::socket::failed;
use crate::registration::RegistrationError;

/// Daemon: creates a non-blocking eventfd for one client.
///
/// # Errors
/// [`RegistrationError::System`]: refuse the client.
pub fn eventfd() -> Result<OwnedFd, RegistrationError> {
    // SAFETY: plain integers; the result is checked.
    let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
    if fd < 0 {
        return Err(failed("eventfd"));
    }
    // SAFETY: a fresh descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Client: wakes the daemon. With a full counter the daemon is being woken already.
pub fn wake(eventfd: BorrowedFd<'_>) {
    let one = 1_u64;
    // SAFETY: eight bytes are read from `one`. The result does not matter: EAGAIN is a full
    // counter, and any other error a daemon that has ended, which the waiting side detects.
    unsafe { libc::write(eventfd.as_raw_fd(), (&raw const one).cast(), 8) };
}

/// Daemon: empties the eventfd after a wake-up.
pub fn drain(eventfd: BorrowedFd<'_>) {
    let mut count = 0_u64;
    // SAFETY: eight bytes are written to `count`. EAGAIN: nothing was there.
    unsafe { libc::read(eventfd.as_raw_fd(), (&raw mut count).cast(), 8) };
}
