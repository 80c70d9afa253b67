//! `laxity-coordinator`: orders the work of a cluster's hosts (docs/coordinator.md).
//!
//! [`cluster`] decides and knows neither clock nor network; [`server`] is gRPC around it; [`load`] speaks to a
//! coordinator as thousands of daemons would; [`web`] is its page for people.
#![forbid(unsafe_code)]

pub mod certs;
pub mod cluster;
pub mod config;
mod election;
mod lead;
pub mod limits;
pub mod load;
mod metrics;
mod pace;
pub mod server;
pub mod tenants;
pub mod tls;
pub mod view;
pub mod web;
