//! Request schedulers in virtual time: the decisions of `laxity-requests` over replicas whose iterations take as long as
//! the roofline says ([`crate::compute`]).
//!
//! `serving` in this crate simulates flows between prefill and decode units and takes requests in order; here it is the
//! other way round: iterations are simulated one by one, and what crosses the network ([`link`]) takes its bytes over its rate.
//! Both together: `docs/requests/together.md`.
//!
//! The parts: [`latency`] how long an iteration takes; [`workload`] who asks for what; [`cluster`] the driver; [`outcome`] what
//! came out, with objectives counted as `laxity-requests` says; [`reproduction`] a paper's claims beside what came out.

pub mod cluster;
pub mod hmas;
pub mod hyperflexis;
pub mod latency;
pub mod latency_file;
pub mod link;
pub mod maestro;
pub mod measured;
pub mod outcome;
pub mod predictor;
pub mod qoserve;
pub mod reproduction;
pub mod together;
pub mod workload;

use reproduction::{Options, Reproduction};

/// A paper whose claims can be checked here.
#[derive(Clone, Copy, Debug)]
pub struct Paper {
    /// What it is called on the command line.
    pub name: &'static str,
    /// What it is about, in a line.
    pub about: &'static str,
    /// Runs it.
    pub run: fn(&Options) -> Result<Reproduction, PaperError>,
}

/// A paper's claims could not be checked.
#[derive(Debug, thiserror::Error)]
pub enum PaperError {
    /// A recorded trace cannot be used.
    #[error(transparent)]
    Workload(#[from] crate::workload::WorkloadError),
    /// A GPU or model that is built in cannot be had.
    #[error("{0}")]
    BuiltIn(String),
}

/// All of them.
pub const PAPERS: &[Paper] = &[
    Paper {
        name: "qoserve",
        about: "QoServe: classes of service together on one replica",
        run: qoserve::reproduce,
    },
    Paper {
        name: "hyperflexis",
        about: "dispatch by what an instance can still promise, priorities to objectives, scaling",
        run: hyperflexis::reproduce,
    },
    Paper {
        name: "together",
        about: "Request scheduler × flow scheduler: no paper, what both are worth together",
        run: together::reproduce,
    },
    Paper {
        name: "maestro",
        about: "workflows of agents over few GPUs and many models",
        run: maestro::reproduce,
    },
];
