//! The inference engine of the lab: a decoder-only model computed for real, so that what Laxity
//! schedules is the traffic of an engine.
//!
//! * [`model`] and [`kv`]: the model over a paged KV cache with a prefix cache;
//! * [`schedule`]: which pieces of which sequences are computed next, decided behind one trait;
//! * [`engine`]: the loop that computes them;
//! * [`carry`]: bytes to other processes under permits of laxityd; [`apart`]: prefill, decode and
//!   experts in different processes;
//! * [`endpoint`]: the OpenAI-compatible endpoint;
//! * [`config`]: one TOML file for all of it.
#![forbid(unsafe_code)]

pub mod apart;
pub mod carry;
pub mod clock;
pub mod config;
pub mod endpoint;
pub mod engine;
pub mod kv;
pub mod model;
pub mod process;
pub mod schedule;
