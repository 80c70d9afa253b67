//! `liblaxity_nixl.so`: makes the transfers of NIXL wait for permits of `laxityd`, whatever the
//! language of the program. C++ calls `nixlAgent` itself. `libnixl_capi.so` (Rust, C) and the
//! Python bindings call the same symbols, so this library interposes those.
//!
//! ```text
//! program ── createXferReq, prepXferDlist + makeXferReq ──▶ exports.rs: bytes and direction (lists.rs)
//!         ── postXferReq ──▶ request.rs ── permitted at once ──▶ NIXL's own postXferReq
//!                                       └─ not yet: deferred, "in progress" for the program
//!         ── getXferStatus, or any other call of the agent ──▶ posts what is permitted by now
//! thread laxity-nixl (hub.rs) ── does the same for an agent that nobody calls
//! ```
//!
//! # Who posts what was deferred
//! An agent has no locks by default, so two threads must not be in it at once. The program's own
//! calls of the agent therefore post its deferred requests. A program that waits for something
//! else, such as a message of its peer, makes no such call and would wait for ever. The thread of
//! this library posts for an agent that was not called for [`agent::QUIET`]. It enters the agent
//! only if no thread is in it, and calls of the program wait until the thread has left
//! ([`agent::Agent::enter`]). All functions that read or change what belongs to an agent are
//! interposed for this reason. A question for a state changes it, too: if the peer is gone, NIXL
//! forgets its metadata.
//!
//! A request that has waited for [`request::PATIENCE`] is posted without a permit.
//!
//! # Posts with optional arguments
//! They belong to the caller and are a C++ type that this library does not copy. So such a post
//! waits inside the call, for [`request::ARGUMENTS_WAIT`] at most, and then goes without a permit.
//!
//! # What it must not change
//! Each post that is not dropped reaches NIXL once, with the program's arguments. The program gets
//! NIXL's answers; that of a deferred post comes from `getXferStatus`. Without a live daemon every
//! post goes at once.
//!
//! # Not asked twice
//! `laxity.nixl` (Python) waits for permits itself, and exempts its requests by
//! [`exports::laxity_nixl_exempt`]. Under `liblaxity.so`, which sees UCX's work requests if UCX
//! uses verbs, nothing is gated here, as in `laxity.nixl` ([`settings`]).
//!
//! Out of reach are transfers that a GPU starts, and a NIXL that is linked statically.
#![allow(missing_docs, reason = "programs preload this library, and nobody links it")]

mod abi;
mod agent;
pub mod exports;
mod hub;
mod lists;
mod real;
mod report;
mod request;
mod settings;
