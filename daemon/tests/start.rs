//! A daemon that cannot start: what it leaves alone, and what it says, once.

#![allow(
    clippy::unwrap_used,
    reason = "a test that panics is a test that fails"
)]

mod support;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use support::{Laxityd, SMALL, SOON};

/// Starts a daemon with these sockets and this metrics address, which it must refuse; what it says.
fn refused(socket: &Path, control: &Path, metrics: &str) -> String {
    let mut child = Command::new(env!("CARGO_BIN_EXE_laxityd"))
        .arg("--socket")
        .arg(socket)
        .arg("--control")
        .arg(control)
        .arg(format!("--set=metrics={metrics:?}"))
        .env_remove("LAXITY_CONFIG")
        .env_remove("LAXITY_LOG")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let end = Instant::now() + SOON;
    while child.try_wait().unwrap().is_none() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "it runs: {said}");
    said
}

#[test]
fn only_a_socket_that_was_left_behind_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (file, free) = (folder.path().join("precious"), folder.path().join("free"));
    let link = folder.path().join("link");
    std::os::unix::fs::symlink("nowhere", &link).unwrap();
    std::fs::write(&file, "data").unwrap();
    for (socket, control, what) in [
        (&file, &free, "a regular file"),
        (&free, &file, "a regular file"),
        (&link, &free, "a symbolic link"),
        (&free, &link, "a symbolic link"),
    ] {
        let said = refused(socket, control, "");
        assert!(
            said.contains(what) && said.contains("move it away"),
            "{said}"
        );
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "data");
        assert!(link.is_symlink() && !free.exists());
    }
    // What a killed daemon leaves is replaced.
    drop(std::os::unix::net::UnixListener::bind(&free).unwrap());
    let said = refused(&free, &file, "");
    assert!(said.contains("precious"), "{said}");
}

#[test]
fn what_is_taken_by_another_daemon_is_named_once_with_what_to_do() {
    let daemon = Laxityd::start(SMALL);
    let free = daemon.folder.path().join("free");
    let own = daemon.folder.path().join("control.sock");
    for (socket, control) in [(&daemon.socket(), &free), (&free, &own)] {
        let said = refused(socket, control, "");
        assert_eq!(said.matches("in use").count(), 1, "{said}");
        assert!(said.contains("stop it"), "{said}");
    }
    let address = format!("127.0.0.1:{}", daemon.metrics);
    let said = refused(&free, &daemon.folder.path().join("free2"), &address);
    assert_eq!(said.to_lowercase().matches("in use").count(), 1, "{said}");
    assert!(
        said.contains(&address) && !said.contains("FailedTo"),
        "{said}"
    );
}

#[test]
fn a_path_that_is_too_long_for_a_socket_is_said_to_be_that() {
    let folder = tempfile::tempdir().unwrap();
    let (free, long) = (
        folder.path().join("free"),
        folder.path().join("x".repeat(120)),
    );
    for (socket, control, key) in [(&long, &free, "socket"), (&free, &long, "control")] {
        let said = refused(socket, control, "");
        assert!(
            said.contains("at most 107 bytes") && said.contains(key),
            "{said}"
        );
        assert!(!said.contains("stop"), "{said}");
    }
}
