//! Control-plane messages between laxityd and its operators.
//!
//! [`control`] is the local control socket: what `laxity status` and
//! `laxity bypass` speak. [`v1`] is what daemons, the coordinator and its operators say to each
//! other, by gRPC, and [`view`] its JSON form for operators. Nothing on the data path passes
//! through this crate; that is `laxity-shm`, and nothing that enters an application's process
//! depends on it.
#![forbid(unsafe_code)]

pub mod client;
pub mod control;
mod status;
pub mod trace;
pub mod v1;
pub mod view;

pub use client::{ControlClient, ControlError};
pub use control::{Envelope, Request, Response};
pub use status::{
    ClientStatus, ClusterStatus, DistrustedOwner, LevelStatus, PermittedBytes, PortStatus,
    RefusalStatus, SchedulerStatus, StageStatus, Status, Totals, WaitStatus,
};
