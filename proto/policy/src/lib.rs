//! Laxity's scheduling decisions: which bytes may go on the wire now, and at which level.
//!
//! Everything in this crate is a pure state machine. The caller passes the time in as an argument
//! and receives the next wake-up time as a value, so the daemon, the coordinator and the simulator
//! run the same code:
//!
//! * `link` arbitrates one port (one direction of one NIC): MFS §4.3, §4.4.1, §4.5;
//! * `domains` divides a port between users who do not trust each other;
//! * `admission` orders batches and prunes doomed requests: MFS §4.4.2 and Appendix B;
//! * `residual` finds the capacity of a port that foreign traffic leaves.
//!
//! The crate uses no clock, no I/O, no `unsafe` and no hash order. It depends on `laxity-types`
//! only. The same events at the same times give the same actions, bit for bit.
#![forbid(unsafe_code)]

mod baseline;
mod discipline;
mod laxity;
mod lookup;
mod mfs;
mod policies;
mod scavenger;

pub mod admission;
pub mod config;
pub mod domains;
pub mod event;
pub mod link;
pub mod mlu;
pub mod prune;
pub mod red;
pub mod residual;
pub mod rli;
pub mod rmlq;
pub mod time;

pub use config::{Granularity, LinkConfig, PolicyKind};
pub use domains::{DomainId, SharedLink};
pub use event::{Action, BatchSpec, Event, FlowSpec, Order};
pub use laxity_types::{BatchId, Deadline, FlowId, Layer, Level, PeerId, PortId, RequestId, Stage};
pub use link::{Link, LinkSnapshot, Permit, Tally};
pub use time::{Span, Time};
