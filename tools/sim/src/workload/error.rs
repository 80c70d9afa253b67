//! Errors when a workload is loaded.

use std::path::PathBuf;

/// A workload that cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    /// The file cannot be opened or read. Check the path, and whether the file is complete.
    #[error("cannot read {path}: {cause}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Cause of the error. Not a `source`, because the text contains it.
        cause: laxity_files::ReadError,
    },
    /// A line does not have the expected format. Correct or remove it, or set the right `source`.
    #[error("{path}, line {line}: {problem}")]
    Line {
        /// Path of the file.
        path: PathBuf,
        /// Line number, counted from 1.
        line: u64,
        /// Field with its value and the expected value.
        problem: String,
    },
    /// The file has no request.
    #[error("{path}: holds no request")]
    Empty {
        /// Path of the file.
        path: PathBuf,
    },
    /// `arrivals = "recorded"` with a recording in which all requests have the same time.
    #[error(
        "workload.arrivals is \"recorded\", but the recording's {requests} request(s) have the \
         same \
         time; use \"poisson\" or \"bursty\""
    )]
    NoTimes {
        /// Number of requests in the recording.
        requests: usize,
    },
    /// No request arrives in the simulated time.
    #[error("no request arrives in {seconds} s at {rate} requests/s; raise either")]
    TooFew {
        /// Simulated time (`workload.seconds`), in seconds.
        seconds: f64,
        /// Arrivals per second in the whole cluster.
        rate: f64,
    },
    /// The workload would need too much memory.
    #[error("the workload has more than {most} {what}; lower its rate, its seconds or its lengths")]
    TooMany {
        /// Largest number that is allowed.
        most: u64,
        /// Name of the counted things in the message.
        what: &'static str,
    },
}
