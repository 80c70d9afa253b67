//! Tests of two carriers on loopback.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use super::frame::{READ, ReadPart};
use super::incoming::listen;
use super::{Carrier, Incoming, Kind, Options, Taker};
use crate::apart::between::kv_head;

const PATIENCE: Duration = Duration::from_secs(60);

fn taker() -> (Taker, Receiver<Incoming>) {
    let (sender, receiver) = channel();
    (Arc::new(move |incoming| drop(sender.send(incoming))), receiver)
}

fn carrier(taker: Taker) -> Carrier {
    let options = Options {
        name: "test".to_owned(),
        stall: Duration::from_millis(400),
        ..Options::default()
    };
    Carrier::start(options, "127.0.0.1:3".parse().unwrap(), taker).unwrap()
}

#[test]
fn parcels_and_words_arrive_whole_and_are_acknowledged() {
    let (there, arrivals) = taker();
    let to = listen("127.0.0.1:0".parse().unwrap(), there).unwrap();
    let carrier = carrier(taker().0);
    let large: Vec<u8> = (0..1_500_000_u32).map(|at| (at * 7 % 251) as u8).collect();
    carrier.send(to, kv_head(Kind::P2d, 3, 1, 2, 4), 0, large.clone());
    carrier.send(to, kv_head(Kind::KvReuse, 4, 0, 2, 0), 0, vec![9; 10]);
    carrier.say(to, "{\"a\":1}".to_owned());
    let (mut parcels, mut words) = (Vec::new(), Vec::new());
    while parcels.len() < 2 || words.is_empty() {
        match arrivals.recv_timeout(PATIENCE).unwrap() {
            Incoming::Parcel(arrival) => parcels.push(arrival),
            Incoming::Words(from, line) => words.push((from, line)),
            other => panic!("{other:?}"),
        }
    }
    let own: SocketAddr = "127.0.0.1:3".parse().unwrap();
    assert_eq!(words, [(own, "{\"a\":1}\n".to_owned())]);
    parcels.sort_by_key(|arrival| arrival.head.layer);
    assert!(parcels[0].payload == large && parcels[0].from == own);
    assert_eq!((parcels[1].head.kind, parcels[1].payload.len()), (Kind::KvReuse, 10));
    let counts = carrier.counts();
    assert_eq!((counts.parcels, counts.bypassed_bytes), (2, 1_500_010));
    assert_eq!(counts.sent_bytes[&("p2d", 0)], 1_500_000);
}

/// Without a daemon all payload has one class. Stages on one connection would wait for each other.
#[test]
fn stages_to_one_peer_have_connections_of_their_own() {
    let peer = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = peer.local_addr().unwrap();
    let carrier = carrier(taker().0);
    carrier.send(to, kv_head(Kind::P2d, 0, 1, 2, 0), 0, vec![1; 100]);
    carrier.send(to, kv_head(Kind::P2d, 1, 1, 2, 0), 0, vec![1; 100]);
    carrier.send(to, kv_head(Kind::KvReuse, 0, 1, 2, 0), 0, vec![1; 100]);
    peer.set_nonblocking(true).unwrap();
    let (start, mut connections) = (Instant::now(), Vec::new());
    while connections.len() < 2 {
        assert!(start.elapsed() < PATIENCE, "{} connections", connections.len());
        connections.extend(peer.accept().ok());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_peer_that_is_not_there_is_said_to_be_lost() {
    let (here, told) = taker();
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let carrier = carrier(here);
    carrier.send(nobody, kv_head(Kind::P2d, 0, 1, 2, 0), 0, vec![1; 100]);
    match told.recv_timeout(PATIENCE).unwrap() {
        Incoming::Lost(peer, _) => assert_eq!(peer, nobody),
        other => panic!("{other:?}"),
    }
    until_one_is_lost(&carrier);
}

fn until_one_is_lost(carrier: &Carrier) {
    let start = Instant::now();
    while carrier.counts().lost != 1 {
        assert!(start.elapsed() < PATIENCE, "what was lost counts as arrived");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Both ends number their reads from 1. Bytes that one of them gives must not count as bytes that
/// it reads.
#[test]
fn bytes_that_are_given_do_not_count_for_an_own_read_of_the_same_number() {
    let carrier = carrier(taker().0);
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let from = holder.local_addr().unwrap();
    carrier.read(from, kv_head(Kind::KvReuse, 0, 1, 5, 0), 0, 10);
    let (asked, _) = holder.accept().unwrap();
    let (there, arrivals) = taker();
    let reader = listen("127.0.0.1:0".parse().unwrap(), there).unwrap();
    carrier.offer(reader, kv_head(Kind::KvReuse, 0, 2, 9, 0), vec![7; 10]);
    let part = ReadPart { flow: 1 | READ, request: 9, layer: 0, offset: 0, bytes: 10 };
    carrier.give(reader, part);
    while !matches!(arrivals.recv_timeout(PATIENCE).unwrap(), Incoming::Parcel(_)) {}
    // The acknowledgement is on its way or there.
    std::thread::sleep(Duration::from_millis(100));
    // The holder goes without an answer, so the read is still open and gets lost.
    drop(asked);
    until_one_is_lost(&carrier);
}
