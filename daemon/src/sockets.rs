//! The paths that the daemon listens at.
//!
//! Only one daemon may listen at a path. A check whether one listens has a race, so the daemon
//! holds a lock file beside the path ([`laxity_shm::registration::claim`]). At the end, the daemon
//! removes only the file that it bound, since an operator may have replaced it.
//!
//! The service manager keeps the listening sockets while a daemon restarts (`sd_notify(3)`,
//! `FDSTORE=1`), so that clients wait in the queue of the next daemon instead of finding none. The
//! files then stay, too. If the service is stopped for good, nobody listens at them.
//!
//! Root may start a daemon by hand in a folder of the service's user. Then the lock and the sockets
//! are given to that user. Otherwise the service could not lock or remove them, and would not
//! start.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown, lchown};
use std::path::{Path, PathBuf};

use laxity_shm::registration::{self, RegistrationError};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockname, getsockopt, socket, sockopt,
};
use sd_notify::NotifyState;
use thiserror::Error;
use tokio::net::UnixListener;
use tracing::debug;

/// Why the daemon can't listen at a path, and the remedy.
#[derive(Debug, Error)]
pub enum BindError {
    #[error("its folder cannot be made: {0}; make it, and let the daemon's user write to it")]
    Folder(io::Error),
    #[error("its lock file {path} cannot be opened: {cause}; \
        {}", way_out_of_lock(.cause), path = .path.display())]
    Lock { path: PathBuf, cause: io::Error },
    #[error("{cause}; {}", way_out_of_socket(.cause))]
    Socket { cause: io::Error },
}

impl From<io::Error> for BindError {
    fn from(cause: io::Error) -> Self {
        Self::Socket { cause }
    }
}

fn way_out_of_lock(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::PermissionDenied => {
            "it is another user's, perhaps root's that started a laxityd by hand: stop that one, \
             and remove the file if it stays"
        }
        _ => way_out(cause, "remove what is there, or set another path"),
    }
}

fn way_out_of_socket(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::AddrInUse => "another laxityd listens there: stop it, or set another path",
        _ => way_out(cause, "set another path"),
    }
}

/// Returns the remedy for a socket or an address that can't be bound. It is `otherwise` if the
/// cause has no special remedy.
pub fn way_out<'t>(cause: &io::Error, otherwise: &'t str) -> &'t str {
    match cause.raw_os_error().map(nix::Error::from_raw) {
        Some(nix::Error::EMFILE) => {
            return "raise the limit of open files: `LimitNOFILE` of the unit, `ulimit -n`";
        }
        Some(nix::Error::ENFILE) => return "this host is out of open files: see fs.file-max",
        Some(nix::Error::ENOSPC) => return "make room on its file system",
        Some(nix::Error::EROFS) => return "its file system is read-only: set another path",
        _ => {}
    }
    match cause.kind() {
        io::ErrorKind::AlreadyExists => "move it away, or set another path",
        io::ErrorKind::InvalidFilename => "set a shorter path",
        io::ErrorKind::PermissionDenied => {
            "let the daemon's user write to the folder, or set another path"
        }
        _ => otherwise,
    }
}

/// The sockets and locks that this daemon got from others, before it binds a socket itself.
#[derive(Debug, Default)]
pub struct PassedSockets {
    /// Listening sockets from the service manager, which keeps copies.
    kept: Vec<OwnedFd>,
    /// Listening sockets from the daemon before this one.
    handed: Vec<OwnedFd>,
    /// Locks that this daemon holds already, by their sockets' paths.
    claims: Vec<(PathBuf, OwnedFd)>,
}

/// The sockets and locks that a daemon in standby gets when its turn comes (`standby.rs`).
#[derive(Debug, Default)]
pub struct SocketTurn {
    /// The sockets at which the daemon before it listened, if it passed them.
    pub sockets: Vec<OwnedFd>,
    /// The locks of the sockets' paths, so that no other daemon takes this turn.
    pub claims: Vec<(PathBuf, OwnedFd)>,
}

/// A listening socket that was passed.
struct PassedSocket {
    listener: OwnedFd,
    is_kept: bool,
}

impl PassedSockets {
    /// Returns the sockets that the service manager passed, at the first call.
    pub fn take() -> Self {
        Self { kept: registration::passed(), ..Self::default() }
    }

    /// Adds the sockets and locks for which a daemon in standby waited.
    #[must_use]
    pub fn with(mut self, turn: SocketTurn) -> Self {
        self.handed = turn.sockets;
        self.claims = turn.claims;
        self
    }

    /// Returns the lock for `path`.
    fn claim(&mut self, path: &Path) -> Result<OwnedFd, RegistrationError> {
        match self.claims.iter().position(|(claimed, _)| claimed == path) {
            Some(at) => Ok(self.claims.swap_remove(at).1),
            None => registration::claim(path),
        }
    }

    /// Returns the socket that listens at `path`, if there is one.
    fn at(&mut self, path: &Path, kind: SockType) -> io::Result<Option<PassedSocket>> {
        let listens = |fd: &OwnedFd| {
            let address = getsockname::<UnixAddr>(fd.as_raw_fd());
            getsockopt(fd, sockopt::AcceptConn) == Ok(true)
                && getsockopt(fd, sockopt::SockType) == Ok(kind)
                && address.is_ok_and(|address| address.path().is_some_and(|at| same(at, path)))
        };
        // Nobody finds a socket whose file is gone, or is that of another socket.
        if !registration::is_socket(path)? || attempt(path, kind)? == Err(nix::Error::ECONNREFUSED)
        {
            return Ok(None);
        }
        let mut found = None;
        for (sockets, is_kept) in [(&mut self.handed, false), (&mut self.kept, true)] {
            if let Some(at) = sockets.iter().position(listens) {
                found = Some(PassedSocket { listener: sockets.swap_remove(at), is_kept });
            }
        }
        if let Some(PassedSocket { listener, .. }) = &found {
            fcntl(listener, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        Ok(found)
    }
}

/// Reports whether two paths name the same file.
fn same(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().ok();
    one == other || (real(one).is_some() && real(one) == real(other))
}

/// A socket file of this daemon, which is removed on drop unless its socket is kept.
#[derive(Debug)]
pub struct Bound {
    path: PathBuf,
    is_kept: bool,
    /// The device and inode of the file.
    file: (u64, u64),
    _claim: OwnedFd,
}

impl Bound {
    /// Makes the guard of a socket that was just bound at `path`, or was passed. Sets the mode and
    /// owner of its file.
    fn new(path: &Path, mode: u32, claim: OwnedFd, is_kept: bool) -> io::Result<Self> {
        let file = identity(path)?;
        let bound = Self { path: path.to_owned(), is_kept, file, _claim: claim };
        std::fs::set_permissions(path, Permissions::from_mode(mode))?;
        if let Some((uid, gid)) = folder_owner(path) {
            lchown(path, Some(uid), Some(gid))?;
        }
        Ok(bound)
    }

    /// Reports whether the socket is kept when this daemon ends: by the service manager, or by a
    /// daemon in standby.
    pub const fn is_kept(&self) -> bool {
        self.is_kept
    }

    /// Leaves the file to a daemon that has the socket now.
    pub const fn keep_file(&mut self) {
        self.is_kept = true;
    }

    /// Gives the service manager, if there is one, a copy of the listening socket under `name`, in
    /// place of any other.
    fn keep(mut self, listener: BorrowedFd<'_>, name: &str) -> Self {
        if std::env::var_os("NOTIFY_SOCKET").is_some() {
            let fd_name = || NotifyState::FdName(name);
            let removed = sd_notify::notify(&[NotifyState::FdStoreRemove, fd_name()]);
            let stored =
                || sd_notify::notify_with_fds(&[NotifyState::FdStore, fd_name()], &[listener]);
            match removed.and_then(|()| stored()) {
                Ok(()) => self.is_kept = true,
                Err(error) => debug!(%error, "the service manager does not keep a socket"),
            }
        }
        self
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if !self.is_kept && identity(&self.path).is_ok_and(|file| file == self.file) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = std::fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Binds the socket where clients register.
///
/// # Errors
/// A [`BindError`]. Within it, `AddrInUse` means that another daemon runs, and `AlreadyExists` that
/// another file is there.
pub fn bind_registration(
    path: &Path,
    mode: u32,
    passed: &mut PassedSockets,
) -> Result<(OwnedFd, Bound), BindError> {
    let claim = claim(path, passed)?;
    let PassedSocket { listener, is_kept } = match passed.at(path, SockType::SeqPacket)? {
        Some(socket) => socket,
        None => {
            PassedSocket { listener: registration::listen(path).map_err(plain)?, is_kept: false }
        }
    };
    let bound = Bound::new(path, mode, claim, is_kept)?.keep(listener.as_fd(), "registration");
    Ok((listener, bound))
}

/// Binds the socket that operators use.
pub fn bind_control(
    path: &Path,
    mode: u32,
    passed: &mut PassedSockets,
) -> Result<(UnixListener, Bound), BindError> {
    let claim = claim(path, passed)?;
    if let Some(PassedSocket { listener, is_kept }) = passed.at(path, SockType::Stream)? {
        let bound = Bound::new(path, mode, claim, is_kept)?.keep(listener.as_fd(), "control");
        return Ok((UnixListener::from_std(listener.into())?, bound));
    }
    if registration::is_socket(path)? {
        match attempt(path, SockType::Stream)? {
            // The lock is held, so this file is left from a daemon that was killed.
            Err(nix::Error::ECONNREFUSED | nix::Error::EACCES) => std::fs::remove_file(path)?,
            _ => return Err(io::Error::from(io::ErrorKind::AddrInUse).into()),
        }
    }
    let listener = UnixListener::bind(path)?;
    let bound = Bound::new(path, mode, claim, false)?.keep(listener.as_fd(), "control");
    Ok((listener, bound))
}

/// Takes the lock for `path`.
fn claim(path: &Path, passed: &mut PassedSockets) -> Result<OwnedFd, BindError> {
    std::fs::create_dir_all(folder(path)).map_err(BindError::Folder)?;
    let lock = registration::lock_path(path);
    let claim = passed.claim(path).map_err(plain).map_err(|cause| match cause.kind() {
        io::ErrorKind::AddrInUse => cause.into(),
        _ => BindError::Lock { path: lock, cause },
    })?;
    if let Some((uid, gid)) = folder_owner(path) {
        let file = File::from(claim);
        // A file with a second hard link may belong to another user.
        if file.metadata()?.nlink() == 1 {
            fchown(&file, Some(uid), Some(gid))?;
        }
        return Ok(file.into());
    }
    Ok(claim)
}

/// Returns the user and group id for files that root makes beside `path`: those of the folder,
/// unless its user is root.
pub(crate) fn folder_owner(path: &Path) -> Option<(u32, u32)> {
    if !nix::unistd::geteuid().is_root() {
        return None;
    }
    let metadata = std::fs::metadata(folder(path)).ok()?;
    (metadata.uid() != 0).then(|| (metadata.uid(), metadata.gid()))
}

/// Returns the path of a socket with a suffix, for a file beside the socket.
pub(crate) fn beside(socket: &Path, suffix: &str) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}

/// Connects to `path` and returns the result. A full backlog gives `EAGAIN`.
fn attempt(path: &Path, kind: SockType) -> io::Result<nix::Result<()>> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let probe = socket(AddressFamily::Unix, kind, flags, None)?;
    Ok(connect(probe.as_raw_fd(), &UnixAddr::new(path)?))
}

pub(crate) fn plain(error: RegistrationError) -> io::Error {
    match error {
        RegistrationError::System { source, .. } => source,
        other => io::Error::other(other),
    }
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn passed(path: &Path) -> PassedSockets {
        let kept = vec![UnixListener::bind(path).unwrap().into()];
        PassedSockets { kept, ..PassedSockets::default() }
    }

    #[test]
    fn a_passed_socket_is_taken_only_if_clients_find_it_at_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let is_taken = |passed: &mut PassedSockets, path: &Path| {
            passed.at(path, SockType::Stream).unwrap().is_some()
        };
        // The same file by another name.
        let mut sockets = passed(&path);
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        assert!(!is_taken(&mut sockets, &folder.path().join("other")));
        assert!(is_taken(&mut sockets, &link.join("socket")));
        // The file is another socket's by now, whose daemon was killed.
        std::fs::remove_file(&path).unwrap();
        let mut sockets = passed(&path);
        std::fs::remove_file(&path).unwrap();
        drop(UnixListener::bind(&path).unwrap());
        assert!(!is_taken(&mut sockets, &path));
    }
}
