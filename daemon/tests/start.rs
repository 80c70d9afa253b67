//! Tests of a daemon that can't start: its error message, and the files that it leaves alone.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

mod support;

use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use laxity_daemon::sockets;
use nix::sys::signal::Signal;
use support::{Laxityd, PLAYS, Role, SMALL, SOON, STRANGER, is_root, role, until};

/// Starts a daemon with these sockets and this metrics address.
fn spawn(socket: &Path, control: &Path, metrics: &str) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_laxityd"));
    command.arg("--socket").arg(socket).arg("--control").arg(control);
    command.arg(format!("--set=metrics={metrics:?}")).stderr(Stdio::piped());
    command.env_remove("LAXITY_CONFIG").env_remove("LAXITY_LOG").spawn().unwrap()
}

/// Returns the error of a daemon that does not start.
fn refused(socket: &Path, control: &Path, metrics: &str) -> String {
    let mut child = spawn(socket, control, metrics);
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
        assert!(said.contains(what) && said.contains("move it away"), "{said}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "data");
        assert!(link.is_symlink() && !free.exists());
    }
    // The daemon replaces the socket of a killed daemon.
    drop(std::os::unix::net::UnixListener::bind(&free).unwrap());
    let said = refused(&free, &file, "");
    assert!(said.contains("precious"), "{said}");
}

#[test]
fn what_is_taken_by_another_daemon_is_named_once_with_what_to_do() {
    let daemon = Laxityd::start(SMALL);
    let free = daemon.folder.path().join("free");
    let own = daemon.folder.path().join("control.sock");
    let metrics = format!("127.0.0.1:{}", daemon.metrics);
    for (socket, control) in [(&daemon.socket(), &free), (&free, &own), (&daemon.socket(), &own)] {
        let said = refused(socket, control, &metrics);
        assert_eq!(said.matches("in use").count(), 1, "{said}");
        assert!(said.contains("another laxityd") && said.contains("stop it"), "{said}");
        assert!(!said.contains("metrics"), "{said}");
    }
}

#[test]
fn a_taken_metrics_address_stops_no_daemon_and_is_served_once_it_is_free() {
    // Nobody gets a port below the range of the kernel's choice by chance while it is free.
    let first = 10_000 + std::process::id() as u16 % 20_000;
    let mut ports = (first..32_000).map(|port| std::net::TcpListener::bind(("127.0.0.1", port)));
    let taken = ports.find_map(Result::ok).expect("a free port");
    let address = taken.local_addr().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let mut child = spawn(&folder.path().join("socket"), &control, &address.to_string());
    let problems = || {
        let client = laxity_wire::ControlClient::connect(&control, SOON);
        client.and_then(|mut client| client.status()).map(|status| status.problems)
    };
    until("it serves operators", || problems().is_ok());
    let told = problems().unwrap();
    assert!(told[0].contains(&format!("cannot serve metrics at {address}")), "{told:?}");
    drop(taken);
    until("it serves metrics", || std::net::TcpStream::connect(address).is_ok());
    until("and says so", || problems().is_ok_and(|told| told.is_empty()));
    let _ = child.kill();
    let said = String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap();
    assert!(said.contains(&format!("cannot serve metrics at {address}")), "{said}");
    assert!(said.contains("set another address"), "{said}");
}

#[test]
fn what_is_wrong_with_a_lock_is_said_of_the_lock() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, free) = (folder.path().join("socket"), folder.path().join("free"));
    std::fs::create_dir(folder.path().join("socket.lock")).unwrap();
    for (socket, control) in [(&socket, &free), (&free, &socket)] {
        let said = refused(socket, control, "");
        assert!(said.contains("its lock file") && said.contains("socket.lock"), "{said}");
    }
}

#[test]
fn too_low_a_limit_of_open_files_is_said_with_what_is_needed() {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new("sh")
        .args(["-c", "ulimit -n 60; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_laxityd")])
        .arg("--socket")
        .arg(folder.path().join("socket"))
        .arg("--control")
        .arg(folder.path().join("control"))
        .env_remove("LAXITY_CONFIG")
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{said}");
    assert!(
        said.contains("is 60") && said.contains("LimitNOFILE") && !said.contains("another path"),
        "{said}"
    );
}

/// Not a test by itself: the service's user binds both sockets in its own folder.
#[test]
fn service_role() {
    if role().is_none() {
        return;
    }
    let folder = PathBuf::from(std::env::var_os("FOLDER").unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _runtime = runtime.enter();
    let mut passed = sockets::PassedSockets::take();
    match sockets::bind_registration(&folder.join("laxityd.sock"), 0o666, &mut passed) {
        Err(error) => println!("{PLAYS}: {error}"),
        Ok(_first) => {
            let second = sockets::bind_control(&folder.join("control.sock"), 0o660, &mut passed);
            println!("{PLAYS}: {}", second.map_or_else(|e| e.to_string(), |_| "bound".into()));
        }
    }
}

/// Returns the result of starting the service in `folder`.
fn service(folder: &Path) -> String {
    let folder = folder.display().to_string();
    Role::start("service_role", "service", &[("FOLDER", folder)]).says.clone()
}

#[test]
fn a_daemon_that_root_started_by_hand_does_not_keep_the_service_from_starting() {
    if !is_root() {
        return;
    }
    let mut daemon = Laxityd::start(SMALL);
    daemon.signal(Signal::SIGTERM);
    daemon.end();
    let folder = daemon.folder.path().to_owned();
    chown(&folder, Some(STRANGER), Some(STRANGER)).unwrap();
    for name in ["laxityd.sock.lock", "control.sock.lock"] {
        std::fs::remove_file(folder.join(name)).unwrap();
    }
    let mut daemon = daemon.again();
    let said = service(&folder);
    assert!(said.contains("another laxityd"), "{said}");
    assert_eq!(std::fs::metadata(folder.join("control.sock")).unwrap().uid(), STRANGER);
    daemon.signal(Signal::SIGKILL);
    daemon.end();
    let said = service(&folder);
    assert!(said.contains("bound"), "{said}");
}

#[test]
fn a_socket_that_nobody_listens_at_is_replaced_and_a_lock_of_root_is_named() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let only_root = |name: &str| {
        std::fs::set_permissions(path(name), std::fs::Permissions::from_mode(0o600)).unwrap();
    };
    chown(folder.path(), Some(STRANGER), Some(STRANGER)).unwrap();
    // Root's daemon was killed before it gave its socket to the service's user.
    drop(std::os::unix::net::UnixListener::bind(path("control.sock")).unwrap());
    only_root("control.sock");
    let said = service(folder.path());
    assert!(said.contains("bound"), "{said}");

    std::fs::write(path("laxityd.sock.lock"), "").unwrap();
    chown(path("laxityd.sock.lock"), Some(0), Some(0)).unwrap();
    only_root("laxityd.sock.lock");
    let said = service(folder.path());
    assert!(said.contains("its lock file") && said.contains("root"), "{said}");
}
