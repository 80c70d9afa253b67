//! Tools for a trial of the coordinator, which a permanent cluster does not need.
//!
//! [`certs`] creates a CA and certificates in a folder. [`load`] connects to a coordinator as
//! thousands of daemons and measures how long an order takes.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "what a name of the laboratory says is not said twice")]

pub mod certs;
pub mod load;
