//! `laxity-coordinator`: orders the work of a cluster's hosts (docs/coordinator.md).
//!
//! [`cluster`] makes all decisions, without clock and network. [`server`] serves it over gRPC, and
//! [`web`] serves its web page.
#![forbid(unsafe_code)]
#![allow(
    missing_docs,
    reason = "the library is the coordinator's own, and its names say what most items are"
)]

pub mod cluster;
pub mod config;
mod election;
mod lead;
pub mod limits;
mod metrics;
mod nonsense;
mod pace;
pub mod server;
mod shared;
pub mod tenants;
pub mod tls;
pub mod web;
