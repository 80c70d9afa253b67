//! `libnccl-net-laxity.so`: NCCL's network, under `laxityd`.
//!
//! ```text
//! NCCL ── ncclNetPlugin_v7 … v12 ──▶ abi/ ──▶ comm/   one connection, one direction; isend, irecv, test
//!   │                                           │ what is this send for?  context.rs
//!   └──── ncclProfiler_v3 … v6 ──▶ origin.rs ───┘ which collective is it?
//!                                               ▼
//!                                   arbiter.rs: a flow; may it go, in which class?
//!                                               ▼
//!                                   backend.rs: tcp/ or verbs/
//! ```
//!
//! A message that may not go yet is not taken: `isend` answers with a null request, and NCCL asks
//! again. Without a daemon everything goes at once. docs/nccl.md is for those who use it, and has
//! the argument that nothing can deadlock.

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
pub mod settings;
mod socket;
pub mod tcp;
pub mod verbs;
mod wanted;
