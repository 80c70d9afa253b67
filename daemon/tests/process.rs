//! Tests of the real binary with real clients, and of their flows.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

mod support;

use std::time::{Duration, Instant};

use laxity_client::{Client, Direction, Flow, Hint, Lane, Options, Stage, Ticket};
use laxity_shm::record::Record;
use laxity_wire::{AheadStatus, WouldStatus};
use support::{ByHand, Laxityd, SMALL, SOON, eventually, flow, goes_scheduled, send, take, until};

#[test]
fn a_flow_is_permitted_in_chunks_each_byte_once_and_status_and_metrics_say_so() {
    let daemon = Laxityd::start(SMALL);
    let (_client, mut lane) = daemon.worker("worker");
    let permits = send(&mut lane, &flow(Stage::P2d, 1 << 20));
    assert_eq!(permits.iter().map(|g| g.bytes).sum::<u64>(), 1 << 20);
    assert!(permits.len() >= 4, "a window of four chunks allows no fewer permits than {permits:?}");
    assert!(permits.iter().all(|g| !g.bypassed && g.level > 0));

    let status = eventually("the last completion is counted", || {
        let status = daemon.status();
        (status.totals.completed_bytes == 1 << 20).then_some(status)
    });
    assert_eq!(status.policy, "laxity");
    assert_eq!(status.mode, "enforce");
    assert_eq!(status.totals.permitted_bytes, 1 << 20);
    assert_eq!(status.totals.bypassed_bytes, 0);
    assert_eq!(status.clients.len(), 1);
    assert_eq!(status.clients[0].name, "worker");
    assert_eq!(status.clients[0].pid, std::process::id());
    assert_eq!(status.clients[0].flows, 0);
    assert_eq!(status.ports.len(), 2);
    let egress = &status.ports[0];
    assert_eq!((egress.name.as_str(), egress.direction.as_str()), ("eth0", "egress"));
    assert_eq!(egress.rate_bytes_per_s, 125_000_000);
    assert_eq!(egress.in_flight_bytes, 0);
    let p2d = egress.stages.iter().find(|stage| stage.stage == "p2d").unwrap();
    assert_eq!((p2d.submitted_bytes, p2d.permitted_bytes), (1 << 20, 1 << 20));
    assert_eq!(egress.permitted.iter().map(|p| p.bytes).sum::<u64>(), 1 << 20);

    until("the metrics follow", || {
        daemon.metric("laxity_completed_bytes_total", "p2d") == f64::from(1 << 20)
    });
    assert_eq!(daemon.metric("laxity_permitted_bytes_total", "egress"), f64::from(1 << 20));
    assert_eq!(daemon.metric("laxity_attached_clients", ""), 1.0);
    assert_eq!(daemon.metric("laxity_wait_seconds_count", "p2d"), 1.0);
}

#[test]
fn collectives_of_an_idle_port_go_out_on_credit_after_the_first() {
    let daemon = Laxityd::start(SMALL);
    let (_client, mut lane) = daemon.worker("rank");
    for _ in 0..200 {
        send(&mut lane, &flow(Stage::Collective, 1000));
        std::thread::sleep(Duration::from_micros(50));
    }
    let status = eventually("all is completed", || {
        let status = daemon.status();
        (status.totals.completed_bytes == 200_000).then_some(status)
    });
    assert!(status.totals.credited_bytes > 0, "no credit was ever used");
    assert_eq!(status.totals.permitted_bytes, 200_000);
    assert_eq!(status.totals.garbage_records, 0);
    assert_eq!(status.ports[0].in_flight_bytes, 0);
}

#[test]
fn a_higher_flow_of_another_client_overtakes_a_lower_one_that_waits() {
    let daemon = Laxityd::start(&format!("policy = \"two_class\"\n{SMALL}"));
    let (low, high) = (daemon.client("low"), daemon.client("high"));
    let (mut low_lane, mut high_lane) = (low.lane(), high.lane());
    // The flow fills the window, waits with the rest and completes nothing.
    let mut bulk = low_lane.submit(&flow(Stage::P2d, 10 << 20));
    take(&mut low_lane, &mut bulk, 256 << 10);
    // Lower levels in flight do not count against the window of the collective.
    let mut urgent = high_lane.submit(&flow(Stage::Collective, 64 << 10));
    let permit = high_lane.wait(&mut urgent);
    assert_eq!((permit.bytes, permit.last, permit.bypassed), (64 << 10, true, false));
    let port = &daemon.status().ports[0];
    assert_eq!((port.waiting_flows, port.in_flight_bytes), (1, (256 + 64) << 10));
    assert!(low_lane.poll(&mut bulk).is_none());
}

#[test]
fn a_collective_without_a_batch_has_the_urgency_of_the_batch_that_its_process_computes() {
    let daemon = Laxityd::start(SMALL);
    let (engine, nccl) = (daemon.client("engine"), daemon.client("engine/nccl"));
    let (mut hints, mut lane) = (engine.lane(), nccl.lane());
    let now = laxity_shm::sleep::now_ns();
    let mut announce = |batch: u64, within: Duration| {
        hints.hint(Hint::BatchBegin { batch, layers: 8, layer_time_ns: 1_000_000 });
        hints.hint(Hint::RequestJoin {
            batch,
            request: batch * 10,
            deadline_ns: now + within.as_nanos() as u64,
            bytes: 1 << 20,
        });
    };
    announce(5, Duration::from_secs(60));
    announce(6, Duration::from_secs(600));
    // The process id of both clients is this test's.
    hints.hint(Hint::LayerBegin { batch: 5, layer: 1 });
    let loose = Flow { batch: 6, ..flow(Stage::Collective, 10 << 20) };
    // The flow fills the window and waits with the rest.
    let mut bulk = lane.submit(&loose);
    take(&mut lane, &mut bulk, 256 << 10);
    until("the hints are heard before what follows", || {
        daemon.status().totals.submitted_bytes == 10 << 20
    });
    let mut own = lane.submit(&flow(Stage::Collective, 64 << 10));
    lane.complete(&bulk, 64 << 10);
    let permit = lane.wait(&mut own);
    assert_eq!((permit.bytes, permit.bypassed), (64 << 10, false));
    assert!(lane.poll(&mut bulk).is_none(), "the looser one went first");
}

#[test]
fn observe_accounts_for_bytes_and_delays_none() {
    let daemon = Laxityd::start(&format!("mode = \"observe\"\n{SMALL}"));
    let client = daemon.attach("worker");
    let mut lane = client.lane();
    // The first flow is much larger than the window, completes nothing, and still goes out. At 1
    // Gbit/s it takes a quarter of a second. The others would have waited meanwhile, and the
    // collective would have gone ahead of those that still wait then.
    let first = (Stage::P2d, 30 << 20);
    let others = [(Stage::P2d, 1 << 20); 16].into_iter().chain([(Stage::Collective, 1 << 16)]);
    let mut tickets = Vec::new();
    for (stage, bytes) in [first].into_iter().chain(others) {
        let mut ticket = lane.submit(&flow(stage, bytes));
        let permit = lane.poll(&mut ticket).unwrap();
        assert_eq!((permit.bytes, permit.last, permit.bypassed), (bytes, true, false));
        tickets.push((ticket, bytes));
    }
    let all: u64 = tickets.iter().map(|(_, bytes)| bytes).sum();
    until("it is accounted", || {
        let totals = daemon.status().totals;
        totals.submitted_bytes == all && totals.permitted_bytes == 0
    });
    for (ticket, bytes) in &tickets {
        lane.complete(ticket, *bytes);
    }
    until("so is its completion", || daemon.status().totals.completed_bytes == all);
    until("the daemon says what enforcing would have done", || {
        let port = &daemon.status().ports[0];
        let would = |value: fn(&WouldStatus) -> u64| port.would.iter().map(value).sum::<u64>();
        let seen = (would(|it| it.flows), would(|it| it.delayed_flows));
        seen == (18, 16) && would(|it| it.collectives_ahead) == 1
    });
    let ahead = &daemon.status().ports[0].would_ahead;
    let whose = |it: &AheadStatus| (it.job.clone(), it.user.clone(), it.collectives, it.bytes);
    let uid = nix::unistd::getuid();
    let expected = ("worker".to_owned(), format!("uid {uid}"), 1, 1 << 16);
    assert_eq!(ahead.iter().map(whose).collect::<Vec<_>>(), [expected]);
}

#[test]
fn a_client_that_ends_leaves_no_descriptor_no_mapping_and_no_flow() {
    let daemon = Laxityd::start(SMALL);
    let (_waiting, mut waiting_lane) = daemon.worker("waiting");
    let before = eventually("the daemon has settled", || {
        let first = daemon.holdings();
        std::thread::sleep(Duration::from_millis(20));
        (first == daemon.holdings() && daemon.status().clients.len() == 1).then_some(first)
    });
    for round in 0..100 {
        let (_client, mut lane) = daemon.worker("short-lived");
        // A whole window is permitted and never completed. It must be free again after the client's
        // end.
        let mut ticket = lane.submit(&flow(Stage::P2d, 1 << 20));
        assert!(lane.wait(&mut ticket).bytes > 0, "round {round}");
        if round % 2 == 1 {
            lane.cancel(ticket);
        }
    }
    until("all of it is gone", || {
        let status = daemon.status();
        status.clients.len() == 1
            && status.ports[0].in_flight_bytes == 0
            && status.ports[0].waiting_flows == 0
            && daemon.holdings() == before
    });
    assert_eq!(send(&mut waiting_lane, &flow(Stage::P2d, 5)).len(), 1);
    assert_eq!(daemon.status().totals.attachments, 101);
}

#[test]
fn a_client_whose_memory_holds_garbage_is_released_and_nobody_else_notices() {
    let mut daemon = Laxityd::start(SMALL);
    let (_honest, mut lane) = daemon.worker("honest");
    send(&mut lane, &flow(Stage::P2d, 10));

    let mut hostile = ByHand::attach(&daemon, "hostile");
    // A valid flow comes first and fills the window.
    let sound = flow(Stage::P2d, 256 << 10);
    // The flow has more bytes than a permit can count, so its record does not decode.
    let garbage = flow(Stage::P2d, u64::MAX);
    hostile.publish(&[Record::Submit(sound), Record::Submit(garbage)]);
    until("it is released", || hostile.is_released());
    daemon.await_log("released a client for garbage");
    // The log shows the record: its sequence, its slot and its words.
    daemon.await_log("record 2 in slot 1: ");
    daemon.await_log(" ffffffffffffffff ");

    // The window is free for others again. The client stays in `status` until it hangs up.
    assert!(goes_scheduled(&mut lane, &flow(Stage::P2d, 512 << 10)));
    let status = daemon.status();
    assert_eq!(status.totals.garbage_records, 1);
    let mut clients = status.clients.iter();
    let shown = clients.find(|client| client.name == "hostile").unwrap();
    assert_eq!((shown.quarantined_lanes, shown.flows), (1, 0));
    drop(hostile);
    until("it is gone", || daemon.status().clients.len() == 1);
}

#[test]
fn clients_beyond_the_limit_are_refused_and_served_once_there_is_room() {
    let daemon = Laxityd::start(&format!("[scheduler]\nclients_max = 1\n{SMALL}"));
    let first = daemon.client("first");
    let options = Options {
        socket: daemon.socket(),
        name: "second".to_owned(),
        attach_timeout: SOON,
        reattach_every: Duration::from_millis(20),
        ..Options::default()
    };
    let second = Client::attach(options);
    assert!(!second.is_scheduled());
    let mut lane = second.lane();
    assert!(!goes_scheduled(&mut lane, &flow(Stage::P2d, 10)));
    drop(first);
    until("the second is taken in", || {
        std::thread::sleep(Duration::from_millis(20));
        goes_scheduled(&mut lane, &flow(Stage::P2d, 10))
    });
}

#[test]
fn flows_beyond_the_limit_of_a_client_and_of_unknown_nics_go_out_unscheduled() {
    let daemon = Laxityd::start(&format!("[scheduler]\nflows_per_client_max = 2\n{SMALL}"));
    let (_client, mut lane) = daemon.worker("greedy");
    let mut tickets: Vec<_> = (0..3).map(|_| lane.submit(&flow(Stage::P2d, 1 << 20))).collect();
    let third = lane.wait(&mut tickets[2]);
    assert_eq!((third.bytes, third.last), (1 << 20, true));
    for ticket in tickets {
        lane.cancel(ticket);
    }
    let elsewhere = Flow { nic: 9, direction: Direction::Ingress, ..flow(Stage::P2d, 7 << 20) };
    let mut ticket = lane.submit(&elsewhere);
    let permit = lane.wait(&mut ticket);
    assert_eq!((permit.bytes, permit.last), (7 << 20, true));
    assert_eq!(daemon.status().totals.garbage_records, 0);
    until("both are counted", || {
        let totals = daemon.status().totals;
        totals.overflowed_flows == 1 && totals.unknown_nic_flows == 1
    });
}

#[test]
fn hints_reach_admission_and_deadlines_are_judged() {
    let daemon = Laxityd::start(&format!("slo_ttft = \"1ns\"\n{SMALL}"));
    let (_client, mut lane) = daemon.worker("engine");
    lane.hint(Hint::BatchBegin { batch: 1, layers: 4, layer_time_ns: 1_000_000 });
    lane.hint(Hint::RequestJoin { batch: 1, request: 11, deadline_ns: 0, bytes: 1000 });
    lane.hint(Hint::LayerBegin { batch: 1, layer: 0 });
    let mut ticket = lane.submit(&Flow { batch: 1, request: 11, ..flow(Stage::P2d, 1000) });
    while !lane.wait(&mut ticket).last {}
    // The scheduler reads the clock every few microseconds.
    std::thread::sleep(Duration::from_millis(1));
    lane.complete(&ticket, 1000);
    let orders = eventually("an order was issued and the miss counted", || {
        let totals = daemon.status().totals;
        (totals.orders > 0 && totals.deadline_misses == 1).then_some(totals.orders)
    });
    lane.hint(Hint::ComputeEnd { batch: 1 });
    lane.hint(Hint::RequestEnd { request: 11 });
    lane.hint(Hint::BatchEnd { batch: 1 });
    until("its end changes the order", || daemon.status().totals.orders > orders);
}

#[test]
fn a_client_that_does_not_spin_is_served_by_a_daemon_that_does_not_either() {
    let daemon = Laxityd::start(&format!("[scheduler]\nspin_us = 0\n{SMALL}"));
    let clients: Vec<_> = (0..4).map(|i| daemon.client(&format!("c{i}"))).collect();
    std::thread::scope(|scope| {
        for client in &clients {
            scope.spawn(|| {
                let mut lane = client.lane();
                for _ in 0..500 {
                    assert!(goes_scheduled(&mut lane, &flow(Stage::KvReuse, 100 << 10)));
                }
            });
        }
    });
    let totals = eventually("all is completed", || {
        let totals = daemon.status().totals;
        (totals.completed_bytes == 4 * 500 * (100 << 10)).then_some(totals)
    });
    assert_eq!(totals.permitted_bytes, totals.completed_bytes);
}

/// Sends a work request. Returns whether it went on credit, without an answer of the daemon.
fn went_on_credit(lane: &mut Lane, flow: &Flow) -> bool {
    let mut ticket = Ticket::default();
    assert!(lane.submit_whole_into(&mut { *flow }, || 0, &mut ticket));
    let at_once = lane.poll(&mut ticket);
    let permit = at_once.unwrap_or_else(|| lane.wait(&mut ticket));
    assert!(permit.last && !permit.bypassed && permit.bytes == flow.bytes);
    lane.complete(&ticket, permit.bytes);
    // Without a permit of its own, the flow has no level.
    at_once.is_some() && permit.level == 0
}

#[test]
fn work_requests_of_whoever_is_alone_on_a_port_go_on_credit_until_somebody_waits() {
    let daemon = Laxityd::start(SMALL);
    let (first, second) = (daemon.client("first"), daemon.client("second"));
    let (mut lane, mut other) = (first.lane(), second.lane());
    let write = Flow { whole: true, ..flow(Stage::P2d, 4096) };
    until("a work request goes on credit", || went_on_credit(&mut lane, &write));
    let began = Instant::now();
    let share = (0..100).filter(|_| went_on_credit(&mut lane, &write)).count();
    assert!(share >= 50, "{share} of 100");
    // Flows of the same stage that can be cut may not use credit.
    let cut = flow(Stage::P2d, 4096);
    assert!(send(&mut lane, &cut).iter().all(|permit| permit.level > 0));

    // Another flow fills the window and waits, so all work requests are ordered from here on.
    let mut bulk = other.submit(&flow(Stage::KvReuse, 10 << 20));
    take(&mut other, &mut bulk, 128 << 10);
    let mut waits = || {
        let mut ticket = Ticket::default();
        assert!(lane.submit_whole_into(&mut { write }, || 0, &mut ticket));
        let waits = lane.poll(&mut ticket).is_none();
        lane.cancel(ticket);
        waits
    };
    until("the first hears of it", &mut waits);
    let waited = (0..50).filter(|_| waits()).count();
    assert_eq!(waited, 50, "after {:?}", began.elapsed());
    other.cancel(bulk);
    // No flow waits any more.
    until("nothing waits", || went_on_credit(&mut lane, &write));
}
