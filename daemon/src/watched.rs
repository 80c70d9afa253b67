//! Descriptors that tokio watches: eventfds and kinds of sockets that tokio has no type for.
//!
//! tokio deprecates its safe constructor, because an arbitrary `AsRawFd` may return another
//! descriptor each time. An [`OwnedFd`] returns the same one for as long as the `AsyncFd` around it
//! lives. So this module accepts only that type, and this crate needs no `unsafe` block.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A descriptor whose readability can be awaited.
pub type Watched = AsyncFd<OwnedFd>;

/// Watches `fd` until it is readable. The caller must be inside a tokio runtime.
pub fn watch(fd: OwnedFd) -> io::Result<Watched> {
    #[expect(deprecated, reason = "sound for an OwnedFd, see the module; the successor is unsafe")]
    AsyncFd::with_interest(fd, Interest::READABLE)
}
