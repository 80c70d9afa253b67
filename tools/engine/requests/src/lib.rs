//! Request schedulers. They decide what an inference engine computes next and on which instance.
//!
//! Laxity's daemon schedules the traffic of an engine. This crate schedules the requests that cause
//! the traffic. Like `laxity-policy`, the crate does no IO: the driver passes in the time and all
//! random numbers. Two drivers call it: the simulator (`tools/sim`) and a real engine
//! (`tools/engine/serving`). The same events give the same decisions.
//!
//! # Tiers
//!
//! | tier | question | trait |
//! |---|---|---|
//! | iteration | which tokens does this replica compute in its next forward pass? | [`discipline::Discipline`] |
//! | dispatch | which replica takes this request? | [`dispatch::Dispatch`] |
//! | scaling | how many replicas, in which role? | [`scaling::Scaling`] |
//! | workflow | which stage of which workflow runs where, with which weights resident? | [`maestro::Scheduler`] |
//!
//! Most policies of the iteration tier differ in four answers only: which request is first, how
//! many tokens are computed, which request may start, and which request is relegated. A policy
//! gives these answers as a [`discipline::Discipline`]. [`replica::Replica`] implements the rest.
//!
//! # Rules for every policy
//!
//! **Time.** All times are nanoseconds of the driver's clock ([`Time`], [`Span`]). The driver
//! reports the duration of each iteration, which includes host work between two forward passes.
//! Policies that plan ahead use a [`latency::Latency`], which includes the same host work.
//!
//! **KV blocks.** [`kv::Pool`] counts blocks of a fixed number of tokens. A request gets blocks for
//! its whole prompt when its first chunk is planned, as in Sarathi and in vLLM's first engine.
//! Afterwards it gets one more block whenever its next token needs one. A [`iteration::Plan`] is
//! charged when it is made, so that the next plan can't use the same blocks. A request returns its
//! blocks when it finishes, is cancelled, moves to another instance, or is dropped
//! ([`iteration::Dropped`]). A dropped request computes everything again, with its generated tokens
//! as part of the prompt. A request that is larger than the pool is refused on arrival.
//!
//! **Objectives.** Each request has a [`request::Slo`]. A token is late if it comes after its own
//! deadline, `arrival + TTFT + n · TBT` (QoServe eq. 1 and 2). A long gap between two tokens alone
//! doesn't make a token late. A request meets its objective if none of its tokens is late. A
//! request that never ends is late at its deadline. A refused request is late at once, so that
//! refusals can't improve a policy's result.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "what a name of the laboratory says is not said twice")]

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
mod least_squares;
pub mod ledger;
pub mod maestro;
pub mod qoserve;
pub mod replica;
pub mod request;
pub mod scaling;
pub mod trees;
mod window;
pub mod workflow;

pub use laxity_policy::{Span, Time};
