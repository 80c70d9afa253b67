//! `laxity-coordinator`: orders the work of a cluster's hosts (docs/coordinator.md).
//!
//! [`cluster`] decides and knows neither clock nor network; [`server`] is gRPC around it; [`web`]
//! is its page for people.
#![forbid(unsafe_code)]

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
