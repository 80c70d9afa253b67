//! The inference engine of the lab. It computes a decoder-only model for real, so Laxity schedules
//! the traffic of a real engine.
//!
//! * [`model`] and [`kv`]: the model over a paged KV cache with a prefix cache;
//! * [`schedule`]: the trait and the schedulers that decide which tokens of which sequences are
//!   computed next;
//! * [`engine`]: the loop that computes what the scheduler decided;
//! * [`carry`]: transfers to other processes under permits of laxityd;
//! * [`apart`]: prefill, decode and experts in different processes;
//! * [`endpoint`]: the OpenAI-compatible endpoint;
//! * [`config`]: the configuration, which is one TOML file.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "what a name of the laboratory says is not said twice")]

pub mod apart;
pub mod carry;
pub mod clock;
pub mod config;
pub mod endpoint;
pub mod engine;
pub mod error;
pub mod kv;
pub mod model;
pub mod process;
pub mod schedule;
