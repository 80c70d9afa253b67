//! Cross-process tests: the real `laxityd`, the real `laxity`, real client processes.
//!
//! The binaries under test are built by `cargo build --workspace --bins` before the tests run
//! (`make test` does); `process::binary` finds them beside the test's own executable.

mod access;
mod ahead;
mod certificates;
mod circles;
mod command_line;
mod definitions;
mod docs;
mod faults;
mod hostile;
mod lab;
mod mooncake;
mod nccl;
mod process;
mod python;
mod sender;
mod setup;
mod sim;
mod sources;
mod tidy;
mod trace;
mod verbs;
