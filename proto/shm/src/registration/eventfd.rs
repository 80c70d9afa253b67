//! The eventfd of a client, by which it wakes a daemon that sleeps.

use std::os::fd::{BorrowedFd, OwnedFd};

use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::unistd;

use super::socket::failed;
use crate::registration::RegistrationError;

/// Daemon: creates a non-blocking eventfd for one client.
///
/// # Errors
/// [`RegistrationError::System`]: refuse the client.
pub fn eventfd() -> Result<OwnedFd, RegistrationError> {
    let made = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC);
    made.map(OwnedFd::from).map_err(failed("eventfd"))
}

/// Client: wakes the daemon. With a full counter the daemon is being woken already. Any other error
/// is that of a daemon that has ended, which the waiting side detects.
pub fn wake(eventfd: BorrowedFd<'_>) {
    let _ = unistd::write(eventfd, &1_u64.to_ne_bytes());
}

/// Daemon: empties the eventfd after a wake-up, for a daemon that waits until the eventfd is
/// readable. Does nothing if it is empty. `laxityd` watches for edges and needs no such call.
pub fn drain(eventfd: BorrowedFd<'_>) {
    let _ = unistd::read(eventfd, &mut [0; 8]);
}
