//! Tests of a coordinator from outside: gRPC, TLS, processes, and several coordinators.
#![forbid(unsafe_code)]

mod check;
mod elections;
mod group;
mod history;
mod hostile;
mod netns;
mod operate;
mod operations;
mod operators;
mod process;
mod proxy;
mod saves;
mod streams;
#[path = "../support/mod.rs"]
mod support;
mod tls;
mod web;

use support::daemon;
