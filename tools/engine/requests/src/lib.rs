//! Request schedulers: what an inference engine computes next, and on which of its instances.
//!
//! Laxity schedules the traffic of an engine; this crate schedules the requests whose traffic that
//! is. As `laxity-policy` it is sans-IO: no clock, no thread, no random number that was not handed
//! in. Two drivers call it, virtual time (`tools/sim`) and a real engine (`tools/engine/serving`),
//! and identical events give identical decisions.
//!
//! # Tiers
//!
//! | tier | asks | trait |
//! |---|---|---|
//! | iteration | which tokens does this replica compute in its next forward pass? | [`iteration::Iteration`] |
//! | dispatch | which replica takes this request? | [`dispatch::Dispatch`] |
//! | scaling | how many replicas, in which role? | [`scaling::Scaling`] |
//! | workflow | which stage of which workflow runs where, with which weights resident? | [`workflow::Workflow`] |
//!
//! Nearly all policies of the first tier differ in four answers only (who is first, how many
//! tokens, who may start, who is given up). Those are a [`discipline::Discipline`];
//! [`replica::Replica`] is the mechanics that all share, and an [`iteration::Iteration`].
//!
//! # What holds for every policy
//!
//! **Time.** Nanoseconds of the driver's clock ([`Time`], [`Span`]). An iteration takes what the
//! driver says that it took, host work between two forward passes included: policies that plan
//! ahead ask a [`latency::Latency`], which counts the same.
//!
//! **KV blocks.** [`kv::Pool`] keeps the book, in blocks of a fixed number of tokens; a request
//! holds blocks for its whole prompt from the moment its first chunk is planned (as Sarathi and
//! vLLM's first engine; half-computed prompts that hold each other up are rare then), and one more
//! whenever its next token needs one. Whoever plans, pays: a [`iteration::Plan`] is charged when it
//! is made, so that the next plan can't spend the same blocks. Blocks are given back when a request
//! finishes, is cancelled, is dropped ([`iteration::Drop`]: what was computed is lost and is
//! computed again, tokens that were already given out as part of the prompt), or leaves for another
//! instance. A request that could never fit is refused on arrival.
//!
//! **Objectives.** [`request::Slo`]. A token is late if it comes after its own deadline, `arrival +
//! TTFT + n · TBT` (QoServe eq. 1 and 2: tokens that came early may be waited for longer), not if
//! the gap before it was long. A request meets its objective if no token that counts was late. What
//! never ends is late when its deadline passes; what is refused is late at once: nobody improves a
//! figure by turning work away.
#![forbid(unsafe_code)]

pub mod baseline;
pub mod discipline;
pub mod dispatch;
pub mod engine_policy;
pub mod hmas;
pub mod hyperflexis;
pub mod iteration;
pub mod job;
pub mod kv;
pub mod latency;
pub mod learned;
pub mod ledger;
pub mod maestro;
mod nanoseconds;
pub mod qoserve;
pub mod replica;
pub mod request;
pub mod scaling;
pub mod workflow;

pub use laxity_policy::{Span, Time};
