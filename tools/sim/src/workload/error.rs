//! What can be wrong with a workload, said so that whoever wrote the plan can put it right.

use std::path::PathBuf;

/// A workload that cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    /// The file cannot be opened or read: check the path, and whether it was copied whole.
    #[error("cannot read {path}: {cause}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why. Not a source: the text says it.
        cause: laxity_files::ReadError,
    },
    /// A line is not of the format: correct it, leave it out, or name the right `source`.
    #[error("{path}, line {line}: {problem}")]
    Line {
        /// Which file.
        path: PathBuf,
        /// Which line, from 1.
        line: u64,
        /// Which field, what was found and what was expected.
        problem: String,
    },
    /// The file holds no request.
    #[error("{path}: holds no request")]
    Empty {
        /// Which file.
        path: PathBuf,
    },
    /// `arrivals = "recorded"` with a recording in which all requests have the same time.
    #[error(
        "workload.arrivals is \"recorded\", but the recording's {requests} request(s) have the \
         same \
         time; use \"poisson\" or \"bursty\""
    )]
    NoTimes {
        /// Requests of the recording.
        requests: usize,
    },
    /// Nothing arrives in the time that is simulated.
    #[error("no request arrives in {seconds} s at {rate} requests/s; raise either")]
    TooFew {
        /// `workload.seconds`.
        seconds: f64,
        /// Arrivals per second in the whole cluster.
        rate: f64,
    },
    /// More than memory should be spent on.
    #[error("the workload has more than {most} {what}; lower its rate, its seconds or its lengths")]
    TooMany {
        /// The most that is allowed.
        most: u64,
        /// Of what.
        what: &'static str,
    },
}
