//! laxityd, the daemon of a host (architecture §3 to §5).
//!
//! One thread schedules ([`driver`]). A tokio thread serves registrations, operators, metrics and
//! signals ([`daemon`]), and sends commands to the scheduler through a [`mailbox`]. `laxity_policy`
//! makes the decisions, and `laxity_shm` defines the shared memory.
#![forbid(unsafe_code)]
#![allow(
    missing_docs,
    reason = "the library is the daemon's own, and its names say what most items are"
)]

pub mod clients;
pub mod config;
pub mod control;
pub mod coordinator;
pub mod daemon;
pub mod descriptors;
pub mod domains;
pub mod driver;
pub mod jobs;
pub mod mailbox;
pub mod metrics;
pub mod owner;
pub mod places;
pub mod pod;
pub mod refusals;
pub mod registration;
mod residual;
pub mod service;
pub mod sockets;
pub mod standby;
pub mod stats;
pub mod status;
mod treatments;
pub mod watched;
pub mod web;
