//! The lab with `laxity-engine`, which computes a model (`real`) or takes the time of computing
//! (`timed`).
//!
//! A prefill host has a process that computes prompts and holds its share of the experts; a decode
//! host one that takes requests and answers. Experts' tokens, KV of layers and KV of shared
//! prefixes go between hosts over the fabric, under each host's own `laxityd`, or, under `none`,
//! without. Clients ([`client`]) ask the decode hosts' endpoints, inside their namespaces, so that
//! what they say takes no part of a link.
//!
//! ```text
//! runs: one by one (no daemon)  ──▶ each request's own TTFT with hosts and links to itself: times a factor it is its objective
//!       each policy             ──▶ the same requests at the same times; answers have to be those of the first run, token by token
//! ```
//!
//! Each run has processes of its own. The shared prefixes are in their caches first: computed one
//! after another in the same order, or, of a timed engine, there from the start.

pub mod client;
pub mod config;
pub mod controller;
pub mod counts;
pub mod plan;
pub mod processes;

pub use config::{ServingConfig, TimedConfig};
