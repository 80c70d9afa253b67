//! Tests of a coordinator from outside: gRPC, TLS, processes, and several coordinators.
#![forbid(unsafe_code)]

#[path = "../support/daemon.rs"]
mod daemon;
mod elections;
mod group;
mod history;
mod netns;
mod operate;
mod operators;
mod partitions;
mod process;
mod proxy;
mod saves;
mod streams;
mod tls;
