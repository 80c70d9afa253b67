//! `liblaxity.so`: puts unmodified programs that use libibverbs under `laxityd`.
//!
//! ```text
//! program ── ibv_post_send, ibv_wr_* ──▶ post.rs, builder.rs
//!                │ one flow per work request (classify.rs), submitted in a lane (lanes.rs)
//!                ▼
//!            may it go? ── yes ──▶ the provider's own post_send
//!                │ no: a deep copy waits in its queue pair (queue_pair.rs)
//!                ▼
//!            a permit comes: the next poll_cq (poll.rs), the next post_send or the lane's pump thread
//!            (pump.rs) posts it
//! program ── ibv_poll_cq ──▶ poll.rs: completions are reported to the daemon on their way
//! ```
//!
//! # Where it hooks in
//! Posting and polling are inline functions that call through `ibv_context.ops`, so they can't be
//! interposed by name. The pointers are replaced instead (`contexts.rs`), as soon as a context is
//! seen:
//! 1. at the exported functions that programs link (`exports.rs`);
//! 2. at the boundary between libibverbs and its providers (`provider.rs`), for programs that open
//!    libibverbs with `dlopen` and bypass 1.
//!
//! The library links no RDMA library and finds the real functions when they are first called
//! (`laxity_job::symbol`). In a process that never opens a device, none of its code runs.
//!
//! # Exempt contexts
//! Libraries that ask the daemon themselves, like the NCCL plugin, exempt their contexts with
//! [`exempt::laxity_verbs_exempt`], which they look up at run time. Nothing is scheduled twice.
//!
//! # What it must not change
//! It keeps the order and the number of work requests in a queue pair, and the payload at the time
//! of the post. The program sees the same completions, and the same errors when its send queue is
//! full. Without a daemon, or with one that dies, every work request goes out at once.
#![allow(missing_docs, reason = "programs preload this library, and nobody links it")]

mod builder;
mod bundle;
mod class;
mod classify;
mod contexts;
pub mod exempt;
pub mod exports;
mod lanes;
mod list;
mod poll;
mod poll_ex;
mod post;
pub mod provider;
mod pump;
mod queue_pair;
mod report;
mod table;
mod work;

// The C interface of `laxity.h`. A program that links it finds this library's first, so its hints
// go to the library that schedules its work requests.
pub use laxity_client::ffi;
