//! A daemon in standby (`laxityd --standby`) waits for the end of the running one and takes over.
//!
//! Under systemd the service manager keeps the sockets while one daemon ends and the next one
//! starts. Elsewhere, as in Kubernetes, the next daemon starts first. It connects to a socket
//! beside the control socket. At its end, the running daemon passes its listening sockets to the
//! first daemon that waits there, and hands its clients over. So clients wait in the queue of a
//! socket that never closes.
//!
//! Clients can't reach the folder of the control socket, so that they can't wait there themselves.

use std::fs::Permissions;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use laxity_shm::registration;
use tracing::{info, warn};

use crate::config::Config;
use crate::sockets::plain;

/// How often a daemon in standby looks whether the running one has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The same after the running daemon has passed its sockets, since clients wait.
const ALMOST: Duration = Duration::from_millis(1);

fn path_for(control: &Path) -> PathBuf {
    let mut path = control.as_os_str().to_owned();
    path.push(".next");
    path.into()
}

/// Waits until no other daemon listens at the sockets of `config`. Returns the sockets that the
/// other daemon passed on, if there was one that did.
pub fn wait_for_turn(config: &Config) -> Vec<OwnedFd> {
    let is_held = |path: &PathBuf| {
        let claimed = registration::claim(path).map_err(plain);
        claimed.is_err_and(|error| error.kind() == ErrorKind::AddrInUse)
    };
    let mut passed = Vec::new();
    let mut is_said = false;
    // The other daemon releases them one after the other.
    while [&config.socket, &config.control].into_iter().any(is_held) {
        if !is_said {
            info!(socket = %config.socket.display(), "another laxityd serves; waiting for its end");
            is_said = true;
        }
        if passed.is_empty()
            && let Ok(socket) = registration::connect(&path_for(&config.control))
        {
            passed = receive(socket.as_fd());
        }
        std::thread::sleep(if passed.is_empty() { LOOK_EVERY } else { ALMOST });
    }
    if is_said {
        info!(sockets = passed.len(), "the other laxityd has ended; taking over");
    }
    passed
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
            Ok::<_, std::io::Error>((listener, listeners))
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
        while let Ok(Some(waiting)) = registration::accept(self.listener.as_fd()) {
            let listeners = [first.as_fd(), second.as_fd()];
            if registration::send_listeners(waiting.as_fd(), listeners).is_ok() {
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
