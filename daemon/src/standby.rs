//! A daemon in standby (`laxityd --standby`) waits for the end of the running one and takes over.
//!
//! Under systemd the service manager keeps the sockets while one daemon ends and the next one
//! starts. Elsewhere, as in Kubernetes, the next daemon starts first. It connects to a socket
//! beside the control socket. At its end, the running daemon passes its listening sockets to the
//! first daemon that waits there, and hands its clients over. So clients wait in the queue of a
//! socket that never closes.
//!
//! Whoever gets the sockets can play the daemon to later clients. So they go only to root, to the
//! daemon's own user and, from a daemon that root started, to the user who owns the folder. In
//! Kubernetes, pods do not see the folder of the control socket.

use std::fs::Permissions;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, lchown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use laxity_shm::registration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tracing::{info, warn};

use crate::config::Config;
use crate::service::Source;
use crate::sockets::{SocketTurn, beside, folder_owner, plain};

/// How often a daemon in standby looks whether the running one has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The same interval after the running daemon has passed its sockets, since clients wait.
const ALMOST: Duration = Duration::from_millis(1);
/// Longest time that clients wait for a daemon at passed sockets. After it the sockets are useless.
const SOCKETS_LAST: Duration = Duration::from_secs(1);

fn path_for(control: &Path) -> PathBuf {
    beside(control, ".next")
}

/// Waits until no other daemon listens at the sockets of `config`. `None` if SIGTERM or SIGINT came
/// first. SIGHUP changes nothing, since the configuration is read again at the turn.
pub async fn wait_for_turn(config: &Config) -> io::Result<Option<SocketTurn>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let _ignored = signal(SignalKind::hangup())?;
    let (socket, control) = (config.socket.clone(), config.control.clone());
    let (done, turn) = oneshot::channel();
    // The thread ends with the process.
    std::thread::Builder::new().name("standby".into()).spawn(move || {
        let _ = done.send(wait(&socket, &control));
    })?;
    tokio::select! {
        turn = turn => turn.map(Some).map_err(io::Error::other),
        _ = terminate.recv() => Ok(None),
        _ = interrupt.recv() => Ok(None),
    }
}

impl Config {
    /// Returns the configuration that holds at the turn of a daemon in standby, which loaded `self`
    /// before: the file may have changed meanwhile. An error in the file does not end a daemon
    /// whose predecessor has gone, and clients find the daemon at the old paths.
    #[must_use]
    pub fn at_turn(self, source: &Source) -> Self {
        let now = match Self::load(source.file.as_deref(), &source.sets) {
            Ok(now) => now,
            Err(error) => {
                warn!(%error, "the configuration as it was before the wait holds");
                return self;
            }
        };
        if (&now.socket, &now.control) != (&self.socket, &self.control) {
            warn!("`socket` and `control` changed; they take effect after a restart only");
        }
        Self { socket: self.socket, control: self.control, ..now }
    }
}

fn wait(socket: &Path, control: &Path) -> SocketTurn {
    let mut sockets = Vec::new();
    let mut had_them = Instant::now();
    let mut is_said = false;
    loop {
        if let Some(claims) = claim(&[socket, control]) {
            // If a process listens, another daemon in standby has got the sockets.
            if !sockets.is_empty() || registration::connect(socket).is_err() {
                if is_said {
                    info!(sockets = sockets.len(), "the other laxityd has ended; taking over");
                }
                return SocketTurn { sockets, claims };
            }
        }
        if !is_said {
            info!(socket = %socket.display(), "another laxityd serves; waiting for its end");
            is_said = true;
        }
        if had_them.elapsed() > SOCKETS_LAST {
            sockets.clear();
        }
        if sockets.is_empty()
            && let Ok(next) = registration::connect(&path_for(control))
        {
            sockets = receive(next.as_fd());
            had_them = Instant::now();
        }
        std::thread::sleep(if sockets.is_empty() { LOOK_EVERY } else { ALMOST });
    }
}

/// Takes all locks. `None` if another daemon holds one: it releases them one after the other. Other
/// errors are reported when this daemon binds the sockets.
fn claim(paths: &[&Path]) -> Option<Vec<(PathBuf, OwnedFd)>> {
    let mut claims = Vec::new();
    for path in paths {
        match registration::claim(path).map_err(plain) {
            Ok(claim) => claims.push((path.to_path_buf(), claim)),
            Err(error) if error.kind() == ErrorKind::AddrInUse => return None,
            Err(_) => {}
        }
    }
    Some(claims)
}

/// Waits until the running daemon passes its sockets or ends without doing so.
fn receive(socket: BorrowedFd<'_>) -> Vec<OwnedFd> {
    loop {
        registration::wait_readable(socket, Duration::from_secs(60));
        match registration::receive_listeners(socket) {
            Ok(None) => {}
            Ok(Some(listeners)) => return listeners.into(),
            Err(_) => return Vec::new(),
        }
    }
}

/// The socket of the running daemon at which a daemon in standby waits.
#[derive(Debug)]
pub struct StandbySocket {
    path: PathBuf,
    listener: OwnedFd,
    /// Copies of the sockets that the daemon listens at.
    listeners: [OwnedFd; 2],
}

impl StandbySocket {
    /// Listens beside the control socket at `control`. The caller listens there already, so no
    /// other daemon does. `None` with a warning if that is impossible.
    pub fn bind(control: &Path, listeners: [BorrowedFd<'_>; 2]) -> Option<Self> {
        let path = path_for(control);
        let bound = || {
            let [first, second] = listeners;
            let listeners = [first.try_clone_to_owned()?, second.try_clone_to_owned()?];
            let listener = registration::listen(&path).map_err(plain)?;
            std::fs::set_permissions(&path, Permissions::from_mode(0o600))?;
            if let Some((uid, gid)) = folder_owner(&path) {
                lchown(&path, Some(uid), Some(gid))?;
            }
            Ok::<_, io::Error>((listener, listeners))
        };
        match bound() {
            Ok((listener, listeners)) => Some(Self { path, listener, listeners }),
            Err(error) => {
                let path = path.display();
                warn!(%path, %error, "no daemon in standby can take the clients over");
                None
            }
        }
    }

    /// Passes the listening sockets to the first daemon that waits. Returns whether one did.
    pub fn pass_on(self) -> bool {
        let [first, second] = &self.listeners;
        let own = nix::unistd::geteuid().as_raw();
        let folder_owner = folder_owner(&self.path).map(|(uid, _)| uid);
        let is_trusted = |uid| [Some(0), Some(own), folder_owner].contains(&Some(uid));
        while let Ok(Some(waiting)) = registration::accept(self.listener.as_fd()) {
            let peer = registration::peer(waiting.as_fd());
            let listeners = [first.as_fd(), second.as_fd()];
            if peer.is_ok_and(|peer| is_trusted(peer.uid))
                && registration::send_listeners(waiting.as_fd(), listeners).is_ok()
            {
                return true;
            }
        }
        false
    }
}

impl Drop for StandbySocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
