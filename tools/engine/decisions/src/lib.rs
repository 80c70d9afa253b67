//! Carries the questions of H-MAS' Meta controller to a service outside, and its answers back
//! (H-MAS Appendix C.2 "LLM-based selector").
//!
//! [`laxity_requests::hmas::meta::external`] makes the question and checks the answer, without I/O.
//! Here is the I/O: [`Client`] asks an OpenAI-style endpoint (`POST /v1/chat/completions`) once,
//! within a time; [`Carrier`] is a thread that does so for whatever is in a mailbox. Nobody waits
//! for either: a replica goes on with what it has, and where no answer or none of use came, its
//! rules decide. So a failure is told and counted ([`Counts`]), and nothing is tried twice: the
//! next question comes after `ΔT`, with a newer view.
//!
//! Plain HTTP only. The service is one of the cluster's own (vLLM, SGLang, the engine of this
//! workspace), or a proxy on this host that speaks TLS to one outside.

#![forbid(unsafe_code)]

mod carrier;
mod client;
mod counts;
mod endpoint;

pub use carrier::Carrier;
pub use client::{Client, Failure};
pub use counts::Counts;
pub use endpoint::{BadEndpoint, Endpoint};
