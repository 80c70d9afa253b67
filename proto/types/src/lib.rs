//! Stages, ids, levels and marking: the one definition that all parts of Laxity share.
//!
//! The policy, the records of shared memory, the messages between hosts and the tools use these
//! types. Two files repeat the numbers, because other languages read them: `laxity.h` and Python's
//! `_stage.py`. `tests/tests/definitions.rs` compares both with this crate.
#![forbid(unsafe_code)]
#![no_std]

mod ids;
mod level;
pub mod marking;
mod stage;

pub use ids::{BatchId, FlowId, Layer, PeerId, PortId, RequestId};
pub use level::Level;
pub use stage::{Deadline, Stage};
