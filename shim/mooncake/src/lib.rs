//! `liblaxity_mooncake.so`: puts programs that use Mooncake's Transfer Engine by its C interface
//! (`transfer_engine_c.h`) under `laxityd`.
//!
//! ```text
//! program ── submitTransfer ──▶ exports.rs ── which engine is it? (engines.rs)
//!               │ TCP and whatever else nobody sees: flows (runs.rs), which ask for leave (hub.rs)
//!               │     leave at once ──▶ Mooncake's own submitTransfer
//!               │     not yet: a copy waits in its batch (batch.rs); the thread of hub.rs hands it on
//!               │ RDMA under liblaxity.so: Mooncake gets it at once; what the thread's scope says is said of its memory
//!               ▼
//! program ── getTransferStatus ──▶ what waits here is waiting; the rest Mooncake answers
//! ```
//!
//! The Python package does the same for Mooncake's Python interface (`laxity.mooncake`), which
//! doesn't come this way: nothing is scheduled twice. Neither does a program that was linked
//! statically with Mooncake, or looks its functions up with `dlsym` in a handle of its own: then
//! nothing here runs, and its transfers go out as ever.
//!
//! # What it must not change
//! Each transfer reaches Mooncake once, in the order of its batch and
//! with its number there; Mooncake's answers are the program's. Without a daemon, or with one that
//! dies, everything goes at once.

mod abi;
mod batch;
mod calls;
mod engines;
pub mod exports;
mod hub;
mod real;
mod report;
mod runs;
pub mod tent;
