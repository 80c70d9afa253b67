//! The lab: real hosts on one machine, to measure the effect of scheduling.
//!
//! Each host is a network namespace with its own TCP stack, its own `laxityd` and one
//! `laxity-engine`, which computes a small model or only takes the time of it. Prefill hosts share
//! the experts. Decode hosts accept requests from clients in their namespaces, let prefill hosts
//! compute the prompts, and receive each layer's KV. [`lab::run`] plays the same arrivals under
//! several policies. It reports TTFT attainment and the counters of the fabric.
//!
//! ```text
//! laxity lab run ── lab::run ──▶ sandbox (user, mount, net, pid namespaces of its own)
//!                                └─ controller, pid 1: fabric, daemons, engines; one run at a time
//!                                     ├─ host0: laxityd ◀─lane─ laxity-engine ══ TCP, marked per class ══▶ switch
//!                                     └─ host1: …
//! ```
//!
//! Some or all requests are played one by one first. Each policy then gets the same requests at the
//! same times, and the answers have to be the same, token by token. Each run has its own processes.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "what a name of the laboratory says is not said twice")]

pub mod carriage;
mod child;
pub mod client;
pub mod collectives;
pub mod config;
pub mod controller;
pub mod coordinator;
pub mod counts;
pub mod daemons;
pub mod error;
pub mod fabric;
pub mod faults;
pub mod foreign;
pub mod ideal;
pub mod lab;
pub mod ledger;
pub mod message;
pub mod plan;
pub mod probe;
pub mod processes;
pub mod report;
pub mod sandbox;
pub mod serving;
pub mod trace;
pub mod vllm;
pub mod vm;
pub mod wiring;
pub mod workload;
