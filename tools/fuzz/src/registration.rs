//! Fuzzes both sides of the registration socket with arbitrary packets.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use laxity_shm::layout::{Geometry, Mode, VERSION};
use laxity_shm::registration::{
    Hello, NAME_MAX, Reason, RegistrationError, Reply, Versions, receive_hello, receive_reply,
};
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair,
};

use crate::Input;
use crate::input::put_packet;

const PACKETS_MAX: usize = 8;

fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).expect("descriptors")
}

fn send(socket: &OwnedFd, packet: &[u8], rights: usize) {
    let file = (rights > 0).then(|| File::open("/dev/null").expect("there is one"));
    let fds: Vec<i32> = file.iter().map(AsRawFd::as_raw_fd).cycle().take(rights).collect();
    let control = [ControlMessage::ScmRights(&fds)];
    let control = if rights > 0 { &control[..] } else { &[] };
    let part = [std::io::IoSlice::new(packet)];
    // The call fails for a packet that is too long or empty, and then there is none.
    let _ = sendmsg::<()>(socket.as_raw_fd(), &part, control, MsgFlags::MSG_NOSIGNAL, None);
}

fn check_hello(hello: &Hello) {
    assert!(hello.mode().is_some() && hello.versions().common(Versions::OURS).is_some());
    let name = hello.name();
    assert!(name.chars().count() <= NAME_MAX + 1 && !name.chars().any(char::is_control));
    let again = Hello::parse(bytemuck::bytes_of(hello));
    assert_eq!(again.as_ref().ok(), Some(hello));
}

fn greeted(packets: &[(&[u8], usize)]) {
    let (ours, theirs) = pair();
    for &(packet, rights) in packets {
        send(&theirs, packet, rights);
        match receive_hello(ours.as_fd()) {
            Ok(Some(hello)) => check_hello(&hello),
            Ok(None) => {}
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    drop(theirs);
    // The daemon's side sees the hangup after it has read all packets.
    let end = (0..=packets.len()).find_map(|_| receive_hello(ours.as_fd()).err());
    assert!(end.is_some(), "a hangup is an end");
}

fn answered(packets: &[(&[u8], usize)]) {
    let (ours, theirs) = pair();
    for &(packet, rights) in packets {
        send(&theirs, packet, rights);
        if let Ok(Some(welcome)) = receive_reply(ours.as_fd()) {
            assert!(welcome.geometry.is_valid() && rights >= 2);
        }
    }
}

pub fn run(bytes: &[u8]) {
    let _ = Hello::parse(bytes).inspect(check_hello);
    if let Ok(geometry) = Reply::parse(bytes) {
        assert!(geometry.is_valid());
        let same = Reply::parse(bytemuck::bytes_of(&Reply::welcome(VERSION, geometry)));
        assert_eq!(same.ok(), Some(geometry));
    }
    let mut input = Input::new(bytes);
    let mut packets = Vec::new();
    while !input.is_empty() && packets.len() < PACKETS_MAX {
        let rights = usize::from(input.byte() % 5);
        packets.push((input.packet(), rights));
    }
    greeted(&packets);
    answered(&packets);
    for (packet, _) in packets {
        match Hello::parse(packet) {
            Ok(hello) => check_hello(&hello),
            Err(RegistrationError::Version(version)) => {
                assert!(packet.len() >= 8 && version != VERSION);
            }
            Err(RegistrationError::Malformed(length)) => assert_eq!(length, packet.len()),
            Err(other) => panic!("parsing makes no system call: {other}"),
        }
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let geometry = Geometry::default();
    let hello = |mode, fenced| Hello::new("vllm-worker-0 é", mode, fenced);
    let hellos = [
        hello(Mode::default(), false),
        hello(Mode::Observe, true),
        Hello { version: 1, ..hello(Mode::default(), false) },
    ];
    let replies = [
        Reply::welcome(VERSION, geometry),
        Reply::reject(Reason::Full),
        Reply::reject(Reason::Version),
    ];
    let mut seeds: Vec<Vec<u8>> = Vec::new();
    let packets = hellos.iter().map(bytemuck::bytes_of);
    for packet in packets.chain(replies.iter().map(bytemuck::bytes_of)) {
        seeds.push(packet.to_vec());
        for rights in [0, 2] {
            let mut seed = vec![rights];
            put_packet(&mut seed, packet);
            // The packet is sent twice, because a second packet ends a connection.
            seed.push(0);
            put_packet(&mut seed, packet);
            seeds.push(seed);
        }
    }
    seeds
}
