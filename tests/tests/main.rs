//! Tests with several processes: the real `laxityd`, the real `laxity` and real clients.
//!
//! `cargo build --workspace --bins` builds the programs before the tests run (`make test` does
//! this). `process::binary` finds them beside the test's executable.

mod access;
mod ahead;
mod campaign;
mod certificates;
mod circles;
mod command_line;
mod dashboard;
mod definitions;
mod docs;
mod faults;
mod hostile;
mod kubernetes;
mod lab;
mod mooncake;
mod names;
mod nccl;
mod nixl;
mod process;
mod python;
mod sender;
mod setup;
mod sim;
mod sources;
mod tidy;
mod trace;
mod upgrade;
mod verbs;
mod vllm;
