//! Errors when a workload is loaded.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    #[error("cannot read {path}: {cause}")]
    Read { path: PathBuf, cause: laxity_files::ReadError },
    #[error("{path}, line {line}: {problem}")]
    Line { path: PathBuf, line: u64, problem: String },
    #[error("{path}: holds no request")]
    Empty { path: PathBuf },
    #[error(
        "workload.arrivals is \"recorded\", but the recording's {requests} request(s) have the \
         same \
         time; use \"poisson\" or \"bursty\""
    )]
    NoTimes { requests: usize },
    #[error("no request arrives in {seconds} s at {rate} requests/s; raise either")]
    TooFew { seconds: f64, rate: f64 },
    #[error("the workload has more than {most} {what}; lower its rate, its seconds or its lengths")]
    TooMany { most: u64, what: &'static str },
}
