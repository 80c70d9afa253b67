//! Tests that no daemon can harm others, and that no sequence of reports breaks the accounts.

use proptest::prelude::*;

use super::*;

fn reasons(daemon: &Daemon) -> Vec<RefusalReason> {
    let refusals = daemon.replica.refusals.iter();
    refusals.map(v1::Refusal::reason).collect()
}

#[test]
fn nobody_ends_or_changes_what_is_anothers() {
    let (mut world, [mut a, mut evil]) = World::of(["a", "evil"]);
    world.report(&mut a, [arrived(1, [request(11, 500, 10)])]);
    world.settle_and_read(&mut [&mut a]);
    let before = a.replica.ranks.clone();
    // The host takes no part in the batch.
    world.report(&mut evil, [finished(1)]);
    world.report(&mut evil, [ended(11)]);
    // The host takes part in the batch and invents requests that are due at once.
    world.report(
        &mut evil,
        [arrived(1, [request(11, 1, 10), request(12, 1, 10)]), ended(11), started(1), finished(1)],
    );
    world.settle_and_read(&mut [&mut a, &mut evil]);
    assert_eq!(a.replica.ranks, before);
    assert_eq!(reasons(&evil), [RefusalReason::NotYours; 2], "{:?}", evil.replica.refusals);
    let listed = world.batches();
    assert!(!listed[0].started, "left aside");
    assert_eq!(world.counters().batches, 1);
}

#[test]
fn a_member_that_its_tenant_trusts_may_add_requests_with_deadlines() {
    let tenant = TenantConfig {
        name: "one".into(),
        hosts: vec!["*".into()],
        trust_members: true,
        ..TenantConfig::default()
    };
    let tenants = Tenants::new(vec![tenant]);
    let mut world = World::with(ClusterSettings { tenants, ..ClusterSettings::default() });
    let (mut a, mut b) = (world.join("a"), world.join("b"));
    world.report(&mut a, [arrived(1, [request(11, 900, 0)])]);
    world.settle_and_read(&mut [&mut a]);
    let before = a.replica.ranks[&1];
    world.report(&mut b, [arrived(1, [request(12, 100, 0)])]);
    world.settle_and_read(&mut [&mut a]);
    assert!(a.replica.ranks[&1] < before);
}

#[test]
fn hosts_of_two_tenants_never_meet() {
    let tenant = |name: &str| TenantConfig {
        name: name.into(),
        hosts: vec![format!("{name}-*")],
        ..TenantConfig::default()
    };
    let mut world = World::with(ClusterSettings {
        tenants: Tenants::new(vec![tenant("a"), tenant("b")]),
        ..ClusterSettings::default()
    });
    let (mut a, mut b) = (world.join("a-1"), world.join("b-1"));
    world.report(&mut a, [arrived(1, [request(11, 500, 10)])]);
    world.report(&mut b, [arrived(1, [request(11, 100, 10)]), finished(1)]);
    world.settle_and_read(&mut [&mut a, &mut b]);
    assert_eq!((a.replica.sigma(), b.replica.sigma()), (vec![1], vec![]));
    assert!(world.cluster.attend(world.now, &hello("c-1")).is_err());
}

#[test]
fn a_tenant_at_its_drop_budget_has_nobody_more_pruned_while_another_goes_on() {
    let tenant = |name: &str, drop_budget| TenantConfig {
        name: name.into(),
        hosts: vec![format!("{name}-*")],
        drop_budget,
        ..TenantConfig::default()
    };
    let tenants =
        Tenants::new(vec![tenant("doomed", Some(2)), tenant("b", None), tenant("c", Some(0))]);
    let mut world = World::with(ClusterSettings { tenants, ..ClusterSettings::default() });
    let (mut doomed, mut b) = (world.join("doomed-1"), world.join("b-1"));
    let mut c = world.join("c-1");
    let late = |first: u64| (first..first + 5).map(|it| request(it, -1, 1000));
    for round in 1..=3 {
        for daemon in [&mut doomed, &mut b, &mut c] {
            world.report(daemon, [arrived(round, late(10 * round))]);
        }
        world.settle_and_read(&mut [&mut doomed, &mut b, &mut c]);
        let pruned = [&doomed, &b, &c].map(|daemon| daemon.replica.pruned.len() as u64);
        assert_eq!(pruned, [2, 5 * round, 0]);
    }
    let told = world.cluster.list_hosts(world.now).tenants;
    let told = told.iter().map(|it| (it.tenant.as_str(), it.drop_budget, it.requests, it.pruned));
    let expected = [("doomed", Some(2), 15, 2), ("b", None, 15, 15), ("c", Some(0), 15, 0)];
    assert_eq!(told.collect::<Vec<_>>(), expected);
    // The end of a pruned request makes room for another.
    let first = *doomed.replica.pruned.keys().next().expect("two");
    world.report(&mut doomed, [ended(first), arrived(4, late(40))]);
    world.settle_and_read(&mut [&mut doomed]);
    assert_eq!(doomed.replica.pruned.len(), 2);
    assert!(!doomed.replica.pruned.contains_key(&first));
}

#[test]
fn a_flood_is_capped_and_leaves_room_for_others() {
    let limits = Limits { hosts_max: 4, batches_max: 40, requests_max: 80, ..Limits::default() };
    let mut world = World::with(ClusterSettings { limits, ..ClusterSettings::default() });
    let (mut evil, mut a) = (world.join("evil"), world.join("a"));
    for batch in 1..1000 {
        let requests = vec![request(batch * 2, 1, 1), request(batch * 2 + 1, 1, 1)];
        world.report(&mut evil, [arrived(batch, requests)]);
    }
    world.report(&mut a, [arrived(5000, [request(50_000, 500, 1)])]);
    world.settle_and_read(&mut [&mut a, &mut evil]);
    assert_eq!(a.replica.sigma(), [5000]);
    assert!(evil.replica.sigma().len() <= 25);
    assert!(reasons(&evil).iter().all(|&reason| reason == RefusalReason::Limit));
    let (counters, admission) = world.cluster.counters();
    assert!(counters.batches <= 40 && counters.requests <= 80);
    assert_eq!(admission.batches_forgotten, 0);
}

#[test]
fn ports_are_the_hosts_own_and_a_report_out_of_sequence_ends_the_stream() {
    let (mut world, [mut a]) = World::of(["a"]);
    let mut load = request(11, 500, 1);
    load.loads[0].port = 7;
    world.report(&mut a, [arrived(1, [load])]);
    world.settle_and_read(&mut [&mut a]);
    assert_eq!(reasons(&a), [RefusalReason::Invalid]);
    let report = Report { sequence: 9, ..Report::default() };
    let broken = world.cluster.report(world.now, a.id, a.stream, report);
    assert_eq!(broken.expect_err("ended").reason(), v1::GoodbyeReason::Protocol);
}

/// An honest daemon can't know that another host announced the batch first.
#[test]
fn a_member_that_says_what_only_the_owner_may_is_left_aside_and_not_refused() {
    let (mut world, [mut a, mut b]) = World::of(["a", "b"]);
    world.report(&mut a, [arrived(1, [request(11, 500, 10)])]);
    world.report(&mut b, [arrived(1, [request(11, 500, 10)])]);
    let progress = |layer| Kind::BatchProgress(v1::BatchProgress { batch: 1, layer });
    let says = |port| {
        vec![
            started(1),
            progress(7),
            Kind::BytesCompleted(v1::BytesCompleted { request: 11, port, bytes: 4 }),
        ]
    };
    world.report(&mut b, says(0));
    // b reported no load of this port.
    world.report(&mut b, says(1));
    let progressed = |world: &World| {
        let listed = world.batches();
        let batch = &listed[0];
        (batch.started, batch.layer)
    };
    world.settle_and_read(&mut [&mut a, &mut b]);
    assert_eq!(progressed(&world), (false, 0), "its word does not hold");
    world.report(&mut a, [progress(3)]);
    assert_eq!(progressed(&world), (true, 3));
    // The end of the batch is on its way to b, or has overtaken b's report.
    world.report(&mut a, [finished(1)]);
    world.report(&mut b, says(0));
    world.report(&mut b, [fetched(9)]);
    world.settle_and_read(&mut [&mut a, &mut b]);
    assert_eq!(b.replica.refusals, []);
    // Events of a host that takes no part are refused.
    world.report(&mut a, [arrived(2, [request(21, 500, 10)])]);
    let completed = v1::BytesCompleted { request: 21, ..Default::default() };
    world.report(&mut b, [started(2), Kind::BytesCompleted(completed)]);
    world.settle_and_read(&mut [&mut b]);
    assert_eq!(reasons(&b), [RefusalReason::NotYours]);
    assert_eq!(b.replica.refusals[0].count, 2);
}

#[test]
fn what_makes_much_work_counts_for_much() {
    let (mut world, [mut a, mut b]) = World::of(["a", "b"]);
    world.cluster.take_work();
    let many: Vec<_> = (1..=2000).map(|id| request(id, 900, 1)).collect();
    world.report(&mut a, [arrived(1, many)]);
    let announced = world.cluster.take_work();
    assert!(announced >= 1000, "{announced}");
    world.report(&mut a, [arrived(1, [])]);
    assert_eq!(world.cluster.take_work(), 2, "nothing is walked through");
    world.resync(&a);
    let resync = world.cluster.take_work();
    assert!(resync >= 250, "{resync}");
    world.report(&mut b, [arrived(1, [])]);
    let joined = world.cluster.take_work();
    world.report(&mut b, [finished(1)]);
    let left = world.cluster.take_work();
    world.snapshot(&mut a, [arrived(1, [])]);
    let swept = world.cluster.take_work();
    assert!([joined, left, swept].iter().all(|&work| work >= 250), "{joined} {left} {swept}");
}

#[test]
fn numbers_as_large_as_they_come_break_no_sum() {
    let mut world = World::new();
    let mut greeting = hello("a");
    greeting.ports[0].rate_bytes_per_s = u64::MAX;
    let mut a = world.attend(&greeting);
    world.snapshot(&mut a, []);
    let extreme = |id, remaining_ns, bytes| RequestLoad {
        request: id,
        remaining_ns: Some(remaining_ns),
        loads: vec![PortBytes { port: 0, bytes }],
    };
    let arrival = |batch, compute_ns| {
        Kind::BatchArrived(BatchArrived {
            batch,
            compute_ns,
            requests: vec![
                extreme(batch, i64::MAX, u64::MAX),
                extreme(batch - 1, i64::MIN, u64::MAX),
            ],
            queued_behind: Some(u64::MAX),
            layers: u32::MAX,
            ..BatchArrived::default()
        })
    };
    world.report(&mut a, [arrival(u64::MAX, 0), arrival(u64::MAX / 2, u64::MAX)]);
    let far = vec![extreme(7, i64::MAX, 5)];
    world.report(&mut a, [arrived(3, far)]);
    let load = v1::PortLoad {
        rate_bytes_per_s: Some(u64::MAX),
        completed_flows: u64::MAX,
        missed_flows: u64::MAX,
        queued_bytes: u64::MAX,
        foreign_bytes_per_s: u64::MAX,
        load_permille: u32::MAX,
        queued_level_bytes: vec![u64::MAX; 5000],
        ..v1::PortLoad::default()
    };
    world.report(&mut a, [Kind::PortLoad(load.clone()), Kind::PortLoad(load)]);
    let settings = v1::HostSettings {
        level_dscp: vec![u32::MAX; 5000],
        marking: "é".repeat(5000),
        clock_ahead_ns: i64::MIN,
        ..v1::HostSettings::default()
    };
    world.report(&mut a, [Kind::HostSettings(settings)]);
    world.settle_and_read(&mut [&mut a]);
    for batch in [3, u64::MAX, u64::MAX / 2] {
        let told = world.explain(batch);
        assert!(!told.text.is_empty());
    }
    let hosts = world.cluster.list_hosts(world.now).hosts;
    assert!(hosts[0].ports[0].queued_level_bytes.len() < 100);
    let kept = hosts[0].settings.as_ref().expect("settings");
    assert!(kept.level_dscp.len() < 100 && kept.marking.chars().count() < 100);
}

/// An action of one of three daemons, or the passing of time.
#[derive(Clone, Debug)]
enum Step {
    Say(usize, Kind),
    Snapshot(usize, Vec<Kind>),
    Reconnect(usize),
    Read(usize),
    Resync(usize),
    Drain(usize, bool),
    Wait(u64),
}

fn event() -> impl Strategy<Value = Kind> {
    let id = 0_u64..6;
    let load =
        (0_u64..12, -50_i64..900, 0_u64..RATE, 0_u32..4).prop_map(|(name, due, bytes, port)| {
            let mut load = request(name, due, bytes);
            load.loads[0].port = port;
            load
        });
    prop_oneof![
        4 => (id.clone(), proptest::collection::vec(load, 0..3), any::<bool>())
            .prop_map(|(batch, requests, started)| Kind::BatchArrived(BatchArrived {
                batch, requests, started, queued_behind: Some(batch + 1),
                ..BatchArrived::default()
            })),
        2 => id.clone().prop_map(finished),
        1 => (0_u64..12).prop_map(ended),
        1 => (0_u64..12, 0_u32..4, 0_u64..RATE).prop_map(|(request, port, bytes)| {
            Kind::BytesCompleted(v1::BytesCompleted { request, port, bytes })
        }),
        2 => (0_u64..4, id, 0_u64..12, 0_u8..4).prop_map(
            |(fetch, batch, request, victim)| Kind::FetchWanted(FetchWanted {
                fetch, batch, request, victim_address: vec![victim; 16], bytes: RATE,
            })),
        1 => (0_u64..4).prop_map(fetched),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let who = 0_usize..3;
    prop_oneof![
        12 => (who.clone(), event()).prop_map(|(who, event)| Step::Say(who, event)),
        1 => (who.clone(), proptest::collection::vec(event(), 0..4))
            .prop_map(|(who, events)| Step::Snapshot(who, events)),
        1 => who.clone().prop_map(Step::Reconnect),
        4 => who.clone().prop_map(Step::Read),
        1 => who.clone().prop_map(Step::Resync),
        1 => (who, any::<bool>()).prop_map(|(who, on)| Step::Drain(who, on)),
        4 => (0_u64..150).prop_map(Step::Wait),
    ]
}

/// Uses `PROPTEST_CASES` if it is set, and otherwise a number that every test run has time for.
fn cases() -> ProptestConfig {
    match std::env::var_os("PROPTEST_CASES") {
        Some(_) => ProptestConfig::default(),
        None => ProptestConfig::with_cases(300),
    }
}

proptest! {
    #![proptest_config(cases())]

    /// For any reports, deltas lead to the same state as a full order, and nothing is left after
    /// all hosts have gone.
    #[test]
    fn deltas_and_full_orders_agree_and_nothing_leaks(
        steps in proptest::collection::vec(step(), 0..120),
    ) {
        // Nothing is reserved, so every charge shows in the shared part.
        let limits = Limits {
            hosts_max: 64,
            batches_max: 64,
            requests_max: 64,
            loads_max: 64,
            fetches_max: 64,
            ..Limits::default()
        };
        let mut world = World::with(ClusterSettings {
            limits,
            host_grace: Span::from_millis(100),
            ..ClusterSettings::default()
        });
        let names = ["h0", "h1", "h2"];
        let mut daemons = names.map(|name| world.join(name));
        for step in steps {
            match step {
                Step::Say(who, event) => world.report(&mut daemons[who], [event]),
                Step::Snapshot(who, events) => world.snapshot(&mut daemons[who], events),
                Step::Reconnect(who) => {
                    let (id, stream) = (daemons[who].id, daemons[who].stream);
                    world.cluster.detach(world.now, id, stream);
                    daemons[who] = world.join(names[who]);
                }
                Step::Read(who) => world.read(&mut daemons[who]),
                Step::Resync(who) => world.cluster.resync(daemons[who].id, daemons[who].stream),
                Step::Drain(who, on) => {
                    let _ = world.drain(names[who], on);
                    if !on {
                        world.snapshot(&mut daemons[who], []);
                    }
                }
                Step::Wait(ms) => {
                    world.now = world.now + Span::from_millis(ms);
                    world.settle();
                }
            }
            prop_assert_eq!(world.cluster.audit(), Ok(()));
        }
        for (who, name) in names.into_iter().enumerate() {
            let _ = world.drain(name, false);
            if !daemons[who].replica.drained {
                world.read(&mut daemons[who]);
            }
        }
        for daemon in &mut daemons {
            world.report(daemon, [arrived(1, [])]);
        }
        world.settle();
        for daemon in &mut daemons {
            world.read(daemon);
            // Causes are not compared: the batch or port of a cause may have gone since it was
            // sent.
            let pruned = |replica: &Replica| Vec::from_iter(replica.pruned.keys().copied());
            let by_deltas = (daemon.replica.ranks.clone(), pruned(&daemon.replica));
            world.resync(daemon);
            world.read(daemon);
            let in_full = (daemon.replica.ranks.clone(), pruned(&daemon.replica));
            prop_assert_eq!(by_deltas, in_full);
        }
        for daemon in &daemons {
            world.detach(daemon);
        }
        world.now = world.now + Span::from_millis(200);
        world.settle();
        let (counters, admission) = world.cluster.counters();
        prop_assert_eq!((counters.hosts, counters.batches, counters.requests), (0, 0, 0));
        prop_assert_eq!(admission.batches_forgotten + admission.loads_refused, 0);
        prop_assert_eq!(world.cluster.audit(), Ok(()));
    }
}
