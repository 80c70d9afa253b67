//! laxityd, the per-host scheduler: architecture §3 to §5.
//!
//! One thread schedules ([`driver`]); everything else (registration, operators, metrics, signals)
//! runs on one tokio thread beside it ([`daemon`]) and speaks with it through a [`mailbox`].
//! Decisions are `laxity_policy`'s, bytes that cross a process boundary `laxity_shm`'s.
#![forbid(unsafe_code)]

pub mod clients;
pub mod config;
pub mod control;
pub mod coordinator;
pub mod daemon;
pub mod descriptors;
pub mod driver;
pub mod mailbox;
pub mod metrics;
pub mod owner;
pub mod places;
pub mod refusals;
pub mod registration;
pub mod service;
pub mod sockets;
pub mod stats;
pub mod status;
pub mod watched;
