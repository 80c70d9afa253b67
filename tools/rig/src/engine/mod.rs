//! The lab with the real engine: `laxity-engine` processes in the hosts' namespaces instead of workers that wait.
//!
//! A prefill host has a process that computes prompts and holds its share of the experts; a decode host one that takes requests and answers.
//! Experts' tokens, KV of layers and KV of shared prefixes go between hosts over the fabric, under each host's own `laxityd`, or, under `none`,
//! without. Clients ([`client`]) ask the decode hosts' endpoints, inside their namespaces, so that what they say takes no part of a link.
//!
//! ```text
//! runs: one by one (no daemon)  ──▶ each request's own TTFT with hosts and links to itself: times a factor it is its objective
//!       each policy             ──▶ the same requests at the same times; answers have to be those of the first run, token by token
//! ```
//!
//! Each run has processes of its own, whose caches are filled with the shared prefixes first, one after another and in the same order.

pub mod client;
pub mod config;
pub mod controller;
pub mod counts;
pub mod plan;
pub mod processes;

pub use config::ServingConfig;
