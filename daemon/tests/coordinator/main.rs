//! Tests of the real daemon with two coordinators: a fake one that misbehaves, and the real one.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

mod fake;
mod fetches;
mod nics;
mod real;
#[path = "../support/mod.rs"]
mod support;
mod tls;

use std::io::{Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fake::{Fake, Peer};
use laxity_client::{Client, Hint, Stage};
use laxity_wire::ClusterStatus;
use laxity_wire::v1::{
    Epoch, Order, Pruned, Rank, Refusal, SnapshotWanted, Standing, event::Event as Kind,
    from_coordinator::Message, from_daemon,
};
use support::{Laxityd, SMALL, eventually, flow, until};

/// Starts a daemon with a coordinator at `endpoint`. Its orders expire after `age_limit_ms`.
pub(crate) fn attending(endpoint: &str, host: &str, age_limit_ms: u64) -> Laxityd {
    Laxityd::start(&(lines(endpoint, host, age_limit_ms) + SMALL))
}

/// Returns the configuration of a daemon like that of [`attending`], without NICs.
pub(crate) fn lines(endpoint: &str, host: &str, age_limit_ms: u64) -> String {
    format!(
        "[coordinator]\nendpoint = \"{endpoint}\"\nhost = \"{host}\"\n\
         order_age_limit = \"{age_limit_ms}ms\"\nbackoff_min = \"10ms\"\nbackoff_max \
         = \"50ms\"\n"
    )
}

fn of(fake: &Fake, age_limit_ms: u64) -> Laxityd {
    attending(&format!("http://{}", fake.address), "host-a", age_limit_ms)
}

/// Starts a coordinator and a daemon that it has welcomed to its term 5.
pub(crate) fn attended(age_limit_ms: u64) -> (Fake, Laxityd, Peer) {
    let fake = Fake::start();
    let daemon = of(&fake, age_limit_ms);
    let peer = fake.welcomed(5);
    (fake, daemon, peer)
}

pub(crate) fn cluster(daemon: &Laxityd) -> ClusterStatus {
    daemon.status().cluster.expect("there is a coordinator")
}

pub(crate) fn begin(client: &Client, batch: u64, requests: &[(u64, u64)]) {
    let mut lane = client.lane();
    lane.hint(Hint::BatchBegin { batch, layers: 8, layer_time_ns: 1_000_000 });
    for &(request, bytes) in requests {
        lane.hint(Hint::RequestJoin {
            batch,
            request,
            deadline_ns: laxity_shm::sleep::now_ns() + 3_000_000_000,
            bytes,
        });
    }
}

pub(crate) const fn epoch(term: u64, sequence: u64) -> Option<Epoch> {
    Some(Epoch { term, sequence })
}

/// Makes a full order in one piece that prunes these requests.
pub(crate) fn pruning(term: u64, sequence: u64, requests: &[u64]) -> Order {
    Order {
        epoch: epoch(term, sequence),
        last: true,
        ranks: vec![Rank { batch: 7, sort_key: 1 }],
        pruned: requests.iter().map(|&request| Pruned { request, ..Pruned::default() }).collect(),
        considered_report: u64::MAX,
        ..Order::default()
    }
}

pub(crate) fn in_force(daemon: &Laxityd, sequence: u64) -> ClusterStatus {
    eventually("the order is in force", || {
        let cluster = cluster(daemon);
        (cluster.order == "cluster" && cluster.sequence == Some(sequence)).then_some(cluster)
    })
}

/// Returns once the daemon has read all messages sent before.
pub(crate) fn barrier(peer: &Peer, daemon: &Laxityd) {
    let before = cluster(daemon).refused_events;
    peer.say(Message::Refusal(Refusal { count: 1, ..Refusal::default() }));
    until("it has read", || cluster(daemon).refused_events == before + 1);
}

#[test]
fn a_daemon_reports_what_it_knows_and_applies_an_order_whole() {
    let (_fake, daemon, peer) = attended(60_000);
    assert_eq!((peer.hello.protocol, peer.hello.host.as_str()), (1, "host-a"));
    let ports: Vec<_> = peer.hello.ports.iter().map(|p| p.rate_bytes_per_s).collect();
    assert_eq!(ports, [125_000_000; 2]);

    let client = daemon.client("engine");
    begin(&client, 7, &[(70, 1 << 20), (71, 0)]);
    let mut seen = Vec::new();
    peer.event("both requests", |kind| {
        let Kind::BatchArrived(batch) = kind else { return None };
        assert_eq!((batch.batch, batch.layers), (7, 8));
        for load in &batch.requests {
            let left = load.remaining_ns.expect("a deadline");
            assert!(left > 0 && left <= 3_000_000_000, "{left} is not what remains");
            seen.push(load.request);
        }
        (seen.contains(&70) && seen.contains(&71)).then_some(())
    });

    // A part of an order changes nothing.
    let mut first = pruning(5, 9, &[70]);
    first.last = false;
    peer.order(first);
    barrier(&peer, &daemon);
    let status = daemon.status();
    assert_eq!(status.cluster.unwrap().order, "own");
    assert_eq!(status.totals.pruned_requests, 0);

    let mut second = pruning(5, 9, &[71]);
    (second.piece, second.ranks) = (1, Vec::new());
    peer.order(second);
    let acked = peer.hear("an ack", |message| match message {
        from_daemon::Message::Ack(ack) => Some(ack.epoch),
        _ => None,
    });
    assert_eq!(acked, epoch(5, 9));
    let said = in_force(&daemon, 9);
    assert_eq!((said.term, said.orders), (Some(5), 1));
    until("the links have it", || daemon.status().totals.pruned_requests == 2);
    until("metrics say so", || {
        daemon.metric("laxity_cluster_order_in_force", "") == 1.0
            && daemon.metric("laxity_cluster_order_sequence", "") == 9.0
    });

    // A pruned request is demoted: its last stage goes as scavenger.
    let mut lane = client.lane();
    let mut pruned = flow(Stage::P2d, 1000);
    (pruned.batch, pruned.request) = (7, 70);
    let mut ticket = lane.submit(&pruned);
    let permit = lane.wait(&mut ticket);
    lane.complete(&ticket, permit.bytes);
    assert_eq!(permit.level, laxity_policy::Level::SCAVENGER.0, "{permit:?}");

    // The ends of requests and batches are reported.
    let mut lane = client.lane();
    lane.hint(Hint::RequestEnd { request: 70 });
    lane.hint(Hint::BatchEnd { batch: 7 });
    peer.event("the end", |kind| {
        matches!(kind, Kind::BatchFinished(end) if end.batch == 7).then_some(())
    });
}

#[test]
fn the_coordinator_learns_how_the_host_is_configured_and_each_change_of_that() {
    let (_fake, daemon, peer) = attended(60_000);
    let said = || {
        peer.event("settings", |kind| match kind {
            Kind::HostSettings(said) => Some(said.clone()),
            _ => None,
        })
    };
    // Snapshots for the status are also reported.
    let dscp: Vec<u32> =
        daemon.status().ports[0].levels.iter().map(|level| level.dscp.into()).collect();
    let first = said();
    assert_eq!((first.mode.as_str(), first.marking.as_str()), ("enforce", "preserve"));
    assert_eq!((first.level_dscp, first.bypass), (dscp, false));
    assert!(first.clock_ns > 1 << 60, "a clock since 1970: {}", first.clock_ns);
    daemon.control().set_mode("observe").unwrap();
    assert_eq!(said().mode, "observe");
    daemon.control().bypass(true).unwrap();
    assert!(said().bypass);
}

#[test]
fn the_coordinator_learns_how_much_passes_a_port_without_a_permit() {
    let fake = Fake::start();
    let endpoint = format!("http://{}", fake.address);
    let slow = SMALL.replace("eth0", "lo").replace("1Gbit", "10Mbit");
    let _daemon = Laxityd::start(&(lines(&endpoint, "host-a", 60_000) + &slow));
    let peer = fake.welcomed(5);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let [from, to] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
            let to = to.local_addr().unwrap();
            // For a minute at most, so that a test that fails ends.
            for _ in 0..6000 {
                if ended.load(Ordering::Relaxed) {
                    break;
                }
                from.send_to(&[0; 16_384], to).unwrap();
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let told = peer.event("a share of the port", |kind| match kind {
            Kind::PortLoad(load) if load.foreign_bytes_per_s > 125_000 => Some(load.port),
            _ => None,
        });
        ended.store(true, Ordering::Relaxed);
        assert!(told < 2, "a direction of the only NIC");
    });
}

#[test]
fn a_coordinator_of_an_older_term_is_refused_on_any_stream() {
    let (fake, daemon, peer) = attended(60_000);
    peer.order(pruning(5, 7, &[70]));
    in_force(&daemon, 7);
    drop(peer);
    let (address, old) = (fake.address, fake);
    drop(old);
    let fenced = Fake::start_at(address);
    for _ in 0..3 {
        let peer = fenced.peer();
        assert_eq!(peer.hello.applied, epoch(5, 7));
        peer.welcome(4);
    }
    let said = cluster(&daemon);
    assert!(!said.connected && said.problem.contains("overtaken"), "{said:?}");
    assert_eq!((said.sequence, said.order.as_str()), (Some(7), "cluster"));
    assert!(said.stale_orders >= 2, "{said:?}");
    let peer = fenced.peer();
    peer.welcome(6);
    peer.await_snapshot();
    peer.order(pruning(6, 1, &[]));
    assert_eq!(in_force(&daemon, 1).term, Some(6));
}

#[test]
fn without_a_coordinator_its_order_holds_until_it_is_too_old_and_then_the_daemons_own() {
    let (fake, mut daemon, peer) = attended(1500);
    let client = daemon.client("engine");
    begin(&client, 7, &[(70, 1 << 10)]);
    peer.event("the batch", |kind| matches!(kind, Kind::BatchArrived(_)).then_some(()));
    peer.order(pruning(5, 1, &[70]));
    in_force(&daemon, 1);
    let address = fake.address;
    drop((peer, fake));
    daemon.await_log("no coordinator");
    until("its own order holds", || {
        let status = daemon.status();
        let said = status.cluster.unwrap();
        said.order == "own" && status.totals.pruned_requests == 0
    });
    daemon.await_log("too old");
    assert!(cluster(&daemon).failures > 0);

    // The new coordinator has another term and gets a full snapshot.
    let fake = Fake::start_at(address);
    let peer = fake.peer();
    peer.welcome(6);
    peer.event("the batch again", |kind| match kind {
        Kind::BatchArrived(batch) => (batch.batch == 7).then_some(()),
        _ => None,
    });
    peer.order(pruning(6, 1, &[70]));
    in_force(&daemon, 1);
    // Heartbeats keep an order without changes valid beyond its age limit.
    let beats = cluster(&daemon).orders;
    std::thread::sleep(std::time::Duration::from_millis(2500));
    let said = cluster(&daemon);
    assert_eq!((said.order.as_str(), said.orders), ("cluster", beats));
}

#[test]
fn a_coordinator_that_does_not_read_never_keeps_the_daemon_waiting() {
    let (fake, daemon, peer) = attended(60_000);
    let client = daemon.client("engine");
    fake.reads.store(false, Ordering::Release);
    let rss_kib = || -> u64 {
        let path = format!("/proc/{}/status", daemon.child.id());
        let status = std::fs::read_to_string(path).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        line.unwrap().trim().trim_end_matches(" kB").parse().unwrap()
    };
    let mut lane = client.lane();
    let mut before_kib = 0;
    for batch in 1..=60_000_u64 {
        lane.hint(Hint::BatchBegin { batch, layers: 8, layer_time_ns: 1000 });
        lane.hint(Hint::RequestJoin { batch, request: batch, deadline_ns: 0, bytes: 10 });
        if batch > 100 {
            lane.hint(Hint::BatchEnd { batch: batch - 100 });
        }
        if batch.is_multiple_of(50) {
            // Flows still get permits. Each flow also makes this thread wait until the daemon has
            // read its lane.
            let mut ticket = lane.submit(&flow(Stage::P2d, 1000));
            let permit = lane.wait(&mut ticket);
            lane.complete(&ticket, permit.bytes);
            assert!(!permit.bypassed && permit.last);
        }
        if batch == 20_000 {
            before_kib = rss_kib();
        }
    }
    assert!(cluster(&daemon).connected);
    let grown_kib = rss_kib().saturating_sub(before_kib);
    assert!(grown_kib < 16 << 10, "grew by {grown_kib} KiB while nobody read");
    // Once it reads again, it gets the newest values and not every change.
    fake.reads.store(true, Ordering::Release);
    peer.event("the newest batch", |kind| match kind {
        Kind::BatchArrived(batch) => (batch.batch == 60_000).then_some(()),
        _ => None,
    });
    assert!(cluster(&daemon).reports < 20_000);
}

#[test]
fn an_operator_can_take_the_host_out_and_a_snapshot_can_be_asked_for() {
    let (_fake, daemon, peer) = attended(60_000);
    let client = daemon.client("engine");
    begin(&client, 7, &[(70, 10)]);
    peer.order(pruning(5, 1, &[70]));
    in_force(&daemon, 1);
    peer.say(Message::Standing(Standing { drained: true }));
    until("its own order holds at once", || {
        let said = cluster(&daemon);
        said.drained && said.order == "own"
    });
    peer.say(Message::Standing(Standing { drained: false }));
    peer.say(Message::SnapshotWanted(SnapshotWanted {}));
    peer.await_snapshot();
    peer.order(pruning(5, 2, &[70]));
    assert!(!in_force(&daemon, 2).drained);
}

#[test]
fn garbage_ends_the_stream_and_nothing_else() {
    // The peer does not speak HTTP.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().take(3) {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 64]);
            let noise: Vec<u8> = (0..4096_u32).map(|i| (i * 151 + 7) as u8).collect();
            let _ = stream.write_all(&noise);
        }
    });
    let daemon = attending(&format!("http://{address}"), "host-a", 60_000);
    let client = daemon.client("worker");
    until("it has tried", || cluster(&daemon).failures >= 3);
    let mut lane = client.lane();
    let mut ticket = lane.submit(&flow(Stage::P2d, 1000));
    assert!(lane.wait(&mut ticket).last);

    // The peer speaks gRPC and sends nonsense.
    let fake = Fake::start();
    let daemon = of(&fake, 60_000);
    let first = fake.peer();
    first.order(pruning(5, 1, &[70]));
    until("a stream without a welcome is left", || cluster(&daemon).problem.contains("Welcome"));
    let peer = fake.welcomed(5);
    peer.order(Order::default());
    peer.hear("a resync", |message| {
        matches!(message, from_daemon::Message::Resync(_)).then_some(())
    });
    assert_eq!(cluster(&daemon).broken_orders, 1);
    for piece in 0..5000 {
        let mut endless = pruning(5, 2, &[70]);
        (endless.last, endless.piece) = (false, piece);
        peer.order(endless);
    }
    until("a stream without end is left", || cluster(&daemon).problem.contains("pieces"));
    let peer = fake.welcomed(5);
    assert_eq!(cluster(&daemon).order, "own");
    peer.order(pruning(5, 3, &[70]));
    in_force(&daemon, 3);
}
