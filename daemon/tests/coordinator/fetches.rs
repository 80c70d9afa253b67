//! Tests of fetches: they are reported, held and released by the coordinator, and never held for
//! ever.

use std::time::{Duration, Instant};

use laxity_client::{Client, Direction, Flow, Lane, Options, Stage, Ticket, peers};
use laxity_wire::v1::{Capability, FetchToken, Order, event::Event as Kind};

use crate::fake::{Fake, Peer};
use crate::support::{Laxityd, SMALL, eventually, flow, until};
use crate::{attending, barrier, begin, epoch, in_force, pruning};

const BYTES: u64 = 2 << 20;

/// Makes a read of `request` from the peer whose address ends with `peer`.
fn read(request: u64, peer: u8) -> Flow {
    let mut address = [0; 16];
    address[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, peer]);
    Flow {
        direction: Direction::Ingress,
        batch: 7,
        request,
        peer: peers::number(address),
        ..flow(Stage::KvReuse, BYTES)
    }
}

/// Returns the number, the request and the address of the next fetch in a report.
fn told(peer: &Peer) -> (u64, u64, u8) {
    peer.event("a fetch", |kind| match kind {
        Kind::FetchWanted(said) => {
            assert!(said.batch == 7 && said.victim_address.len() == 16 && said.bytes > 0);
            Some((said.fetch, said.request, said.victim_address[15]))
        }
        _ => None,
    })
}

fn holding(sequence: u64, fetches: &[u64]) -> Order {
    Order { held: fetches.to_vec(), ..pruning(5, sequence, &[]) }
}

fn held_flows(daemon: &Laxityd) -> u64 {
    daemon.status().ports.iter().map(|port| port.held_flows).sum()
}

/// Completes `permitted` bytes, and further permits until none comes for a while. Returns the sum
/// of the bytes.
fn drain(lane: &mut Lane, ticket: &mut Ticket, mut permitted: u64) -> u64 {
    let mut sum = 0;
    let mut quiet = Instant::now();
    while quiet.elapsed() < Duration::from_millis(100) && !(ticket.is_done() && permitted == 0) {
        if permitted > 0 {
            lane.complete(ticket, permitted);
            sum += permitted;
        }
        permitted = lane.poll(ticket).map_or(0, |permit| {
            quiet = Instant::now();
            assert!(!permit.bypassed, "{permit:?}");
            permit.bytes
        });
    }
    sum
}

/// Completes `permitted` bytes and all further permits. Returns the sum of the bytes.
fn drain_all(lane: &mut Lane, ticket: &mut Ticket, permitted: u64) -> u64 {
    let mut sum = drain(lane, ticket, permitted);
    eventually("everything is permitted", || {
        sum += drain(lane, ticket, 0);
        ticket.is_done().then_some(sum)
    })
}

fn reader(daemon: &Laxityd) -> (Client, Lane) {
    let client = daemon.client("reader");
    begin(&client, 7, &[(70, 0), (71, 0)]);
    let lane = client.lane();
    (client, lane)
}

#[test]
fn a_fetch_goes_ahead_waits_when_told_to_and_goes_on_when_released() {
    let fake = Fake::start();
    let daemon = attending(&format!("http://{}", fake.address), "host-a", 60_000);
    let peer = fake.welcomed(5);
    let (_client, mut lane) = reader(&daemon);
    let mut ticket = lane.submit(&read(70, 9));
    let unasked = lane.wait(&mut ticket).bytes;
    assert!(unasked > 0);
    let (fetch, request, victim) = told(&peer);
    assert_eq!((request, victim), (70, 9));

    peer.order(holding(1, &[fetch]));
    in_force(&daemon, 1);
    until("it is held", || held_flows(&daemon) == 1);
    let before = drain(&mut lane, &mut ticket, unasked);
    assert!(before < BYTES, "{before} bytes went though it was held");
    // Further flows of the fetch are held, also from another lane. Another request is not.
    let mut more_lane = _client.lane();
    let mut more = more_lane.submit(&read(70, 9));
    let mut other = lane.submit(&read(71, 9));
    assert_eq!(drain_all(&mut lane, &mut other, 0), BYTES);
    assert_eq!(drain(&mut more_lane, &mut more, 0), 0);
    let (second, request, _) = told(&peer);
    assert!(second != fetch && request == 71);
    until("both are held", || held_flows(&daemon) == 2);

    peer.order(Order {
        epoch: epoch(5, 2),
        base: epoch(5, 1),
        last: true,
        tokens: vec![FetchToken { fetch, lease_ns: 1_000_000_000 }],
        ..Order::default()
    });
    in_force(&daemon, 2);
    let after = drain_all(&mut lane, &mut ticket, 0);
    assert_eq!(before + after, BYTES);
    assert_eq!(drain_all(&mut more_lane, &mut more, 0), BYTES);
    let mut ended = Vec::new();
    peer.event("the ends", |kind| {
        if let Kind::FetchFinished(end) = kind {
            ended.push(end.fetch);
        }
        (ended.contains(&fetch) && ended.contains(&second)).then_some(())
    });
    let status = daemon.status().cluster.expect("a coordinator");
    assert_eq!((status.fetches, status.fetches_held, status.fetches_ahead), (2, 1, 0));
    until("metrics say so", || daemon.metric("laxity_cluster_fetches_held_total", "") == 1.0);
}

#[test]
fn a_fetch_that_nobody_releases_goes_ahead_after_a_while() {
    let fake = Fake::start();
    let daemon = Laxityd::start(&format!(
        "[coordinator]\nendpoint = \"http://{}\"\nhost = \"host-a\"\n\
         order_age_limit = \"60s\"\nfetch_wait_max = \"300ms\"\n{SMALL}",
        fake.address
    ));
    let peer = fake.welcomed(5);
    let (_client, mut lane) = reader(&daemon);
    let mut ticket = lane.submit(&read(70, 9));
    let (fetch, ..) = told(&peer);
    peer.order(holding(1, &[fetch]));
    in_force(&daemon, 1);
    let mut sum = 0;
    until("it went ahead", || {
        sum += drain(&mut lane, &mut ticket, 0);
        sum == BYTES
    });
    let status = daemon.status().cluster.expect("a coordinator");
    assert_eq!((status.fetches_held, status.fetches_ahead), (1, 1));
}

#[test]
fn a_fetch_is_released_when_the_order_that_held_it_is_too_old() {
    let fake = Fake::start();
    let daemon = Laxityd::start(&format!(
        "[coordinator]\nendpoint = \"http://{}\"\nhost = \"host-a\"\n\
         order_age_limit = \"400ms\"\nfetch_wait_max = \"10min\"\n{SMALL}",
        fake.address
    ));
    let peer = fake.welcomed(5);
    let (_client, mut lane) = reader(&daemon);
    let mut ticket = lane.submit(&read(70, 9));
    let (fetch, ..) = told(&peer);
    peer.order(holding(1, &[fetch]));
    until("it is held", || held_flows(&daemon) == 1);
    drop(peer);
    drop(fake);
    let mut sum = 0;
    until("it went on", || {
        sum += drain(&mut lane, &mut ticket, 0);
        sum == BYTES
    });
    assert_eq!(daemon.status().cluster.expect("configured").order, "own");
}

#[test]
fn a_coordinator_that_does_not_know_fetches_is_told_of_none() {
    let fake = Fake::start();
    let daemon = attending(&format!("http://{}", fake.address), "host-a", 60_000);
    let peer = fake.peer();
    peer.welcome_with(5, &[Capability::OrderDeltas]);
    peer.await_snapshot();
    let (_client, mut lane) = reader(&daemon);
    let mut ticket = lane.submit(&read(70, 9));
    assert_eq!(drain_all(&mut lane, &mut ticket, 0), BYTES);
    // Without the capability, an order of the coordinator can't hold a fetch.
    peer.order(holding(1, &[1]));
    in_force(&daemon, 1);
    barrier(&peer, &daemon);
    begin(&_client, 8, &[(80, 0)]);
    peer.event("the next batch", |kind| {
        assert!(!matches!(kind, Kind::FetchWanted(_) | Kind::FetchFinished(_)), "{kind:?}");
        matches!(kind, Kind::BatchArrived(batch) if batch.batch == 8).then_some(())
    });
}

#[test]
fn who_waits_for_a_held_fetch_is_shown_that_the_daemon_lives() {
    let fake = Fake::start();
    let daemon = Laxityd::start(&format!(
        "[coordinator]\nendpoint = \"http://{}\"\nhost = \"host-a\"\n\
         order_age_limit = \"60s\"\nfetch_wait_max = \"10min\"\n{SMALL}",
        fake.address
    ));
    let peer = fake.welcomed(5);
    let client = Client::attach(Options {
        socket: daemon.socket(),
        stall_timeout: Duration::from_secs(2),
        ..Options::default()
    });
    begin(&client, 7, &[(70, 0)]);
    let mut lane = client.lane();
    let mut ticket = lane.submit(&read(70, 9));
    let (fetch, ..) = told(&peer);
    peer.order(holding(1, &[fetch]));
    until("it is held", || held_flows(&daemon) == 1);
    let before = drain(&mut lane, &mut ticket, 0);
    // The daemon gets no other event and no request during this time.
    let held = Instant::now();
    while held.elapsed() < Duration::from_secs(5) {
        assert_eq!(drain(&mut lane, &mut ticket, 0), 0);
    }
    assert!(client.is_scheduled() && client.stats().bypassed_bytes == 0);
    assert!(before < BYTES);
}

#[test]
fn a_read_of_nothing_is_no_fetch() {
    let fake = Fake::start();
    let daemon = attending(&format!("http://{}", fake.address), "host-a", 60_000);
    let peer = fake.welcomed(5);
    let (_client, mut lane) = reader(&daemon);
    let mut nothing = lane.submit(&Flow { bytes: 0, ..read(70, 8) });
    assert_eq!(lane.wait(&mut nothing).bytes, 0);
    let mut ticket = lane.submit(&read(71, 9));
    assert_eq!(told(&peer).2, 9);
    assert_eq!(drain_all(&mut lane, &mut ticket, 0), BYTES);
    assert_eq!(daemon.status().cluster.expect("configured").fetches, 1);
}
