//! What the controller and its caller send each other: what to run, the progress, and what was
//! measured.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::carriage::Carriage;
use crate::client::Answer;
use crate::collectives::ExchangeLedger;
use crate::config::LabConfig;
use crate::coordinator::CoordinatorRecord;
use crate::counts::Counts;
use crate::foreign::ForeignRecord;
use crate::plan::Asked;
use crate::probe::Tools;
use crate::vllm::restart::RestartRecord;
use crate::wiring::LinkRecord;

/// The first message of the caller. The caller keeps its end of the pipe open while it lives.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LabSpec {
    pub config: LabConfig,
    pub asked: Vec<Asked>,
    pub alone: Vec<Asked>,
    pub tools: Tools,
}

/// A message from the controller to the caller.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Event {
    Progress {
        /// Index of the run, from 0.
        run: usize,
        finished: usize,
        /// Seconds since time zero of the run.
        elapsed_s: f64,
    },
    Measured(Box<RunRecord>),
    Failed(String),
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    pub policy: String,
    /// Time zero, as CLOCK_MONOTONIC in ns.
    pub begin_ns: u64,
    /// Time of the last answer, or when the other requests were given up, as CLOCK_MONOTONIC in ns.
    pub end_ns: u64,
    /// Answers to the requests. Requests that were given up are missing.
    pub answers: Vec<Answer>,
    /// Time of the first token of each request that was given up after it, by number, as
    /// CLOCK_MONOTONIC in ns.
    pub firsts: BTreeMap<u64, u64>,
    pub counts: Vec<Counts>,
    pub links: Vec<LinkRecord>,
    pub daemon_restarts: u32,
    /// The death of a prefill host's vLLM, if it was killed.
    pub restart: Option<RestartRecord>,
    pub carriage: Option<Carriage>,
    pub exchanged: Option<ExchangeLedger>,
    /// Counters of the daemons about the coordinator at the end, if there was one.
    pub coordinator: Option<CoordinatorRecord>,
    pub foreign: Option<ForeignRecord>,
    /// Whether the kernel kept its own socket buffers at some host.
    pub buffers_unbounded: bool,
    /// Average number of busy processors of the machine since the clients started.
    pub busy_cores: f64,
    /// The part of `busy_cores` that is the lab's own processes.
    pub lab_cores: f64,
}
