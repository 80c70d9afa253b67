//! Asks the daemon's registration socket what a job would be told: the whole handshake of a client,
//! which is gone again a moment later.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use laxity_shm::layout::Mode;
use laxity_shm::registration::{self, Hello, RegistrationError};

/// How long the daemon may take. A job gives it 100 ms; a person can wait a little longer.
const PATIENCE: Duration = Duration::from_millis(1000);

/// Attaches as `name` and leaves.
///
/// # Errors
/// What a job would be told: nobody listens, the versions differ, this user is not admitted.
pub(crate) fn probe(socket: &Path, name: &str) -> Result<(), RegistrationError> {
    let connection = registration::connect(socket)?;
    // No thread of ours will ever sleep on the region, so neither kind of fence matters.
    registration::send_hello(connection.as_fd(), &Hello::new(name, Mode::Off, true))?;
    if !registration::wait_readable(connection.as_fd(), PATIENCE) {
        return Err(RegistrationError::NoAnswer);
    }
    registration::receive_reply(connection.as_fd())?.ok_or(RegistrationError::NoAnswer)?;
    Ok(())
}
