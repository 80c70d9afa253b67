//! The paths that the daemon listens at: taken by one daemon at a time, left as they were found.
//!
//! Whether somebody listens at a path cannot be asked without a race, so the right to it is a lock
//! beside it ([`laxity_shm::registration::claim`]), held for the daemon's life. What is removed at
//! the end is the very file that was bound: an operator, or a daemon of another version that knows
//! no lock, may have put another in its place.

use std::fs::Permissions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use laxity_shm::registration::{self, RegistrationError};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use tokio::net::UnixListener;

/// A socket file of this daemon; removed when dropped.
#[derive(Debug)]
pub struct Bound {
    path: PathBuf,
    /// Device and inode.
    file: (u64, u64),
    _claim: OwnedFd,
}

impl Bound {
    /// `path` was bound by us just now.
    fn new(path: &Path, mode: u32, claim: OwnedFd) -> io::Result<Self> {
        let bound = Self {
            path: path.to_owned(),
            file: identity(path)?,
            _claim: claim,
        };
        std::fs::set_permissions(path, Permissions::from_mode(mode))?;
        Ok(bound)
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|file| file == self.file) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = std::fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// The socket where clients register.
///
/// # Errors
/// `AddrInUse` means that another daemon runs, `AlreadyExists` that something else is there.
pub fn bind_registration(path: &Path, mode: u32) -> io::Result<(OwnedFd, Bound)> {
    make_folder(path)?;
    let claim = registration::claim(path).map_err(plain)?;
    let listener = registration::listen(path).map_err(plain)?;
    Ok((listener, Bound::new(path, mode, claim)?))
}

/// The socket where operators ask.
///
/// # Errors
/// `AddrInUse` means that another daemon runs, `AlreadyExists` that something else is there.
pub fn bind_control(path: &Path, mode: u32) -> io::Result<(UnixListener, Bound)> {
    make_folder(path)?;
    let claim = registration::claim(path).map_err(plain)?;
    if registration::is_socket(path)? {
        if !is_left_over(path)? {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        // If this fails, bind says why.
        let _ = std::fs::remove_file(path);
    }
    let listener = UnixListener::bind(path)?;
    Ok((listener, Bound::new(path, mode, claim)?))
}

/// Whether it is the socket of a process that is gone. One with a full backlog is not.
fn is_left_over(path: &Path) -> io::Result<bool> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let probe = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    let answer = connect(probe.as_raw_fd(), &UnixAddr::new(path)?);
    Ok(answer == Err(nix::Error::ECONNREFUSED))
}

fn plain(error: RegistrationError) -> io::Error {
    match error {
        RegistrationError::System { source, .. } => source,
        other => io::Error::other(other),
    }
}

fn make_folder(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => std::fs::create_dir_all(folder),
        _ => Ok(()),
    }
}
