//! What an operator sees and what holds when a daemon has died.

#![allow(
    clippy::unwrap_used,
    reason = "a test that panics is a test that fails"
)]

mod support;

use std::os::fd::AsFd;

use laxity_shm::registration::{Hello, connect, receive_reply, send_hello, wait_readable};
use nix::sys::signal::Signal;
use support::{Laxityd, SMALL, SOON, eventually};

/// A client of another version, which is refused.
fn intrude(daemon: &Laxityd) {
    let socket = connect(&daemon.socket()).unwrap();
    let mut hello = Hello::new("old", laxity_client::Mode::Enforce, false);
    hello.version += 1;
    send_hello(socket.as_fd(), &hello).unwrap();
    assert!(wait_readable(socket.as_fd(), SOON));
    receive_reply(socket.as_fd()).unwrap_err();
}

#[test]
fn a_refusal_is_counted_at_once_and_is_a_warning() {
    let mut daemon = Laxityd::start(SMALL);
    intrude(&daemon);
    // Nothing else happens: no client, no request for a status.
    eventually("the metrics show it", || {
        (daemon.metric("laxity_refused_clients_total", "") == 1.0).then_some(())
    });
    let line = daemon.await_log("refused a client");
    assert!(line.contains("WARN") && line.contains("version"), "{line}");
    for _ in 0..5 {
        intrude(&daemon);
    }
    eventually("all are counted", || {
        (daemon.metric("laxity_refused_clients_total", "") == 6.0).then_some(())
    });
    let line = daemon.await_log("DEBUG refused a client");
    assert!(line.contains("version"), "{line}");
}

#[test]
fn a_bypass_outlasts_the_death_of_the_daemon_and_is_not_hidden() {
    let mut daemon = Laxityd::start(SMALL);
    let said = daemon.control().bypass(true).unwrap();
    assert!(said.contains("restart"), "{said}");
    daemon.signal(Signal::SIGKILL);
    daemon.end();
    let mut daemon = daemon.again();
    let line = daemon.await_log("bypass is still on");
    assert!(line.contains("WARN"), "{line}");
    assert!(daemon.status().bypass);
    assert!(!daemon.attach("worker").is_scheduled());
    assert_eq!(daemon.metric("laxity_bypass", ""), 1.0);

    daemon.control().bypass(false).unwrap();
    daemon.signal(Signal::SIGKILL);
    daemon.end();
    let daemon = daemon.again();
    assert!(!daemon.status().bypass);
    assert!(daemon.client("worker").is_scheduled());
}
