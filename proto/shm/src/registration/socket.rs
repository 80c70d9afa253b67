//! The socket of a registration: its path and who may listen there, connections, and who is at the
//! other end.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{self, AddressFamily, Backlog, SockFlag, SockType, UnixAddr, sockopt};

use crate::registration::RegistrationError;

pub(super) fn failed<E: Into<io::Error>>(
    call: &'static str,
) -> impl FnOnce(E) -> RegistrationError {
    move |source| RegistrationError::System { call, source: source.into() }
}

const FLAGS: SockFlag = SockFlag::SOCK_CLOEXEC.union(SockFlag::SOCK_NONBLOCK);

fn socket() -> Result<OwnedFd, RegistrationError> {
    socket::socket(AddressFamily::Unix, SockType::SeqPacket, FLAGS, None).map_err(failed("socket"))
}

/// Maximum bytes of a socket's path: the kernel's limit, less a zero at the end.
pub const SOCKET_PATH_MAX: usize = 107;

fn address(path: &Path) -> Result<UnixAddr, RegistrationError> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.is_empty() || bytes.len() > SOCKET_PATH_MAX || bytes.contains(&0) {
        let problem = format!(
            "the path of a socket has at most {SOCKET_PATH_MAX} bytes, this one has {}",
            bytes.len()
        );
        let error = io::Error::new(io::ErrorKind::InvalidFilename, problem);
        return Err(failed("socket path")(error));
    }
    UnixAddr::new(path).map_err(failed("socket path"))
}

/// Daemon: returns the path of the file that [`claim`] locks for `path`.
pub fn lock_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    name.into()
}

/// Daemon: claims the right to listen at `path`, for as long as the descriptor is open. Without the
/// claim, two daemons that start together could each take the other's socket for a stale one. It is
/// a lock on a file of its own beside the socket ([`lock_path`]). That file stays, because its
/// removal could remove a file that another daemon has just locked. If somebody removes it, the
/// function tries again until the file that it locked is the one at that path.
///
/// # Errors
/// [`RegistrationError::System`]; `AddrInUse` means that another daemon runs.
pub fn claim(path: &Path) -> Result<OwnedFd, RegistrationError> {
    use std::fs::TryLockError;
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
    let name = lock_path(path);
    loop {
        let file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK)
            .open(&name)
            .map_err(failed("open of the socket's lock file"))?;
        let held = |error| match error {
            TryLockError::WouldBlock => io::ErrorKind::AddrInUse.into(),
            TryLockError::Error(other) => other,
        };
        file.try_lock().map_err(held).map_err(failed("flock of the socket's lock file"))?;
        let locked = file.metadata().map_err(failed("stat of the socket's lock file"))?;
        let has_name = std::fs::symlink_metadata(&name)
            .is_ok_and(|named| (named.dev(), named.ino()) == (locked.dev(), locked.ino()));
        if has_name {
            return Ok(file.into());
        }
    }
}

/// Daemon: reports whether there is a socket at `path`. Anything else there must not be replaced,
/// though it refuses connections like a socket without a listener.
///
/// # Errors
/// `AlreadyExists`: the path names something else than a socket. Leave it alone.
pub fn is_socket(path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::FileTypeExt;
    let kind = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    let what = match kind {
        socket if socket.is_socket() => return Ok(true),
        file if file.is_file() => "a regular file",
        folder if folder.is_dir() => "a folder",
        link if link.is_symlink() => "a symbolic link",
        _ => "not a socket",
    };
    let problem = format!("what is there is {what}");
    Err(io::Error::new(io::ErrorKind::AlreadyExists, problem))
}

/// Maximum number of connections that wait to be accepted. The kernel refuses further ones.
const BACKLOG: i32 = 512;

/// Daemon: listens at `path`, non-blocking. Replaces a socket without a listener. Call [`claim`]
/// first.
///
/// # Errors
/// [`RegistrationError::System`]; `AddrInUse` means that another daemon runs, `AlreadyExists` that
/// the path names something else than a socket.
pub fn listen(path: &Path) -> Result<OwnedFd, RegistrationError> {
    if is_socket(path).map_err(failed("bind"))? {
        match connect(path) {
            // A killed daemon's socket, perhaps another user's. The claim makes it ours to remove.
            Err(RegistrationError::System { source, .. })
                if matches!(
                    source.kind(),
                    io::ErrorKind::ConnectionRefused | io::ErrorKind::PermissionDenied
                ) =>
            {
                let failed = failed("removal of a socket that nobody listens at");
                std::fs::remove_file(path).map_err(failed)?;
            }
            // Another process listens, though perhaps with a full backlog.
            _ => return Err(failed("bind")(Errno::EADDRINUSE)),
        }
    }
    let fd = socket()?;
    refuse_rights(fd.as_fd());
    socket::bind(fd.as_raw_fd(), &address(path)?).map_err(failed("bind"))?;
    let listen = Backlog::new(BACKLOG).and_then(|backlog| socket::listen(&fd, backlog));
    listen.map_err(failed("listen"))?;
    Ok(fd)
}

/// Daemon: returns the sockets that the service manager passes to this process, as in
/// `sd_listen_fds(3)`: those of a socket unit, and those that the daemon before this one stored.
/// Further calls return none.
pub fn passed() -> Vec<OwnedFd> {
    const FIRST: RawFd = 3;
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let number = |name| std::env::var(name).ok()?.parse::<u32>().ok();
    let is_ours = number("LISTEN_PID") == Some(std::process::id());
    if !is_ours || TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let count = number("LISTEN_FDS").and_then(|count| RawFd::try_from(count).ok()).unwrap_or(0);
    let open = (FIRST..FIRST.saturating_add(count)).map_while(|fd| {
        // SAFETY: plain call with integers. It fails if the descriptor is not open.
        let is_open = unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } == 0;
        // SAFETY: the descriptor is open, the manager passed it to this process by its id, and
        // `TAKEN` makes this the only owner.
        is_open.then(|| unsafe { OwnedFd::from_raw_fd(fd) })
    });
    open.collect()
}

/// Daemon: accepts one connection, non-blocking and close-on-exec. Returns `None` if none waits.
pub fn accept(listener: BorrowedFd<'_>) -> Result<Option<OwnedFd>, RegistrationError> {
    let fd = match socket::accept4(listener.as_raw_fd(), FLAGS) {
        // SAFETY: a fresh descriptor that nobody else owns.
        Ok(fd) => unsafe { OwnedFd::from_raw_fd(fd) },
        // Nobody waits, or the peer hung up before the call.
        Err(Errno::EAGAIN | Errno::ECONNABORTED) => return Ok(None),
        Err(error) => return Err(failed("accept")(error)),
    };
    refuse_rights(fd.as_fd());
    Ok(Some(fd))
}

/// Makes the kernel refuse descriptors that are sent to this socket. [`super::receive_hello`]
/// accepts none in any case, but descriptors that a client queued would count as the daemon's while
/// they wait.
fn refuse_rights(socket: BorrowedFd<'_>) {
    /// Available since Linux 6.16. The number is asm-generic's, which all supported targets use.
    const SO_PASSRIGHTS: libc::c_int = 83;
    let off: libc::c_int = 0;
    // SAFETY: an int is read from `off`. Older kernels return an error, which is harmless.
    unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const off).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
}

/// Client: connects without blocking. A listener whose backlog is full is an error.
///
/// # Errors
/// [`RegistrationError::System`]: no daemon listens, or this user may not connect.
pub fn connect(path: &Path) -> Result<OwnedFd, RegistrationError> {
    let fd = socket()?;
    socket::connect(fd.as_raw_fd(), &address(path)?).map_err(failed("connect"))?;
    Ok(fd)
}

/// The process at the other end, as reported by the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process that connected, in this pid namespace; 0 if it is not visible there.
    pub pid: u32,
    /// The process's effective user when it connected.
    pub uid: u32,
    /// The process's effective group when it connected.
    pub gid: u32,
}

/// Returns the `SO_PEERCRED` of the other end.
pub fn peer(socket: BorrowedFd<'_>) -> Result<Peer, RegistrationError> {
    let cred = socket::getsockopt(&socket, sockopt::PeerCredentials);
    let cred = cred.map_err(failed("getsockopt(SO_PEERCRED)"))?;
    Ok(Peer { pid: cred.pid() as u32, uid: cred.uid(), gid: cred.gid() })
}

/// Maximum number of groups that [`peer_groups`] reads, which is Linux's limit for a process.
const GROUPS_MAX: usize = 65_536;

/// Returns the supplementary groups of the process at the other end when it connected.
pub fn peer_groups(socket: BorrowedFd<'_>) -> Result<Vec<u32>, RegistrationError> {
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let mut length = size_of_val(groups.as_slice()) as libc::socklen_t;
        // SAFETY: `groups` and `length` are valid to write to and belong together.
        let rc = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        let count = length as usize / size_of::<libc::gid_t>();
        if rc == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let source = io::Error::last_os_error();
        // The list was too short: `length` is the size that it needs.
        if source.raw_os_error() == Some(libc::ERANGE)
            && count > groups.len()
            && count <= GROUPS_MAX
        {
            groups.resize(count, 0);
            continue;
        }
        return Err(failed("getsockopt(SO_PEERGROUPS)")(source));
    }
}

/// Waits at most `limit` until the socket has something to read or was hung up.
pub fn wait_readable(socket: BorrowedFd<'_>, limit: Duration) -> bool {
    poll(socket, libc::POLLIN, limit) != 0
}

/// Reports whether the other side has ended, with one system call. No packets follow the
/// registration, so a hangup is the only event.
pub fn is_hung_up(socket: BorrowedFd<'_>) -> bool {
    let gone = libc::POLLHUP | libc::POLLERR | libc::POLLNVAL | libc::POLLRDHUP;
    poll(socket, libc::POLLRDHUP, Duration::ZERO) & gone != 0
}

fn poll(socket: BorrowedFd<'_>, events: libc::c_short, limit: Duration) -> libc::c_short {
    let mut entry = libc::pollfd { fd: socket.as_raw_fd(), events, revents: 0 };
    let millis = i32::try_from(limit.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
    // SAFETY: one valid pollfd.
    let ready = unsafe { libc::poll(&raw mut entry, 1, millis) };
    if ready > 0 { entry.revents } else { 0 }
}
