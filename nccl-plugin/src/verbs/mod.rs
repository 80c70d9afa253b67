//! RDMA. Not there yet: `open` says so, and sockets are used.

use crate::backend::Backend;
use crate::settings::Settings;

/// The RDMA devices of this host.
///
/// # Errors
/// Why there are none.
pub(crate) fn open(_settings: &Settings) -> Result<Box<dyn Backend>, String> {
    Err(String::from("this build has no RDMA"))
}
