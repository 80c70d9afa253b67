//! Tests signals that arrive after the daemon bound its sockets and before it serves. The file has
//! one test, because a signal reaches all daemons of a process.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

#[path = "support/early.rs"]
mod early;

use nix::sys::signal::{Signal, raise};

#[tokio::test]
async fn a_signal_that_comes_before_the_daemon_serves_does_not_kill_it() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("laxityd.sock");
    let daemon = early::bound(folder.path());
    assert!(socket.exists(), "whoever looks for the daemon finds it");
    raise(Signal::SIGHUP).unwrap();
    raise(Signal::SIGTERM).unwrap();
    daemon.run().await.unwrap();
    assert!(!socket.exists(), "it stopped in order");
}
