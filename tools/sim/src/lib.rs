//! A simulator of clusters of thousands of GPUs in virtual time.
//!
//! The serving model creates the traffic and the network model carries it. `laxity-policy`, the
//! code that the daemon and the coordinator run, makes the decisions in between. Runs are
//! deterministic: the same scenario and seed give the same outcome, byte for byte.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "what a name of the laboratory says is not said twice")]

pub mod advise;
mod agenda;
pub mod compute;
pub mod model;
pub mod network;
pub mod outcome;
pub mod plan;
pub mod report;
pub mod reproduce;
pub mod requests;
pub mod run;
pub mod scenario;
mod serving;
pub mod workload;

pub use serving::{Inputs, SimError, check, simulate, simulate_with};
