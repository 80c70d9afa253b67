//! Tests of fetches: they are reported, and not held up.

use laxity_client::{Client, Direction, Flow, Lane, Stage, Ticket, peers};
use laxity_wire::v1::event::Event as Kind;

use crate::fake::Peer;
use crate::support::{Laxityd, eventually, flow, until};
use crate::{attended, begin};

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

/// Completes all permits of a flow. Returns the sum of the bytes.
fn drain_all(lane: &mut Lane, ticket: &mut Ticket) -> u64 {
    let mut sum = 0;
    eventually("everything is permitted", || {
        if let Some(permit) = lane.poll(ticket) {
            assert!(!permit.bypassed, "{permit:?}");
            lane.complete(ticket, permit.bytes);
            sum += permit.bytes;
        }
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
fn a_fetch_is_reported_with_its_peer_until_its_flows_end() {
    let (_fake, daemon, peer) = attended(60_000);
    let (_client, mut lane) = reader(&daemon);
    let mut ticket = lane.submit(&read(70, 9));
    let (fetch, request, victim) = told(&peer);
    assert_eq!((request, victim), (70, 9));
    // Another flow of the request is of the same fetch, and another request has its own.
    let mut more = lane.submit(&read(70, 9));
    let mut other = lane.submit(&read(71, 9));
    let (second, request, _) = told(&peer);
    assert!(second != fetch && request == 71);
    for ticket in [&mut ticket, &mut more, &mut other] {
        assert_eq!(drain_all(&mut lane, ticket), BYTES);
    }
    let mut ended = Vec::new();
    peer.event("the ends", |kind| {
        if let Kind::FetchFinished(end) = kind {
            ended.push(end.fetch);
        }
        (ended.contains(&fetch) && ended.contains(&second)).then_some(())
    });
    assert_eq!(daemon.status().cluster.expect("a coordinator").fetches, 2);
    until("metrics say so", || daemon.metric("laxity_cluster_fetches_total", "") == 2.0);
}

#[test]
fn a_read_of_nothing_is_no_fetch() {
    let (_fake, daemon, peer) = attended(60_000);
    let (_client, mut lane) = reader(&daemon);
    let mut nothing = lane.submit(&Flow { bytes: 0, ..read(70, 8) });
    assert_eq!(lane.wait(&mut nothing).bytes, 0);
    let mut ticket = lane.submit(&read(71, 9));
    assert_eq!(told(&peer).2, 9);
    assert_eq!(drain_all(&mut lane, &mut ticket), BYTES);
    assert_eq!(daemon.status().cluster.expect("configured").fetches, 1);
}
