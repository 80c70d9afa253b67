//! Tests a daemon that has no file descriptors left between the moments when it bound its sockets
//! and when it serves. The file has one test, because the limit is the process's.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

#[path = "support/early.rs"]
mod early;

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use laxity_wire::ControlClient;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Returns the number of this process's threads, by an open `/proc/self/status`.
fn threads(status: &File) -> usize {
    let mut text = [0; 4096];
    let length = status.read_at(&mut text, 0).unwrap();
    let text = String::from_utf8_lossy(&text[..length]);
    let line = text.lines().find_map(|line| line.strip_prefix("Threads:"));
    line.and_then(|number| number.trim().parse().ok()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn descriptors_that_are_gone_before_the_daemon_serves_do_not_cost_its_status() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = early::bound(folder.path());
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let status = File::open("/proc/self/status").unwrap();
    let before = threads(&status);
    // The next descriptor would have this number.
    let next = File::open("/dev/null").unwrap().as_raw_fd();
    setrlimit(Resource::RLIMIT_NOFILE, u64::try_from(next).unwrap(), hard).unwrap();
    let serving = tokio::spawn(daemon.run());
    // The last of three threads, the scheduler's, starts just before the tasks.
    while threads(&status) < before + 3 && !serving.is_finished() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    let control = folder.path().join("control.sock");
    let asked = tokio::task::spawn_blocking(move || {
        ControlClient::connect(control, Duration::from_secs(60)).unwrap().status()
    });
    let answer = asked.await.unwrap();
    assert!(!serving.is_finished(), "the daemon runs");
    assert_eq!(answer.unwrap().clients.len(), 0);
}
