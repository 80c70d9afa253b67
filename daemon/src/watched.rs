//! Descriptors that tokio watches: sockets of a kind it has no type for, and eventfds.
//!
//! tokio deprecates its safe constructor, because an arbitrary `AsRawFd` may give another
//! descriptor each time. An [`OwnedFd`] gives the one that it owns for as long as it lives, which
//! is for as long as the `AsyncFd` around it; so that is the only kind accepted here, and this
//! crate needs no `unsafe` block.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A descriptor that is awaited until it is readable.
pub type Watched = AsyncFd<OwnedFd>;

/// Watches `fd` for being readable. Call inside a tokio runtime.
///
/// # Errors
/// The system is out of descriptors or watches.
pub fn watch(fd: OwnedFd) -> io::Result<Watched> {
    #[expect(
        deprecated,
        reason = "sound for an OwnedFd, see the module; the successor is unsafe"
    )]
    AsyncFd::with_interest(fd, Interest::READABLE)
}
