//! The coordinator as others see it: over gRPC, over TLS, as a process, and with others of its kind.
#![forbid(unsafe_code)]

mod daemon;
mod elections;
mod operators;
mod process;
mod streams;
mod tls;
