//! What goes wrong, as NCCL is told of it.
//!
//! NCCL takes any error for the end of the job, so only what can't be waited out is one: "not yet"
//! is a null request, and whatever happens to a connection that has requests in flight is told by
//! `test`.

use core::ffi::c_int;

use thiserror::Error;

/// Why a call failed. The text says what, where, and what to do; it goes to NCCL's log.
#[derive(Clone, Debug, Error)]
pub enum Fault {
    /// The operating system or a device refused.
    #[error("{0}")]
    System(String),
    /// NCCL, or what it passes on, makes no sense here.
    #[error("{0}")]
    Argument(String),
    /// The job is set up in a way that can't work.
    #[error("{0}")]
    Usage(String),
    /// The other end is gone, or is something else.
    #[error("{0}")]
    Remote(String),
    /// A bug here.
    #[error("{0}")]
    Internal(String),
}

/// The result of all that NCCL calls.
pub type Result<T> = core::result::Result<T, Fault>;

impl Fault {
    /// NCCL's number for it (`ncclResult_t`).
    #[must_use]
    pub const fn code(&self) -> c_int {
        match self {
            Self::System(_) => 2,
            Self::Internal(_) => 3,
            Self::Argument(_) => 4,
            Self::Usage(_) => 5,
            Self::Remote(_) => 6,
        }
    }

    /// Of a refused system call.
    pub(crate) fn system(what: &str, error: impl core::fmt::Display) -> Self {
        Self::System(format!("{what}: {error}"))
    }
}
