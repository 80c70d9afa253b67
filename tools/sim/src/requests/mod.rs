//! Request schedulers in virtual time: `laxity-requests` decides for replicas whose iterations take
//! the time of the roofline ([`crate::compute`]).
//!
//! The module `serving` simulates flows between units in detail. This module simulates iterations
//! in detail, and a network transfer ([`link`]) takes its bytes divided by its rate.
//! `docs/requests/together.md` describes both together.
//!
//! [`latency`] has iteration times, [`workload`] requests, [`cluster`] the driver, and [`outcome`]
//! results. [`reproduction`] compares claims of papers with [`measurements`] of runs.

pub mod cluster;
pub mod hmas;
pub mod hyperflexis;
pub mod latency;
pub mod link;
pub mod maestro;
mod measurements;
pub mod outcome;
pub mod qoserve;
pub mod reproduction;
pub mod workload;

#[derive(Debug, thiserror::Error)]
pub enum PaperError {
    #[error(transparent)]
    Workload(#[from] crate::workload::WorkloadError),
    #[error(transparent)]
    Claim(#[from] crate::reproduce::runner::ClaimError),
    #[error(transparent)]
    File(#[from] crate::model::FileError),
    #[error("{0}")]
    BuiltIn(String),
}
