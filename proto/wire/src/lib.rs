//! Control-plane messages of laxityd, the coordinator and operators.
//!
//! [`control`] is the protocol of the local control socket, for tools like `laxity status`. [`v1`]
//! has the gRPC messages of daemons, the coordinator and its operators, and [`view`] their JSON
//! form. [`compare`] judges the hosts of a cluster, for `laxity doctor --cluster` and the
//! coordinator's page. The data path uses `laxity-shm` instead, and no library that is loaded into
//! applications depends on this crate.
#![forbid(unsafe_code)]

pub mod client;
pub mod compare;
pub mod control;
pub mod explain;
pub mod finding;
pub mod sentences;
mod status;
pub mod trace;
pub mod v1;
pub mod view;

pub use client::{ControlClient, ControlError};
pub use control::{Envelope, Request, Response};
pub use status::{
    AheadStatus, ClientStatus, ClusterStatus, DistrustedOwner, LevelStatus, OperatorChange,
    PermittedBytes, PodStatus, PortStatus, RefusalStatus, SchedulerStatus, StageStatus, Status,
    Totals, WaitStatus, WouldStatus,
};
