//! Errors that the plugin returns to NCCL.
//!
//! NCCL ends the job at any error. The plugin therefore returns an error only where waiting doesn't
//! help. "Not yet" is a null request. `test` returns a connection's fault.

use core::ffi::c_int;

use thiserror::Error;

/// The reason why a call failed. The text goes to NCCL's log: what failed, where, and what to do.
#[derive(Clone, Debug, Error)]
pub enum Fault {
    /// The operating system or a device refused.
    #[error("{0}")]
    System(String),
    #[error("{0}")]
    Argument(String),
    /// The job's configuration can't work.
    #[error("{0}")]
    Usage(String),
    /// The other end is gone, or is not this plugin.
    #[error("{0}")]
    Remote(String),
    #[error("{0}")]
    Internal(String),
}

/// The result of all functions that NCCL calls.
pub type Result<T> = core::result::Result<T, Fault>;

impl Fault {
    /// Returns NCCL's number of the fault (`ncclResult_t`).
    pub const fn code(&self) -> c_int {
        match self {
            Self::System(_) => 2,
            Self::Internal(_) => 3,
            Self::Argument(_) => 4,
            Self::Usage(_) => 5,
            Self::Remote(_) => 6,
        }
    }

    /// Returns the fault of a failed system call.
    pub(crate) fn system(what: &str, error: impl core::fmt::Display) -> Self {
        Self::System(format!("{what}: {error}"))
    }
}
