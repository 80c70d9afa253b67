//! Tests signals that arrive after the daemon bound its sockets and before it serves. The file has
//! one test, because a signal reaches all daemons of a process.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

use laxity_daemon::config::Config;
use laxity_daemon::daemon::Daemon;
use laxity_daemon::service::Source;
use laxity_daemon::sockets::PassedSockets;
use nix::sys::signal::{Signal, raise};

#[tokio::test]
async fn a_signal_that_comes_before_the_daemon_serves_does_not_kill_it() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("laxityd.sock");
    let set = |key: &str, name: &str| format!("{key}={:?}", folder.path().join(name));
    let sets =
        vec![set("socket", "laxityd.sock"), set("control", "control.sock"), "metrics=".to_owned()];
    let config = Config::load(None, &sets).unwrap();
    let daemon =
        Daemon::bind(config, Source { file: None, sets }, Box::new(|_| {}), PassedSockets::take())
            .unwrap();
    assert!(socket.exists(), "whoever looks for the daemon finds it");
    raise(Signal::SIGHUP).unwrap();
    raise(Signal::SIGTERM).unwrap();
    daemon.run().await.unwrap();
    assert!(!socket.exists(), "it stopped in order");
}
