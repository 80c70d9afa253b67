//! What a trial of the coordinator needs and a cluster that lasts does not.
//!
//! [`certs`] makes a CA and certificates in a folder. [`load`] speaks to a coordinator as thousands
//! of daemons would, and measures how long an order takes.
#![forbid(unsafe_code)]

pub mod certs;
pub mod load;
