//! Request schedulers in virtual time: the decisions of `laxity-requests` over replicas whose
//! iterations take as long as the roofline says ([`crate::compute`]).
//!
//! `serving` in this crate simulates flows between prefill and decode units and takes requests in
//! order; here it is the other way round: iterations are simulated one by one, and what crosses the
//! network ([`link`]) takes its bytes over its rate. Both together: `docs/requests/together.md`.
//!
//! The parts: [`latency`] how long an iteration takes; [`workload`] who asks for what; [`cluster`]
//! the driver; [`outcome`] what came out, with objectives counted as `laxity-requests` says;
//! [`reproduction`] a paper's claims beside what came out; [`measurements`] what runs gave.

pub mod cluster;
pub mod hmas;
pub mod hyperflexis;
pub mod latency;
pub mod latency_file;
pub mod link;
pub mod maestro;
pub mod measured;
mod measurements;
pub mod outcome;
pub mod predictor;
pub mod qoserve;
pub mod reproduction;
pub mod together;
pub mod workload;

/// A paper's claims could not be checked.
#[derive(Debug, thiserror::Error)]
pub enum PaperError {
    /// A recorded trace cannot be used.
    #[error(transparent)]
    Workload(#[from] crate::workload::WorkloadError),
    /// A claim cannot be evaluated.
    #[error(transparent)]
    Claim(#[from] crate::reproduce::runner::ClaimError),
    /// A GPU or model that is built in cannot be had.
    #[error("{0}")]
    BuiltIn(String),
}
