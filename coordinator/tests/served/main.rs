//! The coordinator as others see it: over gRPC, over TLS, as a process, and with others of its
//! kind.
#![forbid(unsafe_code)]

#[path = "../support/daemon.rs"]
mod daemon;
mod elections;
mod group;
mod netns;
mod operators;
mod partitions;
mod process;
mod streams;
mod tls;
