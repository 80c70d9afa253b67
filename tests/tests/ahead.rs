//! What the preload library tells the daemon of small work requests, with a provider of verbs that does
//! nothing: no device, and every count exact.

use std::fs;
use std::path::Path;
use std::process::Command;

use laxity_wire::Status;

use crate::process::{Daemon, binary, eventually, wait_bounded};

const POSTS: u64 = 20_000;
const BYTES: u64 = 64;

/// Builds the provider and the program that posts to it.
fn build(folder: &Path) {
    let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/verbs/cost");
    let script = format!(
        "cc -O2 -shared -fPIC -o libibverbs.so.1 {sources}/null_provider.c \
           -Wl,-soname,libibverbs.so.1 -Wl,--version-script={sources}/null_provider.map && \
         cc -O2 -o post_cost {sources}/post_cost.c -L. -l:libibverbs.so.1 -Wl,-rpath,$PWD"
    );
    let mut shell = Command::new("sh");
    let status = shell.args(["-c", &script]).current_dir(folder).status();
    let status = status.expect("sh starts");
    assert!(status.success(), "the program for the test does not build");
}

/// Posts [`POSTS`] in `mode`; the library's report, and what the daemon knows once the program is gone.
fn post(mode: &str) -> (serde_json::Value, Status) {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    build(folder);
    let daemon = Daemon::start(folder, "");
    let report = folder.join("report");
    let child = Command::new(folder.join("post_cost"))
        .args([POSTS.to_string(), BYTES.to_string(), "1".into()])
        .env("LD_PRELOAD", binary("liblaxity.so"))
        .env("LAXITY_SOCKET", daemon.socket())
        .env("LAXITY_PROFILE", "perftest")
        .env("LAXITY_MODE", mode)
        .env("LAXITY_REPORT", &report)
        .env("LAXITY_STALL_MS", "60000")
        .spawn()
        .expect("the program starts");
    let (status, _) = wait_bounded(child);
    assert!(status.success(), "{status}");
    eventually("the daemon has read all that the program told", || {
        let totals = daemon.status().totals;
        totals.attachments == 1 && totals.attached_clients == 0
    });
    let line = fs::read_to_string(&report).expect("a report");
    (serde_json::from_str(&line).expect("JSON"), daemon.status())
}

fn count(report: &serde_json::Value, name: &str) -> u64 {
    report[name].as_u64().expect("a number")
}

#[test]
fn small_work_requests_on_an_idle_port_are_told_of_together_and_none_is_forgotten() {
    let (report, status) = post("enforce");
    assert_eq!(count(&report, "work_requests"), POSTS);
    assert_eq!(count(&report, "bytes"), POSTS * BYTES);
    assert_eq!(count(&report, "completions"), POSTS);
    assert_eq!(count(&report, "scheduled_bytes"), POSTS * BYTES);
    assert_eq!(count(&report, "bypassed_bytes"), 0);
    assert_eq!(status.totals.permitted_bytes, POSTS * BYTES);
    assert_eq!(status.totals.completed_bytes, POSTS * BYTES);
    let flows = status.totals.flows;
    assert!(
        (POSTS / 256..=POSTS / 64).contains(&flows),
        "{flows} flows for {POSTS} work requests, of which 256 may go between two"
    );
}

#[test]
fn a_daemon_that_observes_is_told_of_each() {
    let (report, status) = post("observe");
    assert_eq!(count(&report, "observed_bytes"), POSTS * BYTES);
    assert_eq!(status.totals.flows, POSTS);
}
