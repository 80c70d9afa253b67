//! The client library, which programs link to submit flows to laxityd.
//!
//! ```no_run
//! use laxity_client::{Client, Flow, Options, Stage};
//!
//! let client = Client::attach(Options::from_env()); // never fails
//! let mut lane = client.lane(); // one per thread
//! let flow = Flow { stage: Stage::KvReuse, bytes: 64 << 20, layer: 7, ..Flow::default() };
//! let mut ticket = lane.submit(&flow); // never blocks
//! while !ticket.is_done() {
//!     let permit = lane.wait(&mut ticket); // ends also when the daemon does
//!     // … send `permit.bytes` more, marked `permit.dscp` …
//!     lane.complete(&ticket, permit.bytes); // once they were delivered
//! }
//! ```
//!
//! Without a daemon every flow is permitted at once, in order, each byte once, and counted in
//! [`Stats::bypassed_bytes`]. The library starts no thread and handles no signal. After `fork` the
//! child attaches for itself.

mod client;
pub mod ffi;
pub mod hints;
mod lane;
mod lane_binding;
mod locks;
pub mod memory;
mod options;
mod owners;
pub mod peers;
pub mod scope;
mod session;
mod stats;
mod ticket;
mod wait;

pub use client::Client;
pub use lane::{Lane, Loan};
pub use laxity_shm::layout::{LEVEL_SCAVENGER, Mode};
pub use laxity_shm::marking::Verdict;
pub use laxity_shm::record::{Direction, Flow, Hint, Stage};
pub use options::Options;
pub use stats::Stats;
pub use ticket::{Permit, Ticket};
pub use wait::Sleep;
