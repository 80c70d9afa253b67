//! The lab: real hosts on one machine, to show what scheduling is worth.
//!
//! Each host is a network namespace with its own TCP stack, its own `laxityd` and one worker
//! that replays its part of a model's prefill (MFS §2.2, §3.1): layers with their compute time,
//! KV-reuse fetches, all-to-alls that block the next layer, layer-wise hand-over to decode.
//! [`lab::run`] plays the same arrivals under several policies and reports TTFT attainment, and
//! what the fabric saw.
//!
//! ```text
//! laxity lab run ── lab::run ──▶ sandbox (user, mount, net, pid namespaces of its own)
//!                                └─ controller, pid 1: fabric, daemons, workers; one policy at a time
//!                                     ├─ host0: laxityd ◀─lane─ worker ══ TCP, marked per class ══▶ switch
//!                                     └─ host1: …
//! ```
//!
//! With the real engine ([`engine`]) the worker of a host is a `laxity-engine`, and clients of its
//! endpoint send the requests.
#![forbid(unsafe_code)]

pub mod carriage;
pub mod carrier;
pub mod config;
pub mod controller;
pub mod coordinator;
pub mod daemons;
pub mod engine;
pub mod fabric;
pub mod frame;
pub mod gate;
pub mod ideal;
pub mod lab;
pub mod ledger;
pub mod mailbox;
pub mod message;
pub mod plan;
pub mod prefill;
pub mod probe;
pub mod report;
pub mod sandbox;
pub mod trace;
pub mod transport;
pub mod vm;
pub mod wiring;
pub mod worker;
pub mod workload;
