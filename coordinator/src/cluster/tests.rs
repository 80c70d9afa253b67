//! The cluster's rules, told as stories of daemons. [`Replica`] is what a daemon makes of the
//! orders.

mod books;
mod hostile;
mod replica;

use laxity_policy::{Span, Time};
use laxity_wire::v1::{
    self, BatchArrived, BatchFinished, Capability, Direction, Event, FetchFinished, FetchWanted,
    Hello, PortBytes, PortInfo, RefusalReason, Report, RequestEnded, RequestJoined, RequestLoad,
    SnapshotPiece, event::Event as Kind,
};

use self::replica::Replica;
use super::{Cluster, ClusterPolicy, HostId, RunReport, Settings, Taken};
use crate::limits::Limits;
use crate::tenants::{TenantConfig, Tenants};

const MS: u64 = 1_000_000;
/// Bytes per second of every port.
const RATE: u64 = 1_000_000_000;

/// A cluster with a clock of its own.
pub(super) struct World {
    pub(super) cluster: Cluster,
    pub(super) now: Time,
}

/// A daemon's end of its stream.
pub(super) struct Daemon {
    pub(super) id: HostId,
    pub(super) stream: u64,
    pub(super) sent: u64,
    pub(super) replica: Replica,
}

/// Where the egress of the host "victim" is reached.
const ADDRESS: [u8; 16] = [0xab; 16];

pub(super) fn hello(host: &str) -> Hello {
    let port = |name: &str, direction| PortInfo {
        name: name.into(),
        direction: direction as i32,
        rate_bytes_per_s: RATE,
        addresses: if host == "victim" && direction == Direction::Egress {
            vec![ADDRESS.to_vec()]
        } else {
            Vec::new()
        },
    };
    Hello {
        protocol: 1,
        protocol_min: 1,
        capabilities: [
            Capability::OrderDeltas,
            Capability::FetchTokens,
            Capability::PruneCauses,
        ]
        .map(|one| one as i32)
        .to_vec(),
        host: host.into(),
        ports: vec![
            port("eth0", Direction::Egress),
            port("eth0", Direction::Ingress),
        ],
        ..Hello::default()
    }
}

pub(super) fn request(request: u64, remaining_ms: i64, bytes: u64) -> RequestLoad {
    RequestLoad {
        request,
        remaining_ns: Some(remaining_ms * MS as i64),
        loads: vec![PortBytes { port: 0, bytes }],
        started: false,
    }
}

pub(super) fn arrived(batch: u64, requests: Vec<RequestLoad>) -> Kind {
    Kind::BatchArrived(BatchArrived {
        batch,
        requests,
        ..BatchArrived::default()
    })
}

pub(super) fn finished(batch: u64) -> Kind {
    Kind::BatchFinished(BatchFinished { batch })
}

impl World {
    pub(super) fn new() -> Self {
        Self::with(Settings {
            host_grace: Span::from_millis(100),
            ..Settings::default()
        })
    }

    pub(super) fn with(settings: Settings) -> Self {
        let policy = ClusterPolicy {
            fetches_per_port: 1,
            ..ClusterPolicy::default()
        };
        let now = Time(10_000 * MS);
        Self {
            cluster: Cluster::new(now, settings, policy, 7).expect("valid"),
            now,
        }
    }

    pub(super) fn attend(&mut self, hello: &Hello) -> Daemon {
        let (id, stream) = self.cluster.attend(self.now, hello).expect("let in");
        Daemon {
            id,
            stream,
            sent: 0,
            replica: Replica::default(),
        }
    }

    /// A daemon that has said that it knows nothing.
    pub(super) fn join(&mut self, host: &str) -> Daemon {
        let mut daemon = self.attend(&hello(host));
        self.snapshot(&mut daemon, Vec::new());
        daemon
    }

    pub(super) fn report(&mut self, from: &mut Daemon, events: Vec<Kind>) {
        self.send(from, SnapshotPiece::Unspecified, events);
    }

    pub(super) fn snapshot(&mut self, from: &mut Daemon, events: Vec<Kind>) {
        self.send(from, SnapshotPiece::End, events);
    }

    pub(super) fn send(&mut self, from: &mut Daemon, snapshot: SnapshotPiece, events: Vec<Kind>) {
        from.sent += 1;
        let events = events.into_iter().map(|event| Event { event: Some(event) });
        let report = Report {
            sequence: from.sent,
            snapshot: snapshot as i32,
            events: events.collect(),
        };
        let taken = self.cluster.report(self.now, from.id, from.stream, report);
        assert_eq!(taken, Ok(()));
    }

    pub(super) fn drain(&mut self, host: &str, drain: bool) -> Result<u32, String> {
        let asked = v1::DrainRequest {
            host: host.into(),
            drain,
            comment: "a reason".into(),
        };
        self.cluster.drain(self.now, &asked, "me")
    }

    /// Time passes until nothing is due, and at least the debounce.
    pub(super) fn settle(&mut self) -> Option<RunReport> {
        self.now = self.now + Span(10 * MS);
        let mut last = None;
        while self
            .cluster
            .next_deadline()
            .is_some_and(|due| due <= self.now)
        {
            last = self.cluster.poll(self.now).or(last);
        }
        last
    }

    /// The daemon reads all there is.
    pub(super) fn read(&mut self, daemon: &mut Daemon) {
        while self.cluster.poll_ready().is_some() {}
        match self.cluster.take(self.now, daemon.id, daemon.stream) {
            Taken::Frames(frames) => frames.into_iter().for_each(|it| daemon.replica.take(it)),
            Taken::Replaced => panic!("replaced"),
        }
    }

    pub(super) fn settle_and_read(&mut self, daemons: &mut [&mut Daemon]) {
        self.settle();
        for daemon in daemons {
            self.read(daemon);
        }
    }
}

#[test]
fn batches_of_several_hosts_are_ordered_together_and_each_hears_of_its_own() {
    let mut world = World::new();
    let (mut a, mut b) = (world.join("a"), world.join("b"));
    world.report(&mut a, vec![arrived(1, vec![request(11, 900, 0)])]);
    world.report(&mut a, vec![arrived(2, vec![request(21, 300, 0)])]);
    world.report(&mut b, vec![arrived(3, vec![request(31, 600, 0)])]);
    world.settle_and_read(&mut [&mut a, &mut b]);
    assert_eq!(a.replica.sigma(), [2, 1]);
    assert_eq!(b.replica.sigma(), [3]);
    let key = |daemon: &Daemon, batch| daemon.replica.ranks[&batch];
    assert!(key(&a, 2) < key(&b, 3) && key(&b, 3) < key(&a, 1));
    assert_eq!(a.replica.considered, 3, "the snapshot and two reports");
}

#[test]
fn a_batch_that_two_hosts_report_is_one_and_its_loads_add_up_by_port() {
    let mut world = World::new();
    let (mut a, mut b) = (world.join("a"), world.join("b"));
    world.report(&mut a, vec![arrived(1, vec![request(11, 900, 100)])]);
    world.report(&mut b, vec![arrived(1, vec![request(11, 900, 5000)])]);
    world.settle_and_read(&mut [&mut a, &mut b]);
    assert_eq!((a.replica.sigma(), b.replica.sigma()), (vec![1], vec![1]));
    let wanted = v1::ExplainRequest {
        batch: 1,
        ..Default::default()
    };
    let told = world.cluster.explain(world.now, &wanted).expect("there");
    assert_eq!(told.bottleneck_bytes, 5000);
    assert_eq!(told.bottleneck.expect("a port").host, "b");
    let status = told.status.expect("there");
    assert_eq!((status.owner.as_str(), status.requests), ("a", 1));
}

#[test]
fn a_new_batch_tells_nobody_else_and_an_order_without_news_says_what_it_considered() {
    let mut world = World::new();
    let (mut a, mut b) = (world.join("a"), world.join("b"));
    world.report(&mut b, vec![arrived(2, vec![request(21, 500, 0)])]);
    world.settle_and_read(&mut [&mut a, &mut b]);
    let before = b.replica.clone();
    world.report(&mut a, vec![arrived(1, vec![request(11, 100, 0)])]);
    world.settle_and_read(&mut [&mut a, &mut b]);
    assert_eq!(b.replica, before, "b's batch keeps its key");
    world.report(&mut a, vec![finished(1)]);
    world.settle_and_read(&mut [&mut a]);
    assert_eq!(a.replica.considered, 3);
}

#[test]
fn a_deadline_that_is_reported_again_with_jitter_moves_no_rank() {
    let mut world = World::new();
    let mut a = world.join("a");
    world.report(&mut a, vec![arrived(1, vec![request(11, 500, 0)])]);
    world.settle_and_read(&mut [&mut a]);
    let key = a.replica.ranks[&1];
    for jitter_ms in [1, -1, 1] {
        world.report(
            &mut a,
            vec![arrived(1, vec![request(11, 490 + jitter_ms, 0)])],
        );
        // The clock has moved on by the 10 ms that settling takes.
        let run = world.settle().expect("a run");
        world.read(&mut a);
        if jitter_ms == 1 && a.replica.considered == 3 {
            assert_eq!(run.ranks_changed, 0);
            assert_eq!(a.replica.ranks[&1], key);
        }
    }
}

#[test]
fn a_port_that_cannot_carry_everything_has_somebody_pruned_and_says_why() {
    let mut world = World::new();
    let mut a = world.join("a");
    let heavy = request(12, 400, RATE);
    world.report(
        &mut a,
        vec![arrived(1, vec![request(11, 400, 1000), heavy])],
    );
    world.settle_and_read(&mut [&mut a]);
    let pruned = a.replica.pruned.get(&12).expect("pruned");
    assert_eq!(pruned.for_batch, 1);
    assert_eq!(pruned.bottleneck.as_ref().expect("a port").port, "eth0");
    let wanted = v1::ExplainRequest {
        batch: 1,
        ..Default::default()
    };
    let told = world.cluster.explain(world.now, &wanted).expect("there");
    assert_eq!(told.pruned[0].request, 12);
    assert!(told.text.iter().any(|text| text.contains("12 is pruned")));

    world.report(
        &mut a,
        vec![Kind::RequestEnded(RequestEnded { request: 12 })],
    );
    world.report(&mut a, vec![arrived(2, Vec::new())]);
    world.settle_and_read(&mut [&mut a]);
    assert!(a.replica.pruned.is_empty());
}

#[test]
fn a_reader_that_does_not_read_gets_one_order_with_the_newest_of_each() {
    let mut world = World::new();
    let mut a = world.join("a");
    world.settle_and_read(&mut [&mut a]);
    for round in 0..20_u64 {
        world.report(
            &mut a,
            vec![arrived(round + 1, vec![request(100 + round, 500, 0)])],
        );
        if round >= 5 {
            world.report(&mut a, vec![finished(round - 4)]);
        }
        world.settle();
    }
    let orders = a.replica.orders;
    world.read(&mut a);
    assert_eq!(a.replica.orders, orders + 1);
    assert_eq!(a.replica.sigma(), [16, 17, 18, 19, 20]);
    let (counters, _) = world.cluster.counters();
    assert!(counters.coalesced_orders > 10);
}

#[test]
fn readers_of_a_hot_port_get_tokens_by_rank() {
    let mut world = World::new();
    let mut victim = world.join("victim");
    let (mut a, mut b, mut c) = (world.join("a"), world.join("b"), world.join("c"));
    let wants = |batch| {
        Kind::FetchWanted(FetchWanted {
            fetch: 5,
            batch,
            request: batch * 10,
            // By name or by address: it is the same port.
            victim_host: if batch == 2 {
                "victim".into()
            } else {
                String::new()
            },
            victim_port: 0,
            victim_address: if batch == 2 {
                Vec::new()
            } else {
                ADDRESS.to_vec()
            },
            bytes: 1000,
        })
    };
    for (daemon, batch, due) in [(&mut a, 1, 9000), (&mut b, 2, 5000), (&mut c, 3, 1000)] {
        world.report(
            daemon,
            vec![arrived(batch, vec![request(batch * 10, due, 0)])],
        );
    }
    world.settle();
    for (daemon, batch) in [(&mut a, 1), (&mut b, 2), (&mut c, 3)] {
        world.report(daemon, vec![wants(batch)]);
    }
    world.settle_and_read(&mut [&mut a, &mut b, &mut c, &mut victim]);
    let holds = |daemon: &Daemon| daemon.replica.tokens.contains(&5);
    assert_eq!([&a, &b, &c].map(holds), [false, false, true]);
    let waits = |daemon: &Daemon| daemon.replica.held.contains(&5);
    assert_eq!([&a, &b, &c].map(waits), [true, true, false]);
    world.report(
        &mut c,
        vec![Kind::FetchFinished(FetchFinished { fetch: 5 })],
    );
    world.settle_and_read(&mut [&mut a, &mut b]);
    assert_eq!([&a, &b].map(holds), [false, true]);
    assert_eq!([&a, &b].map(waits), [true, false]);
    // b never finishes: after its lease a is let in.
    world.now = world.now + Span::from_millis(60);
    world.settle_and_read(&mut [&mut a]);
    assert!(holds(&a) && !waits(&a));
    // Whoever becomes more urgent takes the token, and a host that asks for everything is told of
    // both.
    let mut urgent = wants(3);
    if let Kind::FetchWanted(said) = &mut urgent {
        said.fetch = 6;
    }
    world.report(&mut c, vec![urgent]);
    world.settle_and_read(&mut [&mut a, &mut c]);
    assert!(waits(&a) && c.replica.tokens.contains(&6));
    let (id, stream) = (a.id, a.stream);
    world.cluster.resync(id, stream);
    world.settle_and_read(&mut [&mut a]);
    assert!(waits(&a) && !holds(&a));
}

#[test]
fn an_address_that_nobody_named_is_nobodys_and_one_is_the_first_hosts() {
    let mut world = World::new();
    let mut a = world.join("a");
    let want = |fetch| {
        Kind::FetchWanted(FetchWanted {
            fetch,
            batch: 1,
            victim_address: ADDRESS.to_vec(),
            bytes: 1000,
            ..FetchWanted::default()
        })
    };
    world.report(&mut a, vec![arrived(1, vec![request(10, 900, 0)]), want(1)]);
    world.settle_and_read(&mut [&mut a]);
    assert!(a.replica.tokens.is_empty() && a.replica.held.is_empty());
    assert!(a.replica.refusals.is_empty(), "{:?}", a.replica.refusals);
    let mut victim = world.join("victim");
    let mut thief = hello("thief");
    thief.ports[0].addresses = vec![ADDRESS.to_vec()];
    let (thief, _) = world.cluster.attend(world.now, &thief).expect("welcome");
    world.report(&mut a, vec![want(2), want(3)]);
    world.settle_and_read(&mut [&mut a, &mut victim]);
    assert!(a.replica.tokens.contains(&2) && a.replica.held.contains(&3));
    let first = world.cluster.addresses[&(0, ADDRESS)];
    assert_eq!(world.cluster.port_hosts[first.0 as usize], Some(victim.id));
    assert_ne!(victim.id, thief);
    let mut short = hello("short");
    short.ports[0].addresses = vec![vec![1; 4]];
    assert!(world.cluster.attend(world.now, &short).is_err());
}

/// A reader of the victim whose fetches 2 and up wait, since 1 has the only token.
fn waiting_reader(world: &mut World, fetches: u64) -> (Daemon, Daemon) {
    let victim = world.join("victim");
    let mut reader = world.join("reader");
    let mut said = vec![arrived(1, vec![request(10, 9000, 0), request(11, 9000, 0)])];
    said.extend((1..=fetches).map(|fetch| reads(fetch, 1, 10)));
    world.report(&mut reader, said);
    world.settle_and_read(&mut [&mut reader]);
    let waits: Vec<u64> = reader.replica.held.iter().copied().collect();
    assert_eq!(waits, (2..=fetches).collect::<Vec<_>>());
    (victim, reader)
}

fn reads(fetch: u64, batch: u64, request: u64) -> Kind {
    Kind::FetchWanted(FetchWanted {
        fetch,
        batch,
        request,
        victim_address: ADDRESS.to_vec(),
        bytes: 1000,
        ..FetchWanted::default()
    })
}

#[test]
fn a_fetch_that_nothing_keeps_any_more_is_let_go() {
    let mut world = World::new();
    let (_victim, mut reader) = waiting_reader(&mut world, 3);
    world.report(
        &mut reader,
        vec![Kind::FetchFinished(FetchFinished { fetch: 2 })],
    );
    world.settle_and_read(&mut [&mut reader]);
    assert!(!reader.replica.held.contains(&2) && reader.replica.held.contains(&3));
    world.drain("victim", true).expect("known");
    world.settle_and_read(&mut [&mut reader]);
    assert!(reader.replica.held.is_empty(), "{:?}", reader.replica.held);
    world.cluster.audit().expect("the books agree");
}

#[test]
fn a_token_whose_lease_ended_before_its_host_read_of_it_lets_go_all_the_same() {
    let mut world = World::new();
    let (_victim, mut reader) = waiting_reader(&mut world, 2);
    for _ in 0..3 {
        world.now = world.now + Span::from_millis(60);
        world.settle();
    }
    world.settle_and_read(&mut [&mut reader]);
    assert!(reader.replica.held.is_empty(), "{:?}", reader.replica.held);
}

#[test]
fn the_fetches_of_a_daemon_that_was_restarted_are_not_those_of_the_one_before() {
    let mut world = World::new();
    let (_victim, mut reader) = waiting_reader(&mut world, 2);
    let mut other = world.join("other");
    world.report(
        &mut other,
        vec![arrived(2, vec![request(20, 100, 0)]), reads(7, 2, 20)],
    );
    world.settle_and_read(&mut [&mut reader, &mut other]);
    assert!(other.replica.tokens.contains(&7) && reader.replica.held.contains(&1));
    // The same number is now another request's, of a batch that runs.
    let (id, stream) = (reader.id, reader.stream);
    world.cluster.detach(world.now, id, stream);
    let mut reader = world.attend(&hello("reader"));
    let mut batch = arrived(3, vec![request(30, 9000, 0)]);
    if let Kind::BatchArrived(said) = &mut batch {
        said.started = true;
    }
    world.snapshot(&mut reader, vec![batch, reads(1, 3, 30)]);
    world.settle_and_read(&mut [&mut reader]);
    assert!(!reader.replica.held.contains(&1), "it blocks a GPU");
    world.cluster.audit().expect("the books agree");
}

#[test]
fn a_fetch_that_crosses_the_end_of_its_batch_is_no_offence() {
    let mut world = World::new();
    let (_victim, mut reader) = waiting_reader(&mut world, 1);
    world.report(&mut reader, vec![finished(1), reads(9, 1, 10)]);
    world.settle_and_read(&mut [&mut reader]);
    assert!(
        reader.replica.refusals.is_empty(),
        "{:?}",
        reader.replica.refusals
    );
}

#[test]
fn addresses_come_and_go_without_the_rest_of_what_a_host_said() {
    let mut world = World::new();
    let (victim, mut reader) = waiting_reader(&mut world, 2);
    // Its successor under another name comes before it is forgotten.
    let mut successor = hello("successor");
    successor.ports[0].addresses = vec![ADDRESS.to_vec()];
    let successor = world.attend(&successor);
    let owner = |world: &World| {
        let port = world.cluster.addresses.get(&(0, ADDRESS));
        port.and_then(|port| world.cluster.port_hosts[port.0 as usize])
    };
    assert_eq!(owner(&world), Some(victim.id));
    let mut moved = hello("victim");
    moved.ports[0].addresses = vec![vec![0xcd; 16]];
    let again = world.attend(&moved);
    assert_eq!((again.id, owner(&world)), (victim.id, Some(successor.id)));
    assert_eq!(world.cluster.addresses.len(), 2);
    // What it said of itself before holds: the reader's fetch waits at its port still.
    world.settle_and_read(&mut [&mut reader]);
    assert!(reader.replica.held.contains(&2));
    world.cluster.audit().expect("the books agree");
}

#[test]
fn what_a_snapshot_does_not_mention_is_gone() {
    let mut world = World::new();
    let mut a = world.join("a");
    world.report(&mut a, vec![arrived(1, vec![request(11, 900, 0)])]);
    world.report(
        &mut a,
        vec![arrived(2, vec![request(21, 500, 9), request(22, 500, 9)])],
    );
    world.settle_and_read(&mut [&mut a]);
    let (id, stream) = (a.id, a.stream);
    world.cluster.detach(world.now, id, stream);
    let mut a = world.attend(&hello("a"));
    assert_eq!(a.id, id, "the same host");
    world.snapshot(&mut a, vec![arrived(2, vec![request(21, 500, 9)])]);
    world.settle_and_read(&mut [&mut a]);
    assert_eq!(a.replica.sigma(), [2]);
    let (counters, _) = world.cluster.counters();
    assert_eq!((counters.batches, counters.requests), (1, 1));
}

#[test]
fn a_lost_host_is_forgotten_after_its_grace_and_the_next_member_owns_its_batches() {
    let mut world = World::new();
    let (mut a, mut b) = (world.join("a"), world.join("b"));
    world.report(&mut a, vec![arrived(1, vec![request(11, 900, 10)])]);
    world.report(&mut a, vec![arrived(2, vec![request(21, 900, 10)])]);
    world.report(&mut b, vec![arrived(1, vec![request(11, 900, 10)])]);
    world.settle();
    world.cluster.detach(world.now, a.id, a.stream);
    world.now = world.now + Span::from_millis(99);
    world.cluster.poll(world.now);
    assert_eq!(world.cluster.counters().0.batches, 2);
    world.now = world.now + Span::from_millis(2);
    world.cluster.poll(world.now);
    let (counters, _) = world.cluster.counters();
    assert_eq!(
        (counters.hosts, counters.batches, counters.requests),
        (1, 1, 1)
    );
    world.report(&mut b, vec![finished(1)]);
    assert_eq!(world.cluster.counters().0.batches, 0);
}

#[test]
fn a_drained_host_is_out_of_the_order_until_it_is_taken_back() {
    let mut world = World::new();
    let mut a = world.join("a");
    world.report(&mut a, vec![arrived(1, vec![request(11, 900, 10)])]);
    world.settle_and_read(&mut [&mut a]);
    assert_eq!(world.drain("a", true), Ok(1));
    world.read(&mut a);
    assert!(a.replica.drained);
    world.report(&mut a, vec![arrived(2, vec![request(21, 900, 10)])]);
    assert_eq!(world.cluster.counters().0.batches, 0);
    assert_eq!(world.drain("a", false), Ok(0));
    world.read(&mut a);
    assert!(!a.replica.drained && a.replica.snapshot_wanted);
    world.snapshot(&mut a, vec![arrived(2, vec![request(21, 900, 10)])]);
    world.settle_and_read(&mut [&mut a]);
    assert_eq!(a.replica.sigma(), [2]);
}

#[test]
fn an_old_daemon_gets_only_full_orders_and_an_unknown_one_is_turned_away_with_a_reason() {
    let mut world = World::new();
    let mut old = hello("old");
    old.capabilities = vec![99];
    let mut daemon = world.attend(&old);
    world.snapshot(&mut daemon, vec![arrived(1, vec![request(11, 900, 10)])]);
    world.settle_and_read(&mut [&mut daemon]);
    world.report(&mut daemon, vec![arrived(2, vec![request(21, 500, 10)])]);
    world.settle_and_read(&mut [&mut daemon]);
    assert_eq!(daemon.replica.sigma(), [2, 1]);
    assert_eq!(daemon.replica.deltas, 0);

    let mut newer = hello("new");
    (newer.protocol, newer.protocol_min) = (9, 8);
    let refused = world
        .cluster
        .attend(world.now, &newer)
        .expect_err("refused");
    assert_eq!(refused.reason(), v1::GoodbyeReason::Incompatible);
    assert!(refused.detail.contains("8 to 9"));
}

#[test]
fn a_summary_says_what_has_happened_since_the_one_before() {
    let mut world = World::new();
    let (mut a, mut b) = (world.join("a"), world.join("b"));
    world.settle_and_read(&mut [&mut a, &mut b]);
    let nobody_pruned = v1::SetPolicyRequest {
        change: Some(v1::Policy {
            drop_budget: Some(0),
            ..v1::Policy::default()
        }),
        ..v1::SetPolicyRequest::default()
    };
    let set = world.cluster.set_policy(world.now, &nobody_pruned, "me");
    assert!(set.is_ok());
    world.settle_and_read(&mut [&mut a, &mut b]);
    world.cluster.summary();
    let nothing = world.cluster.summary();
    assert_eq!(
        (
            nothing.runs,
            nothing.ranks_changed,
            nothing.hosts_told,
            nothing.took_ns
        ),
        (0, 0, 0, 0)
    );
    let late = request(21, 1, RATE);
    world.report(
        &mut a,
        vec![
            arrived(1, vec![request(11, 900, 10)]),
            arrived(2, vec![late]),
        ],
    );
    world.settle_and_read(&mut [&mut a, &mut b]);
    world.cluster.rest(world.now, Span(700));
    world.report(&mut a, vec![arrived(3, vec![request(31, 900, 10)])]);
    world.settle();
    world.cluster.rest(world.now, Span(300));
    world.settle_and_read(&mut [&mut a]);
    let told = world.cluster.summary();
    assert_eq!((told.batches, told.requests, told.runs), (3, 3, 2));
    assert_eq!(
        (told.ranks_changed, told.hosts_told),
        (3, 1),
        "b is in none of them"
    );
    assert_eq!(
        (told.took_ns, told.infeasible),
        (1000, 3),
        "those behind it are late, too"
    );
    assert_eq!(told.epoch, a.replica.applied);
}

#[test]
fn an_estimated_end_moves_on_while_the_batch_waits_and_is_never_in_the_past() {
    let mut world = World::new();
    let mut a = world.join("a");
    let arrival = BatchArrived {
        batch: 1,
        compute_ns: 50 * MS,
        requests: vec![request(11, 900, RATE / 100)],
        ..BatchArrived::default()
    };
    world.report(&mut a, vec![Kind::BatchArrived(arrival)]);
    world.settle_and_read(&mut [&mut a]);
    let finish = |world: &World| {
        let listed = world
            .cluster
            .list_batches(world.now, &v1::ListBatchesRequest::default());
        listed.batches[0].finish_remaining_ns.expect("estimated") / MS as i64
    };
    assert_eq!(finish(&world), 60);
    world.now = world.now + Span::from_millis(500);
    assert_eq!(finish(&world), 60, "it has not begun");
    world.report(
        &mut a,
        vec![Kind::BatchStarted(v1::BatchStarted { batch: 1 })],
    );
    world.now = world.now + Span::from_millis(20);
    assert_eq!(finish(&world), 40);
    world.now = world.now + Span::from_millis(500);
    assert_eq!(finish(&world), 0);
}

#[test]
fn a_drained_host_is_shown_with_who_took_it_out_and_why_and_whether_it_is_there() {
    let mut world = World::new();
    let a = world.join("a");
    assert_eq!(world.drain("a", true), Ok(0));
    world.now = world.now + Span::from_millis(30);
    let note = |world: &World| world.cluster.list_hosts(world.now).hosts[0].drain.clone();
    let told = note(&world).expect("drained");
    assert_eq!(
        (told.author.as_str(), told.comment.as_str()),
        ("me", "a reason")
    );
    assert_eq!(told.age_ns, 30 * MS);
    let changed = world.cluster.host_changed("a");
    assert!(changed.connected && changed.drained);
    world.cluster.detach(world.now, a.id, a.stream);
    assert!(!world.cluster.host_changed("a").connected);
    let asked = v1::DrainRequest {
        host: "a".into(),
        drain: true,
        comment: "x".repeat(1 << 20),
    };
    assert!(world.cluster.drain(world.now, &asked, "me").is_ok());
    assert!(note(&world).expect("drained").comment.len() <= 512);
    assert_eq!(world.drain("a", false), Ok(0));
    assert_eq!(note(&world), None);
}

#[test]
fn an_explanation_is_in_units_that_people_read() {
    let mut world = World::new();
    let mut a = world.join("a");
    world.report(&mut a, vec![arrived(1, vec![request(11, 900, 5 << 20)])]);
    world.settle_and_read(&mut [&mut a]);
    let wanted = v1::ExplainRequest {
        batch: 1,
        ..Default::default()
    };
    let text = world
        .cluster
        .explain(world.now, &wanted)
        .expect("there")
        .text
        .join(" ");
    assert!(
        text.contains("5 MiB of it") && text.contains("at 8 Gbit/s"),
        "{text}"
    );
    assert!(
        text.contains("in 890 ms") && text.contains("MiB more"),
        "{text}"
    );
}
