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

/// Runs tests of this program once more in a process with the stand-in.
#[allow(dead_code, reason = "the service levels have a program of their own")]
pub(crate) fn passes_over_rdma(tests: &[&str]) {
    passes_over(tests, &[]);
}

/// Does the same with more variables of the environment.
#[allow(dead_code, reason = "most tests need no other variables")]
pub(crate) fn passes_over(tests: &[&str], variables: &[(&str, &str)]) {
    let folder = tempfile::tempdir().expect("a folder");
    if !built(folder.path()) {
        return;
    }
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(tests)
        .arg("--exact")
        .envs([("LAXITY_NET", "verbs"), ("LAXITY_RMA", "1"), ("NCCL_SOCKET_IFNAME", "lo")])
        .env("LD_LIBRARY_PATH", folder.path())
        .envs(variables.iter().copied())
        .output()
        .expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains(&format!("{} passed", tests.len())), "{text}");
}
