//! Tests of the cluster's rules. [`Replica`] applies orders as a daemon does.

mod charges;
mod fetches;
mod hostile;
mod replica;
mod world;

use laxity_policy::Span;
use laxity_wire::v1::{
    self, BatchArrived, FetchWanted, PortBytes, RefusalReason, Report, RequestLoad, SnapshotPiece,
    event::Event as Kind,
};

use self::replica::Replica;
use self::world::{
    ADDRESS, Daemon, MS, RATE, World, arrived, ended, fetched, finished, hello, request, started,
};
use super::ClusterSettings;
use crate::limits::Limits;
use crate::tenants::{TenantConfig, Tenants};

#[test]
fn batches_of_several_hosts_are_ordered_together_and_each_hears_of_its_own() {
    let (mut world, [mut a, mut b]) = World::of(["a", "b"]);
    world.report(&mut a, [arrived(1, [request(11, 900, 0)])]);
    world.report(&mut a, [arrived(2, [request(21, 300, 0)])]);
    world.report(&mut b, [arrived(3, [request(31, 600, 0)])]);
    world.settle_and_read(&mut [&mut a, &mut b]);
    assert_eq!(a.replica.sigma(), [2, 1]);
    assert_eq!(b.replica.sigma(), [3]);
    let key = |daemon: &Daemon, batch| daemon.replica.ranks[&batch];
    assert!(key(&a, 2) < key(&b, 3) && key(&b, 3) < key(&a, 1));
    assert_eq!(a.replica.considered, 3, "the snapshot and two reports");
}

#[test]
fn a_batch_that_two_hosts_report_is_one_and_its_loads_add_up_by_port() {
    let (mut world, [mut a, mut b]) = World::of(["a", "b"]);
    world.report(&mut a, [arrived(1, [request(11, 900, 100)])]);
    world.report(&mut b, [arrived(1, [request(11, 900, 5000)])]);
    world.settle_and_read(&mut [&mut a, &mut b]);
    assert_eq!((a.replica.sigma(), b.replica.sigma()), (vec![1], vec![1]));
    let told = world.explain(1);
    assert_eq!(told.bottleneck_bytes, 5000);
    assert_eq!(told.bottleneck.expect("a port").host, "b");
    let status = told.status.expect("there");
    assert_eq!((status.owner.as_str(), status.requests), ("a", 1));
}

#[test]
fn a_new_batch_tells_nobody_else_and_an_order_without_news_says_what_it_considered() {
    let (mut world, [mut a, mut b]) = World::of(["a", "b"]);
    world.report(&mut b, [arrived(2, [request(21, 500, 0)])]);
    world.settle_and_read(&mut [&mut a, &mut b]);
    let before = b.replica.clone();
    world.report(&mut a, [arrived(1, [request(11, 100, 0)])]);
    world.settle_and_read(&mut [&mut a, &mut b]);
    assert_eq!(b.replica, before, "b's batch keeps its key");
    world.report(&mut a, [finished(1)]);
    world.settle_and_read(&mut [&mut a]);
    assert_eq!(a.replica.considered, 3);
}

#[test]
fn a_deadline_that_is_reported_again_with_jitter_moves_no_rank() {
    let (mut world, [mut a]) = World::of(["a"]);
    world.report(&mut a, [arrived(1, [request(11, 500, 0)]), arrived(2, [request(21, 600, 0)])]);
    world.settle_and_read(&mut [&mut a]);
    let before = a.replica.ranks.clone();
    world.cluster.summary();
    // Settling takes 10 ms, by which the clock has moved on.
    world.report(&mut a, [arrived(1, [request(11, 491, 0)])]);
    world.settle_and_read(&mut [&mut a]);
    assert_eq!(world.cluster.summary().ranks_changed, 0);
    assert_eq!(a.replica.ranks, before);
}

#[test]
fn a_port_that_cannot_carry_everything_has_somebody_pruned_and_says_why() {
    let (mut world, [mut a]) = World::of(["a"]);
    let heavy = request(12, 400, RATE);
    world.report(&mut a, [arrived(1, [request(11, 400, 1000), heavy])]);
    world.settle_and_read(&mut [&mut a]);
    let pruned = a.replica.pruned.get(&12).expect("pruned");
    assert_eq!(pruned.for_batch, 1);
    assert_eq!(pruned.bottleneck.as_ref().expect("a port").port, "eth0");
    let told = world.explain(1);
    assert_eq!(told.pruned[0].request, 12);
    assert!(told.text.iter().any(|text| text.contains("12 is pruned")));

    world.report(&mut a, [ended(12)]);
    world.report(&mut a, [arrived(2, [])]);
    world.settle_and_read(&mut [&mut a]);
    assert!(a.replica.pruned.is_empty());
}

#[test]
fn a_reader_that_does_not_read_gets_one_order_with_the_newest_of_each() {
    let (mut world, [mut a]) = World::of(["a"]);
    world.settle_and_read(&mut [&mut a]);
    for round in 0..20_u64 {
        world.report(&mut a, [arrived(round + 1, [request(100 + round, 500, 0)])]);
        if round >= 5 {
            world.report(&mut a, [finished(round - 4)]);
        }
        world.settle();
    }
    let orders = a.replica.orders;
    world.read(&mut a);
    assert_eq!(a.replica.orders, orders + 1);
    assert_eq!(a.replica.sigma(), [16, 17, 18, 19, 20]);
    let counters = world.counters();
    assert!(counters.messages.coalesced_orders > 10);
}

#[test]
fn a_lost_host_is_forgotten_after_its_grace_and_the_next_member_owns_its_batches() {
    let (mut world, [mut a, mut b]) = World::of(["a", "b"]);
    world.report(&mut a, [arrived(1, [request(11, 900, 10)])]);
    world.report(&mut a, [arrived(2, [request(21, 900, 10)])]);
    world.report(&mut b, [arrived(1, [request(11, 900, 10)])]);
    world.settle();
    world.detach(&a);
    world.now = world.now + Span::from_millis(99);
    world.cluster.poll(world.now);
    assert_eq!(world.counters().batches, 2);
    world.now = world.now + Span::from_millis(2);
    world.cluster.poll(world.now);
    let counters = world.counters();
    assert_eq!((counters.hosts, counters.batches, counters.requests), (1, 1, 1));
    world.report(&mut b, [finished(1)]);
    assert_eq!(world.counters().batches, 0);
}

#[test]
fn a_forgotten_host_is_listed_as_missing_for_a_day_unless_it_comes_back() {
    let (mut world, [a, b]) = World::of(["a", "b"]);
    world.detach(&a);
    world.detach(&b);
    world.now = world.now + Span::from_millis(3_600_000);
    world.cluster.poll(world.now);
    assert_eq!(world.counters().hosts, 0);
    let listed = |world: &World| world.cluster.list_hosts(world.now).hosts;
    let hosts = listed(&world);
    let missing = hosts.iter().map(|host| (host.host.as_str(), host.connected, host.silent_ns));
    let hour_ns = Some(3_600_000_000_000);
    assert!(missing.eq([("a", false, hour_ns), ("b", false, hour_ns)]), "{hosts:?}");
    world.join("a");
    assert_eq!(listed(&world).len(), 2);
    world.now = world.now + Span::from_millis(23 * 3_600_000);
    let hosts = listed(&world);
    assert!(hosts.iter().map(|host| host.host.as_str()).eq(["a"]), "{hosts:?}");
}

#[test]
fn a_host_whose_daemon_was_stopped_is_listed_so_until_it_comes_back() {
    let (mut world, [a, b]) = World::of(["a", "b"]);
    for daemon in [&a, &b] {
        world.cluster.leaves(world.now, daemon.id, daemon.stream);
    }
    world.detach(&a);
    let left = |world: &World| -> Vec<bool> {
        let hosts = world.cluster.list_hosts(world.now).hosts;
        hosts.iter().map(|host| host.left).collect()
    };
    assert_eq!(left(&world), [true, false], "b has not ended its stream");
    world.now = world.now + Span::from_millis(3_600_000);
    world.cluster.poll(world.now);
    assert_eq!((left(&world), world.counters().hosts), (vec![true, false], 1), "a is forgotten");
    let again = world.join("a");
    world.detach(&again);
    assert_eq!(left(&world), [false, false], "this time it said nothing");
}

#[test]
fn a_host_that_is_gone_can_be_taken_off_the_list_and_others_cannot() {
    let (mut world, [mut lost]) = World::of(["lost"]);
    world.report(&mut lost, [arrived(1, [request(11, 900, 10)])]);
    let missing = world.join("missing");
    world.detach(&missing);
    world.now = world.now + Span::from_millis(3_600_000);
    world.cluster.poll(world.now);
    world.detach(&lost);
    world.join("there");
    world.drain("drained", true).expect("it may");
    for (name, why) in [("there", "connected"), ("drained", "--undo"), ("never", "known")] {
        let refused = world.cluster.forget(world.now, name).expect_err(name);
        assert!(refused.contains(why), "{refused}");
    }
    for name in ["lost", "missing"] {
        world.cluster.forget(world.now, name).expect("it is gone");
    }
    world.cluster.audit().expect("no trace of its reports");
    assert_eq!(world.counters().batches, 0);
    let hosts = world.cluster.list_hosts(world.now).hosts;
    assert!(hosts.iter().map(|host| host.host.as_str()).eq(["drained", "there"]), "{hosts:?}");
}

#[test]
fn of_many_missing_hosts_those_that_left_last_are_remembered() {
    let mut world = World::new();
    for n in 0..1100 {
        let host = world.join(&format!("{n:04}"));
        world.detach(&host);
        world.now = world.now + Span::from_millis(200);
        world.cluster.poll(world.now);
    }
    let hosts = world.cluster.list_hosts(world.now).hosts;
    assert_eq!((hosts.len(), hosts[0].host.as_str()), (1000, "0100"));
}

#[test]
fn a_refusal_is_listed_with_its_age() {
    let (mut world, [mut a, mut b]) = World::of(["a", "b"]);
    world.report(&mut a, [arrived(1, [request(11, 900, 10)])]);
    world.report(&mut b, [started(1)]);
    world.now = world.now + Span::from_millis(5);
    let hosts = world.cluster.list_hosts(world.now).hosts;
    let refused = hosts.iter().map(|host| (host.refused_events, host.refused_ns));
    assert!(refused.eq([(0, None), (1, Some(5_000_000))]), "{hosts:?}");
}

#[test]
fn a_summary_says_what_has_happened_since_the_one_before() {
    let (mut world, [mut a, mut b]) = World::of(["a", "b"]);
    world.settle_and_read(&mut [&mut a, &mut b]);
    let nobody_pruned = v1::SetPolicyRequest {
        change: Some(v1::Policy { drop_budget: Some(0), ..v1::Policy::default() }),
        ..v1::SetPolicyRequest::default()
    };
    let set = world.cluster.plan_policy(world.now, &nobody_pruned, "me").expect("valid");
    world.cluster.apply(world.now, set);
    world.settle_and_read(&mut [&mut a, &mut b]);
    world.cluster.summary();
    let nothing = world.cluster.summary();
    assert_eq!(
        (nothing.runs, nothing.ranks_changed, nothing.hosts_told, nothing.took_ns),
        (0, 0, 0, 0)
    );
    let late = request(21, 1, RATE);
    world.report(&mut a, [arrived(1, [request(11, 900, 10)]), arrived(2, [late])]);
    world.settle_and_read(&mut [&mut a, &mut b]);
    world.cluster.rest(world.now, Span(700));
    world.report(&mut a, [arrived(3, [request(31, 900, 10)])]);
    world.settle();
    world.cluster.rest(world.now, Span(300));
    world.settle_and_read(&mut [&mut a]);
    let told = world.cluster.summary();
    assert_eq!((told.batches, told.requests, told.runs), (3, 3, 2));
    assert_eq!((told.ranks_changed, told.hosts_told), (3, 1), "b is in none of them");
    assert_eq!((told.took_ns, told.infeasible), (1000, 3), "those behind it are late, too");
    assert_eq!(told.epoch, a.replica.applied);
}

#[test]
fn an_estimated_end_moves_on_while_the_batch_waits_and_is_never_in_the_past() {
    let (mut world, [mut a]) = World::of(["a"]);
    let arrival = BatchArrived {
        batch: 1,
        compute_ns: 50 * MS,
        requests: vec![request(11, 900, RATE / 100)],
        ..BatchArrived::default()
    };
    world.report(&mut a, [Kind::BatchArrived(arrival)]);
    world.settle_and_read(&mut [&mut a]);
    let finish = |world: &World| {
        let listed = world.batches();
        listed[0].finish_remaining_ns.expect("estimated") / MS as i64
    };
    assert_eq!(finish(&world), 60);
    world.now = world.now + Span::from_millis(500);
    assert_eq!(finish(&world), 60, "it has not begun");
    world.report(&mut a, [started(1)]);
    world.now = world.now + Span::from_millis(20);
    assert_eq!(finish(&world), 40);
    world.now = world.now + Span::from_millis(500);
    assert_eq!(finish(&world), 0);
}

#[test]
fn a_drained_host_is_shown_with_who_took_it_out_and_why_and_whether_it_is_there() {
    let (mut world, [mut a]) = World::of(["a"]);
    assert_eq!(world.drain("a", true), Ok(0));
    world.report(&mut a, [arrived(2, [request(21, 900, 10)])]);
    assert_eq!(world.counters().batches, 0, "what it reports does not count");
    world.now = world.now + Span::from_millis(30);
    let note = |world: &World| world.cluster.list_hosts(world.now).hosts[0].drain.clone();
    let told = note(&world).expect("drained");
    assert_eq!((told.author.as_str(), told.comment.as_str()), ("me", "a reason"));
    assert_eq!(told.age_ns, 30 * MS);
    let changed = world.cluster.host_changed("a");
    assert!(changed.connected && changed.drained);
    world.detach(&a);
    assert!(!world.cluster.host_changed("a").connected);
    let asked = v1::DrainRequest { host: "a".into(), drain: true, comment: "x".repeat(1 << 20) };
    let change = world.cluster.plan_drain(world.now, &asked, "me").expect("valid");
    world.cluster.apply(world.now, change);
    assert!(note(&world).expect("drained").comment.len() <= 512);
    assert_eq!(world.drain("a", false), Ok(0));
    assert_eq!(note(&world), None);
}

#[test]
fn a_host_that_says_hello_in_a_loop_is_refused_for_a_while_and_others_are_welcome() {
    let mut world = World::new();
    let said = |world: &mut World, host| world.cluster.attend(world.now, &hello(host)).is_ok();
    let welcome = (0..9).filter(|_| said(&mut world, "a")).count();
    assert_eq!((welcome, world.counters().messages.refused_hellos), (4, 5));
    assert!(said(&mut world, "b"));
    world.now = world.now + Span::from_millis(125);
    assert!(said(&mut world, "a") && !said(&mut world, "a"), "eight a second");
}

#[test]
fn an_explanation_is_in_units_that_people_read() {
    let (mut world, [mut a]) = World::of(["a"]);
    world.report(&mut a, [arrived(1, [request(11, 900, 5 << 20)])]);
    world.settle_and_read(&mut [&mut a]);
    let wanted = v1::ExplainRequest { batch: 1, ..Default::default() };
    let text = world.cluster.explain(world.now, &wanted).expect("there").text.join(" ");
    assert!(text.contains("5 MiB of it") && text.contains("at 8 Gbit/s"), "{text}");
    assert!(text.contains("in 890 ms") && text.contains("MiB more"), "{text}");
}
