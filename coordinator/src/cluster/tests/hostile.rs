//! What a daemon can't do to others, and that no sequence of reports breaks the books.

use proptest::prelude::*;

use super::*;

fn reasons(daemon: &Daemon) -> Vec<RefusalReason> {
    let refusals = daemon.replica.refusals.iter();
    refusals.map(v1::Refusal::reason).collect()
}

#[test]
fn nobody_ends_or_changes_what_is_anothers() {
    let mut world = World::new();
    let (mut a, mut evil) = (world.join("a"), world.join("evil"));
    world.report(&mut a, vec![arrived(1, vec![request(11, 500, 10)])]);
    world.settle_and_read(&mut [&mut a]);
    let before = a.replica.ranks.clone();
    // Without taking part.
    world.report(&mut evil, vec![finished(1)]);
    world.report(
        &mut evil,
        vec![Kind::RequestEnded(RequestEnded { request: 11 })],
    );
    // Taking part, and inventing requests that are due at once.
    world.report(
        &mut evil,
        vec![
            arrived(1, vec![request(11, 1, 10), request(12, 1, 10)]),
            Kind::RequestEnded(RequestEnded { request: 11 }),
            Kind::BatchStarted(v1::BatchStarted { batch: 1 }),
            finished(1),
        ],
    );
    world.settle_and_read(&mut [&mut a, &mut evil]);
    assert_eq!(a.replica.ranks, before);
    assert_eq!(
        reasons(&evil),
        [RefusalReason::NotYours; 3],
        "{:?}",
        evil.replica.refusals
    );
    assert_eq!(evil.replica.refusals[2].count, 1, "the start");
    assert_eq!(world.cluster.counters().0.batches, 1);
}

#[test]
fn a_host_that_the_owner_named_may_add_requests_with_deadlines() {
    let mut world = World::new();
    let (mut a, mut b) = (world.join("a"), world.join("b"));
    let arrival = BatchArrived {
        batch: 1,
        requests: vec![request(11, 900, 0)],
        hosts: vec!["b".into()],
        ..BatchArrived::default()
    };
    world.report(&mut a, vec![Kind::BatchArrived(arrival)]);
    world.settle_and_read(&mut [&mut a]);
    let before = a.replica.ranks[&1];
    world.report(&mut b, vec![arrived(1, vec![request(12, 100, 0)])]);
    world.settle_and_read(&mut [&mut a]);
    assert!(a.replica.ranks[&1] < before);
}

#[test]
fn hosts_of_two_tenants_never_meet() {
    let tenant = |name: &str| TenantConfig {
        name: name.into(),
        hosts: vec![format!("{name}-*")],
        trust_members: false,
    };
    let mut world = World::with(Settings {
        tenants: Tenants::new(vec![tenant("a"), tenant("b")]),
        ..Settings::default()
    });
    let (mut a, mut b) = (world.join("a-1"), world.join("b-1"));
    world.report(&mut a, vec![arrived(1, vec![request(11, 500, 10)])]);
    world.report(
        &mut b,
        vec![arrived(1, vec![request(11, 100, 10)]), finished(1)],
    );
    world.settle_and_read(&mut [&mut a, &mut b]);
    assert_eq!((a.replica.sigma(), b.replica.sigma()), (vec![1], vec![]));
    assert!(world.cluster.attend(world.now, &hello("c-1")).is_err());
}

#[test]
fn a_flood_is_capped_and_leaves_room_for_others() {
    let limits = Limits {
        hosts_max: 4,
        batches_max: 40,
        requests_max: 80,
        ..Limits::default()
    };
    let mut world = World::with(Settings {
        limits,
        ..Settings::default()
    });
    let (mut evil, mut a) = (world.join("evil"), world.join("a"));
    for batch in 1..1000 {
        let requests = vec![request(batch * 2, 1, 1), request(batch * 2 + 1, 1, 1)];
        world.report(&mut evil, vec![arrived(batch, requests)]);
    }
    world.report(&mut a, vec![arrived(5000, vec![request(50_000, 500, 1)])]);
    world.settle_and_read(&mut [&mut a, &mut evil]);
    assert_eq!(a.replica.sigma(), [5000]);
    assert!(evil.replica.sigma().len() <= 25);
    assert!(
        reasons(&evil)
            .iter()
            .all(|&reason| reason == RefusalReason::Limit)
    );
    let (counters, admission) = world.cluster.counters();
    assert!(counters.batches <= 40 && counters.requests <= 80);
    assert_eq!(admission.batches_forgotten, 0);
}

#[test]
fn ports_are_the_hosts_own_and_a_report_out_of_sequence_ends_the_stream() {
    let mut world = World::new();
    let mut a = world.join("a");
    let mut load = request(11, 500, 1);
    load.loads[0].port = 7;
    world.report(&mut a, vec![arrived(1, vec![load])]);
    world.settle_and_read(&mut [&mut a]);
    assert_eq!(reasons(&a), [RefusalReason::Invalid]);
    let report = Report {
        sequence: 9,
        ..Report::default()
    };
    let broken = world.cluster.report(world.now, a.id, a.stream, report);
    assert_eq!(
        broken.expect_err("ended").reason(),
        v1::GoodbyeReason::Protocol
    );
}

/// One thing that one of three daemons does.
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
        4 => (id.clone(), proptest::collection::vec(load.clone(), 0..3), any::<bool>())
            .prop_map(|(batch, requests, started)| Kind::BatchArrived(BatchArrived {
                batch, requests, started, queued_behind: Some(batch + 1),
                hosts: if started { vec!["h1".into()] } else { Vec::new() },
                ..BatchArrived::default()
            })),
        2 => id.clone().prop_map(finished),
        2 => (id.clone(), load).prop_map(|(batch, load)| Kind::RequestJoined(RequestJoined {
            batch, request: Some(load),
        })),
        1 => (0_u64..12).prop_map(|request| Kind::RequestEnded(RequestEnded { request })),
        1 => (0_u64..12, 0_u32..4, 0_u64..RATE).prop_map(|(request, port, bytes)| {
            Kind::BytesCompleted(v1::BytesCompleted { request, port, bytes })
        }),
        2 => (0_u64..4, id, 0_u64..12, 0_usize..3, 0_u32..3).prop_map(
            |(fetch, batch, request, victim, victim_port)| Kind::FetchWanted(FetchWanted {
                fetch, batch, request, victim_host: format!("h{victim}"), victim_port, bytes: RATE,
            })),
        1 => (0_u64..4).prop_map(|fetch| Kind::FetchFinished(FetchFinished { fetch })),
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

/// `PROPTEST_CASES` if it is set, and else what every run of the tests has time for.
fn cases() -> ProptestConfig {
    match std::env::var_os("PROPTEST_CASES") {
        Some(_) => ProptestConfig::default(),
        None => ProptestConfig::with_cases(300),
    }
}

proptest! {
    #![proptest_config(cases())]

    /// Whatever is said: deltas lead where a full order would, and when all have left nothing is left.
    #[test]
    fn deltas_and_full_orders_agree_and_nothing_leaks(
        steps in proptest::collection::vec(step(), 0..120),
    ) {
        // Nothing is reserved, so every charge is seen in the shared part.
        let limits = Limits {
            hosts_max: 64,
            batches_max: 64,
            requests_max: 64,
            loads_max: 64,
            fetches_max: 64,
            ..Limits::default()
        };
        let mut world = World::with(Settings {
            limits,
            host_grace: Span::from_millis(100),
            ..Settings::default()
        });
        let names = ["h0", "h1", "h2"];
        let mut daemons = names.map(|name| world.join(name));
        for step in steps {
            match step {
                Step::Say(who, event) => world.report(&mut daemons[who], vec![event]),
                Step::Snapshot(who, events) => world.snapshot(&mut daemons[who], events),
                Step::Reconnect(who) => {
                    let (id, stream) = (daemons[who].id, daemons[who].stream);
                    world.cluster.detach(world.now, id, stream);
                    daemons[who] = world.join(names[who]);
                }
                Step::Read(who) => world.read(&mut daemons[who]),
                Step::Resync(who) => world.cluster.resync(daemons[who].id, daemons[who].stream),
                Step::Drain(who, on) => {
                    let _ = world.cluster.drain(world.now, names[who], on);
                    if !on {
                        world.snapshot(&mut daemons[who], Vec::new());
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
            let _ = world.cluster.drain(world.now, name, false);
            if !daemons[who].replica.drained {
                world.read(&mut daemons[who]);
            }
        }
        for daemon in &mut daemons {
            world.report(daemon, vec![arrived(1, Vec::new())]);
        }
        world.settle();
        for daemon in &mut daemons {
            world.read(daemon);
            let by_deltas = (daemon.replica.ranks.clone(), daemon.replica.pruned.clone());
            world.cluster.resync(daemon.id, daemon.stream);
            world.read(daemon);
            let in_full = (daemon.replica.ranks.clone(), daemon.replica.pruned.clone());
            prop_assert_eq!(by_deltas, in_full);
        }
        for daemon in &daemons {
            world.cluster.detach(world.now, daemon.id, daemon.stream);
        }
        world.now = world.now + Span::from_millis(200);
        world.settle();
        let (counters, admission) = world.cluster.counters();
        prop_assert_eq!((counters.hosts, counters.batches, counters.requests), (0, 0, 0));
        prop_assert_eq!(admission.batches_forgotten + admission.loads_refused, 0);
        prop_assert_eq!(world.cluster.audit(), Ok(()));
    }
}
