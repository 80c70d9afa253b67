//! `liblaxity_mooncake.so`: puts programs that use Mooncake's Transfer Engine by its C interface
//! (`transfer_engine_c.h`) under `laxityd`.
//!
//! ```text
//! program ── submitTransfer ──▶ exports.rs ── which engine is it? (engines.rs)
//!               │ TCP and all that no other library sees: flows (runs.rs) need permits (hub.rs)
//!               │     permitted at once ──▶ Mooncake's own submitTransfer
//!               │     not yet: a copy waits in its batch (batch.rs); the thread of hub.rs hands it on
//!               │ RDMA under liblaxity.so: goes at once; its memory gets the thread's scope
//!               ▼
//! program ── getTransferStatus ──▶ waiting here: "waiting"; otherwise Mooncake's answer
//! ```
//!
//! The Python package does the same for Mooncake's Python interface (`laxity.mooncake`), which
//! doesn't use this library, so nothing is scheduled twice. A program that is linked statically
//! with Mooncake, or finds its functions with `dlsym` in a handle of its own, doesn't use this
//! library either. Its transfers go out unscheduled.
//!
//! # What it must not change
//! Each transfer reaches Mooncake once, in the order of its batch and with its number there. The
//! program gets Mooncake's answers. Without a live daemon, every transfer goes at once.
#![allow(missing_docs, reason = "programs preload this library, and nobody links it")]

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
