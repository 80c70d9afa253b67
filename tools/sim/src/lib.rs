//! The simulator: what a cluster of thousands of GPUs would do, in virtual time.
//!
//! The serving model makes the traffic, the network model carries it, and the decisions in between
//! are those of `laxity-policy`, the code that the daemon and the coordinator run. Everything is
//! deterministic: the same scenario and seed give the same outcome, byte for byte.
#![forbid(unsafe_code)]

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
