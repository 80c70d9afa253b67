//! What can go wrong between a host and its plugin, in terms of what to do.

use std::ffi::c_int;
use std::fmt;
use std::path::PathBuf;

use crate::abi::SYMBOL;
use crate::log;

/// `ncclResult_t`, as a plugin returns it; 0, success, is none of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResultCode(pub i32);

impl ResultCode {
    const fn name(self) -> &'static str {
        match self.0 {
            0 => "ncclSuccess",
            1 => "ncclUnhandledCudaError",
            2 => "ncclSystemError",
            3 => "ncclInternalError",
            4 => "ncclInvalidArgument",
            5 => "ncclInvalidUsage",
            6 => "ncclRemoteError",
            7 => "ncclInProgress",
            _ => "no result of NCCL's",
        }
    }
}

impl fmt::Display for ResultCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name(), self.0)
    }
}

/// Why a plugin can't be used, or a call of it failed. After a failed call, give up the
/// communicator: NCCL does.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The library could not be loaded. Name another file.
    #[error("{}: the dynamic linker refuses it: {reason}", path.display())]
    Load {
        /// The library.
        path: PathBuf,
        /// What the dynamic linker says.
        reason: String,
    },
    /// The library has no table. Name a plugin of NCCL 2.30 or later.
    #[error("{}: no `{SYMBOL}` in it, so it is no net plugin for NCCL 2.30 or \
        later", path.display())]
    NoTable {
        /// The library.
        path: PathBuf,
    },
    /// The table lacks a function that each plugin has to have.
    #[error("{}: its `{SYMBOL}` has no `{function}`", path.display())]
    Incomplete {
        /// The library.
        path: PathBuf,
        /// NCCL's name of the function.
        function: &'static str,
    },
    /// A function returned an error.
    #[error("the plugin's {function} failed with {result}{said}")]
    Call {
        /// NCCL's name of the function.
        function: &'static str,
        /// What it returned.
        result: ResultCode,
        /// What the plugin warned of last, each line behind a line break.
        said: String,
    },
    /// A function succeeded and did not say what it has to, which NCCL would not survive.
    #[error("the plugin's {function} succeeded, but {problem}")]
    Broken {
        /// NCCL's name of the function.
        function: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// The caller's mistake: memory that was registered with another communicator, or is too small.
    #[error("{0}")]
    Misuse(&'static str),
}

/// What a function returned, as a result.
pub(crate) fn checked(function: &'static str, returned: c_int) -> Result<(), HostError> {
    if returned == 0 {
        return Ok(());
    }
    Err(HostError::Call {
        function,
        result: ResultCode(returned),
        said: log::warnings(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_function_and_nccls_own_name_of_the_result() {
        assert!(checked("isend", 0).is_ok());
        let text = checked("isend", 6).unwrap_err().to_string();
        assert!(
            text.starts_with("the plugin's isend failed with ncclRemoteError (6)"),
            "{text}"
        );
    }
}
