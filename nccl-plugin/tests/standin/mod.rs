//! A stand-in for libibverbs, which is built when a test needs it.

use std::path::Path;
use std::process::Command;

use laxity_tests::{Need, skip};

/// Builds the stand-in and its program. Returns false if this machine has no header of libibverbs.
pub(crate) fn built(folder: &Path) -> bool {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/standin/build.sh");
    let status = Command::new("sh").arg(script).current_dir(folder).status().expect("sh runs");
    if status.code() == Some(77) {
        skip(Need::Machine, "no infiniband/verbs.h, which is in libibverbs-dev");
        return false;
    }
    assert!(status.success(), "the stand-in can be built");
    true
}
