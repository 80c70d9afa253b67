//! Tests of the users that may attach, as the kernel reports them.

use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use laxity_shm::layout::Mode;
use laxity_shm::registration::{self, Hello, Reason, RegistrationError};
use laxity_tests::{Need, skip};

use crate::process::{Daemon, child, role, wait_bounded};

const TRIES: usize = 50;

fn answer(socket: &std::path::Path) -> Result<(), RegistrationError> {
    let socket = registration::connect(socket)?;
    let hello = Hello::new("somebody", Mode::Enforce, false);
    registration::send_hello(socket.as_fd(), &hello)?;
    loop {
        let answered = registration::wait_readable(socket.as_fd(), Duration::from_secs(10));
        assert!(answered, "no answer");
        if registration::receive_reply(socket.as_fd())?.is_some() {
            return Ok(());
        }
    }
}

/// The part of a child process: a user who is not admitted. It is not a test by itself.
#[test]
fn stranger_role() {
    if role().as_deref() != Some("stranger") {
        return;
    }
    let user = nix::unistd::Uid::from_raw(54_321);
    nix::unistd::setresuid(user, user, user).expect("root gives up being root");
    let socket = PathBuf::from(std::env::var_os("SOCKET").expect("SOCKET"));
    for _ in 0..TRIES {
        match answer(&socket) {
            Err(RegistrationError::Rejected { reason, .. }) => {
                assert_eq!(reason, Reason::Forbidden);
            }
            other => panic!("not refused, but {other:?}"),
        }
    }
}

#[test]
fn who_is_not_admitted_is_told_so_each_time() {
    if !nix::unistd::geteuid().is_root() {
        return skip(Need::Machine, "only root can become another user");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let all = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(folder.path(), all).expect("open to all");
    let daemon = Daemon::start(folder.path(), "");
    let socket = daemon.socket().display().to_string();
    let stranger = child("access::stranger_role", "stranger", &[("SOCKET", &socket)]);
    let (status, output) = wait_bounded(stranger);
    assert!(status.success(), "{output}");
}
