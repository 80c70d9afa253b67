//! Regions and registration: a region that was handed over cannot be resized, and a client uses no
//! region of another version.

#![cfg(not(loom))]

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use laxity_shm::layout::{Geometry, Mode, VERSION};
use laxity_shm::region::{Region, RegionError};
use laxity_shm::registration::{
    self, Hello, Reason, RegistrationError, Reply, receive_hello, receive_reply,
};
use laxity_shm::served::RegionConsumer;

const SMALL: Geometry = shape(2, 16, 1);

const fn shape(lanes: u16, slots: u16, colour: u8) -> Geometry {
    Geometry { lanes, slots, colour }
}

fn copy(fd: impl AsFd) -> OwnedFd {
    fd.as_fd().try_clone_to_owned().expect("dup")
}

#[test]
fn a_region_can_be_mapped_again_and_both_see_the_same_bytes() {
    let daemon = Region::create(SMALL).expect("created");
    let client = Region::map(copy(daemon.memfd()), SMALL).expect("mapped");
    daemon.header().beat(77);
    assert_eq!(client.header().heartbeat_ns(), 77);
    client.header().set_claimed(1, true);
    assert_eq!(daemon.header().claimed(0), 2);
    client.header().set_claimed(1, false);
    assert_eq!(daemon.header().claimed(0), 0);
}

#[test]
fn nobody_can_shrink_or_grow_a_region() {
    let region = Region::create(SMALL).expect("created");
    let file = File::from(copy(region.memfd()));
    let bytes = region.bytes() as u64;
    assert!(file.set_len(bytes - 4096).is_err());
    assert!(file.set_len(0).is_err());
    assert!(file.set_len(bytes + 4096).is_err());
    assert_eq!(file.metadata().expect("stat").len(), bytes);
}

#[test]
fn a_file_that_could_be_truncated_is_refused() {
    let file = tempfile::tempfile().expect("file");
    file.set_len(SMALL.region_bytes() as u64).expect("sized");
    match Region::map(file.into(), SMALL) {
        Err(RegionError::Unsealed(_)) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_region_of_another_size_or_shape_is_refused() {
    let region = Region::create(SMALL).expect("created");
    for other in [shape(3, 16, 1), shape(2, 17, 1), shape(2, 16, 2)] {
        match Region::map(copy(region.memfd()), other) {
            Err(RegionError::Shape(SMALL)) => {}
            answer => panic!("{other:?}: {answer:?}"),
        }
    }
    for other in [shape(30, 16, 1), shape(2, 256, 1)] {
        match Region::map(copy(region.memfd()), other) {
            Err(RegionError::Size { .. }) => {}
            answer => panic!("{other:?}: {answer:?}"),
        }
    }
    for invalid in
        [shape(0, 16, 1), shape(1025, 16, 1), shape(2, 7, 1), shape(2, 4097, 1), shape(2, 16, 64)]
    {
        for refused in [Region::create(invalid), Region::map(copy(region.memfd()), invalid)] {
            assert!(matches!(refused, Err(RegionError::Geometry(_))));
        }
    }
}

#[test]
fn a_region_of_another_version_or_magic_is_refused() {
    for (offset, bytes) in [(8, (VERSION + 1).to_le_bytes()), (0, [0; 4])] {
        let region = Region::create(SMALL).expect("created");
        let mut file = File::from(copy(region.memfd()));
        file.seek(SeekFrom::Start(offset)).expect("seeks");
        file.write_all(&bytes).expect("writes");
        match Region::map(copy(region.memfd()), SMALL) {
            Err(RegionError::Version { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Returns the directory of a listening socket, the client's end and the daemon's end.
fn connected() -> (tempfile::TempDir, OwnedFd, OwnedFd) {
    let dir = tempfile::tempdir().expect("temporary directory");
    let path = dir.path().join("s");
    let listener = registration::listen(&path).expect("listens");
    assert!(registration::accept(listener.as_fd()).expect("accepts").is_none(), "nobody yet");
    let client = registration::connect(&path).expect("connects");
    let daemon = registration::accept(listener.as_fd()).expect("accepts").expect("one waits");
    (dir, client, daemon)
}

#[test]
fn a_client_registers_and_gets_a_region_and_an_eventfd() {
    let (_dir, client, daemon) = connected();
    assert!(receive_hello(daemon.as_fd()).expect("open").is_none(), "has not spoken yet");
    let hello = Hello::new("näme\u{7}", Mode::Observe, true);
    registration::send_hello(client.as_fd(), &hello).expect("greets");
    let heard = receive_hello(daemon.as_fd()).expect("valid").expect("arrived");
    assert_eq!(heard, hello);
    assert_eq!((heard.name().as_str(), heard.mode()), ("näme?", Some(Mode::Observe)));
    assert_eq!(heard.flags & registration::HELLO_FENCED, registration::HELLO_FENCED);
    let peer = registration::peer(daemon.as_fd()).expect("credentials");
    assert_eq!(peer.pid, std::process::id());

    let served = RegionConsumer::new(SMALL, false).expect("served");
    assert!(receive_reply(client.as_fd()).expect("open").is_none());
    served.welcome(daemon.as_fd()).expect("sends");
    assert!(registration::wait_readable(client.as_fd(), Duration::from_secs(5)));
    let welcome = receive_reply(client.as_fd()).expect("valid").expect("arrived");
    assert_eq!(welcome.geometry, SMALL);
    assert!(Region::map(welcome.memfd, welcome.geometry).is_ok());
    registration::wake(welcome.eventfd.as_fd());
    assert!(registration::wait_readable(served.eventfd(), Duration::from_secs(5)));
    registration::drain(served.eventfd());
    assert!(!registration::wait_readable(served.eventfd(), Duration::ZERO));

    assert!(!registration::is_hung_up(client.as_fd()));
    drop(daemon);
    assert!(registration::is_hung_up(client.as_fd()));
}

#[test]
fn a_long_name_is_cut_at_a_character() {
    let hello = Hello::new(&"ä".repeat(40), Mode::Enforce, false);
    assert_eq!(hello.name(), "ä".repeat(13));
    let hello = Hello::new(&format!("x{}", "ä".repeat(40)), Mode::Enforce, false);
    assert_eq!(hello.name(), format!("x{}", "ä".repeat(13)));
}

#[test]
fn another_version_is_told_apart_from_nonsense() {
    let good = Hello::new("x", Mode::Enforce, false);
    let bytes = bytemuck::bytes_of(&good).to_vec();
    assert!(Hello::parse(&bytes).is_ok());
    let mut newer = bytes.clone();
    newer[4..8].copy_from_slice(&(VERSION + 1).to_le_bytes());
    assert!(matches!(Hello::parse(&newer), Err(RegistrationError::Version(v)) if v == VERSION + 1));
    newer.extend_from_slice(&[0; 40]);
    assert!(matches!(Hello::parse(&newer), Err(RegistrationError::Version(_))), "of any length");
    let changed = |offset: usize, value| {
        let mut changed = bytes.clone();
        changed[offset] = value;
        changed
    };
    for wrong in [
        &bytes[..0],
        &bytes[..7],
        &bytes[..47],
        b"GET / HTTP/1.1\r\n\r\n".as_slice(),
        &changed(12, 3)[..],
    ] {
        let heard = Hello::parse(wrong);
        assert!(matches!(heard, Err(RegistrationError::Malformed(_))));
    }
}

#[test]
fn a_rejection_says_why_and_by_which_version() {
    let (_dir, client, daemon) = connected();
    registration::send_reject(daemon.as_fd(), Reason::Version).expect("sends");
    match receive_reply(client.as_fd()) {
        Err(RegistrationError::Rejected { reason: Reason::Version, version: VERSION }) => {}
        other => panic!("{other:?}"),
    }
    let mut reply = bytemuck::bytes_of(&Reply::welcome(VERSION, SMALL)).to_vec();
    assert_eq!(Reply::parse(&reply).expect("valid"), SMALL);
    reply[4] += 1;
    let answer = Reply::parse(&reply);
    assert!(matches!(answer, Err(RegistrationError::Version(_))));
    reply[4] -= 1;
    reply[17] += 1;
    assert!(matches!(Reply::parse(&reply), Err(RegistrationError::Malformed(_))), "size disagrees");
}

#[test]
fn a_welcome_without_its_descriptors_is_refused() {
    let (_dir, client, daemon) = connected();
    let stream = UnixStream::from(copy(&daemon));
    (&stream).write_all(bytemuck::bytes_of(&Reply::welcome(VERSION, SMALL))).expect("sends");
    let answer = receive_reply(client.as_fd());
    assert!(matches!(answer, Err(RegistrationError::Malformed(_))));
    drop(stream);
    drop(daemon);
    match receive_reply(client.as_fd()) {
        Err(RegistrationError::NoAnswer) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_socket_left_by_a_dead_daemon_is_replaced_and_one_in_use_is_not() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let path = dir.path().join("s");
    let first = registration::listen(&path).expect("listens");
    assert!(registration::listen(&path).is_err(), "in use");
    drop(first);
    assert!(path.exists());
    registration::listen(&path).expect("replaces what nobody listens on");
    let long = dir.path().join("x".repeat(120));
    assert!(registration::listen(&long).is_err());
    assert!(registration::connect(&dir.path().join("none")).is_err());
}
