//! `libnccl-net-laxity.so`: a network plugin by which `laxityd` schedules NCCL's transfers.
//!
//! ```text
//! NCCL ── ncclNetPlugin_v7 … v12 ──▶ abi/ ──▶ comm/   one connection, one direction; isend, irecv, test
//!   │                                           │ what is this send for?  context.rs
//!   └──── ncclProfiler_v3 … v6 ──▶ origin.rs ───┘ which collective is it?
//!                                               ▼
//!                                   arbiter.rs: a flow; may it go, in which class?
//!                                               ▼
//!                                   backend.rs: tcp/ or verbs/
//!
//! NCCL ── ncclRmaPlugin_v14 … v16 ──▶ rma/   one-sided operations of a group of ranks
//! ```
//!
//! A message that has no permit yet is not taken: `isend` returns a null request, and NCCL asks
//! again. Without a daemon, every message goes at once. docs/nccl.md is the user's guide, and shows
//! that nothing can deadlock.
#![allow(missing_docs, reason = "NCCL loads a table of functions, and nobody links this library")]

pub mod abi;
pub mod arbiter;
pub mod backend;
pub mod comm;
pub mod context;
pub mod fault;
pub mod handle;
pub mod interfaces;
mod log;
pub mod origin;
pub mod plugin;
pub mod report;
pub mod rma;
pub mod settings;
mod socket;
pub mod tcp;
pub mod verbs;
mod wanted;
