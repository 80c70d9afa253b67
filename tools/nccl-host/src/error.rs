//! Errors of a plugin and of its use, by what the caller can do about them.

use std::ffi::c_int;
use std::path::PathBuf;

use crate::abi::SYMBOL;
use crate::log;

/// Returns NCCL's name of an error code, `ncclResult_t`. It is never 0, which means success.
const fn name_of(result: c_int) -> &'static str {
    match result {
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

/// The reason why a plugin can't be used, or a call of it failed. After a failed call, drop the
/// communicator, as NCCL does.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error("{}: the dynamic linker refuses it: {reason}", path.display())]
    Load { path: PathBuf, reason: String },
    #[error("{}: no `{SYMBOL}` in it, so it is no net plugin for NCCL 2.30 or \
        later", path.display())]
    NoTable { path: PathBuf },
    #[error("{}: its `{SYMBOL}` has no `{function}`", path.display())]
    Incomplete { path: PathBuf, function: &'static str },
    #[error("the plugin's {function} failed with {} ({result}){said}", name_of(*result))]
    Call { function: &'static str, result: c_int, said: String },
    #[error("the plugin's {function} succeeded, but {problem}")]
    Broken { function: &'static str, problem: String },
    #[error("{0}")]
    Misuse(&'static str),
}

pub(crate) fn checked(function: &'static str, returned: c_int) -> Result<(), HostError> {
    if returned == 0 {
        return Ok(());
    }
    Err(HostError::Call { function, result: returned, said: log::warnings() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_function_and_nccls_own_name_of_the_result() {
        assert!(checked("isend", 0).is_ok());
        let text = checked("isend", 6).unwrap_err().to_string();
        assert!(text.starts_with("the plugin's isend failed with ncclRemoteError (6)"), "{text}");
    }
}
