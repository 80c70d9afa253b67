//! Asks the daemon's registration socket whether it would admit a job, with a client's whole
//! handshake.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use laxity_shm::layout::Mode;
use laxity_shm::registration::{self, Hello, RegistrationError, Welcome};

/// Longest wait for the daemon. A job waits for 100 ms, and a person can wait longer.
const PATIENCE: Duration = Duration::from_millis(1000);

/// Returns the socket of the option `--socket`, or else of the environment.
pub(crate) fn socket(chosen: Option<&Path>) -> PathBuf {
    chosen.map_or_else(registration::socket_path, Path::to_owned)
}

/// Attaches as `name`, ends the connection, and returns the daemon's answer. The region can still
/// be mapped, and keeps its last content.
pub(crate) fn attach(socket: &Path, name: &str) -> Result<Welcome, RegistrationError> {
    let connection = registration::connect(socket)?;
    // No thread sleeps on this region, so the kind of fence does not matter.
    registration::send_hello(connection.as_fd(), &Hello::new(name, Mode::Off, true))?;
    if !registration::wait_readable(connection.as_fd(), PATIENCE) {
        return Err(RegistrationError::NoAnswer);
    }
    registration::receive_reply(connection.as_fd())?.ok_or(RegistrationError::NoAnswer)
}
