//! Without a daemon, or with one that is gone, stalled or told to step aside, everything goes out:
//! at once or within the bound, in order, each byte once, and counted.

mod daemon;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use daemon::{TestDaemon, eventually};
use laxity_client::{Client, Direction, Flow, Hint, Lane, Mode, Options, Stage, Ticket};
use laxity_shm::layout::{Geometry, attention};
use laxity_shm::record::Record;
use laxity_shm::registration::Reason;

fn flow(bytes: u64) -> Flow {
    Flow {
        stage: Stage::KvReuse,
        bytes,
        layer: 1,
        batch: 1,
        request: 1,
        ..Flow::default()
    }
}

fn nowhere() -> Options {
    Options {
        socket: "/nonexistent/laxityd.sock".into(),
        reattach_every: Duration::from_millis(1),
        ..Options::default()
    }
}

/// Collects all permits; the sum, and whether any was bypassed.
fn drain(lane: &mut Lane, ticket: &mut Ticket) -> (u64, bool) {
    let (mut bytes, mut bypassed) = (0, false);
    while !ticket.is_done() {
        let permit = lane.wait(ticket);
        bytes += permit.bytes;
        bypassed |= permit.bypassed;
    }
    (bytes, bypassed)
}

#[test]
fn without_a_daemon_every_flow_is_granted_at_once_and_counted() {
    let client = Client::attach(nowhere());
    assert!(!client.is_scheduled());
    let mut lane = client.lane();
    for bytes in [0, 1, 4096, u64::from(u32::MAX)] {
        let mut ticket = lane.submit(&flow(bytes));
        let permit = lane.poll(&mut ticket).expect("permitted at once");
        assert_eq!(
            (permit.bytes, permit.last, permit.bypassed),
            (bytes, true, true)
        );
        assert_eq!((permit.level, permit.dscp), (0, 0));
        assert_eq!(lane.poll(&mut ticket), None);
        assert!(ticket.is_done());
        let again = lane.wait(&mut ticket);
        assert_eq!((again.bytes, again.last), (0, true));
        lane.complete(&ticket, bytes);
    }
    lane.hint(Hint::LayerBegin { batch: 1, layer: 2 });
    assert!(
        lane.wait_any(Duration::from_secs(60)),
        "nothing to wait for"
    );
    let stats = client.stats();
    assert_eq!(stats.bypassed_flows, 4);
    assert_eq!(stats.bypassed_bytes, 4097 + u64::from(u32::MAX));
    assert_eq!(stats.scheduled_bytes, 0);
    assert!(stats.unscheduled_ns > 0);
    drop(lane);
    assert_eq!(
        client.stats().bypassed_flows,
        4,
        "a lane that is gone still counts"
    );
}

#[test]
fn mode_off_never_talks_to_the_daemon() {
    let daemon = TestDaemon::start();
    let client = Client::attach(Options {
        mode: Mode::Off,
        ..daemon.options()
    });
    let mut lane = client.lane();
    let mut ticket = lane.submit(&flow(5));
    assert_eq!(drain(&mut lane, &mut ticket), (5, true));
    assert_eq!(daemon.knobs.clients.load(Ordering::SeqCst), 0);
}

#[test]
fn the_class_of_a_stage_is_the_one_that_the_daemon_says() {
    let daemon = TestDaemon::start();
    let of = |options| {
        let client = Client::attach(options);
        Stage::ALL.map(|stage| client.dscp_of(stage))
    };
    assert_eq!(of(daemon.options()), [51, 52, 53, 54, 55]);
    let observed = Options {
        mode: Mode::Observe,
        ..daemon.options()
    };
    assert_eq!((of(observed), of(nowhere())), ([0; 5], [0; 5]));
}

#[test]
fn a_bypass_that_ends_while_a_flow_is_submitted_is_not_taken_for_the_mode_observe() {
    let daemon = TestDaemon::start();
    let client = Client::attach(daemon.options());
    daemon.knobs.flicker.store(true, Ordering::SeqCst);
    let mut lane = client.lane();
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end && client.stats().observed_bytes == 0 {
        for _ in 0..1000 {
            let ticket = lane.submit(&flow(5));
            lane.cancel(ticket);
        }
    }
    daemon.knobs.flicker.store(false, Ordering::SeqCst);
    // A daemon releases a client that says so without having been told to.
    assert_eq!(client.stats().observed_bytes, 0);
    assert!(client.stats().bypassed_flows > 0, "the bypass was seen");
}

#[test]
fn a_ticket_on_the_wrong_lane_is_bypassed_and_disturbs_nobody() {
    let daemon = TestDaemon::start();
    let client = Client::attach(daemon.options());
    let (mut one, mut other) = (client.lane(), client.lane());
    let mut right = one.submit(&flow(10));
    let mut wrong = other.submit(&flow(20));
    assert_eq!(drain(&mut one, &mut wrong), (20, true));
    assert_eq!(drain(&mut one, &mut right), (10, false));
    let mut again = other.submit(&flow(5));
    assert_eq!(drain(&mut other, &mut again), (5, false));
}

#[test]
fn a_flow_is_permitted_in_chunks_that_add_up_to_it() {
    let daemon = TestDaemon::start();
    daemon.knobs.chunk.store(1000, Ordering::SeqCst);
    let client = Client::attach(daemon.options());
    assert!(client.is_scheduled());
    let mut lane = client.lane();
    for bytes in [0, 1, 999, 1000, 1001, 123_456] {
        let mut ticket = lane.submit(&flow(bytes));
        let mut sum = 0;
        loop {
            let permit = lane.wait(&mut ticket);
            assert!(!permit.bypassed);
            assert_eq!((permit.level, permit.dscp), (3, 13));
            sum += permit.bytes;
            lane.complete(&ticket, permit.bytes);
            if permit.last {
                break;
            }
        }
        assert_eq!(sum, bytes);
        assert!(ticket.is_done());
    }
    let total = 1 + 999 + 1000 + 1001 + 123_456;
    eventually("completions arrive", || {
        daemon.knobs.completed_bytes.load(Ordering::SeqCst) == total
    });
    assert_eq!(client.stats().scheduled_bytes, total);
    assert_eq!(client.stats().bypassed_bytes, 0);
    assert_eq!(daemon.knobs.garbage.load(Ordering::SeqCst), 0);
}

#[test]
fn collectives_go_on_credit_as_far_as_it_reaches_and_wait_beyond() {
    let daemon = TestDaemon::start();
    daemon.knobs.credit.store(10_000, Ordering::SeqCst);
    let client = Client::attach(daemon.options());
    let mut lane = client.lane();
    let collective = Flow {
        stage: Stage::Collective,
        ..flow(4000)
    };
    eventually("credit arrives", || {
        let mut ticket = lane.submit(&collective);
        let permit = lane.poll(&mut ticket);
        let on_credit = permit.is_some_and(|g| g.bytes == 4000 && g.level == 2 && !g.bypassed);
        assert!(!drain(&mut lane, &mut ticket).1);
        on_credit
    });
    daemon.set(&daemon.knobs.deaf, true);
    let mut on_credit = 0;
    let mut waiting = Vec::new();
    for _ in 0..5 {
        let mut ticket = lane.submit(&collective);
        match lane.poll(&mut ticket) {
            Some(permit) => on_credit += permit.bytes,
            None => waiting.push(ticket),
        }
    }
    assert!(
        on_credit <= 20_000 && !waiting.is_empty(),
        "credit is bounded: {on_credit}"
    );
    // Other stages and ports without a counter have none.
    for other in [
        flow(1),
        Flow {
            nic: 200,
            ..collective
        },
        Flow {
            direction: Direction::Ingress,
            ..flow(1)
        },
    ] {
        let mut ticket = lane.submit(&other);
        assert_eq!(lane.poll(&mut ticket), None);
        waiting.push(ticket);
    }
    daemon.set(&daemon.knobs.deaf, false);
    for ticket in &mut waiting {
        assert!(!drain(&mut lane, ticket).1);
    }
    assert_eq!(daemon.knobs.garbage.load(Ordering::SeqCst), 0);
}

#[test]
fn bypass_resolves_waiting_flows_at_once_and_new_ones_too() {
    let daemon = TestDaemon::start();
    daemon.knobs.chunk.store(100, Ordering::SeqCst);
    let client = Client::attach(daemon.options());
    let mut lane = client.lane();
    let mut first = lane.submit(&flow(1000));
    let some = lane.wait(&mut first).bytes;
    daemon.set(&daemon.knobs.hold, true);
    let mut second = lane.submit(&flow(500));
    daemon
        .knobs
        .attention
        .store(attention::BYPASS, Ordering::SeqCst);
    assert_eq!(drain(&mut lane, &mut first).0 + some, 1000);
    assert_eq!(drain(&mut lane, &mut second), (500, true));
    assert!(!client.is_scheduled());
    let mut third = lane.submit(&flow(7));
    assert_eq!(drain(&mut lane, &mut third), (7, true));
    eventually("the daemon is told", || {
        !daemon.knobs.heard.lock().expect("heard").is_empty()
    });
    let stats = client.stats();
    assert_eq!(stats.scheduled_bytes + stats.bypassed_bytes, 1507);
}

#[test]
fn observe_reports_every_flow_and_delays_none() {
    let daemon = TestDaemon::start();
    daemon.set(&daemon.knobs.hold, true);
    let client = Client::attach(Options {
        mode: Mode::Observe,
        ..daemon.options()
    });
    let mut lane = client.lane();
    for _ in 0..10 {
        let mut ticket = lane.submit(&flow(100));
        let permit = lane.poll(&mut ticket).expect("permitted at once");
        assert_eq!(
            (permit.bytes, permit.last, permit.bypassed, permit.level),
            (100, true, false, 0)
        );
        lane.complete(&ticket, 100);
    }
    eventually("the daemon has it all", || {
        daemon.knobs.completed_bytes.load(Ordering::SeqCst) == 1000
    });
    assert_eq!(daemon.knobs.submitted_bytes.load(Ordering::SeqCst), 1000);
    let stats = client.stats();
    assert_eq!(
        (
            stats.observed_bytes,
            stats.bypassed_bytes,
            stats.scheduled_bytes
        ),
        (1000, 0, 0)
    );
}

#[test]
fn a_daemon_that_dies_leaves_each_byte_granted_once_and_lanes_move_to_the_next() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let path = dir.path().join("laxityd.sock");
    let daemon = TestDaemon::at(&path, Geometry::default());
    daemon.knobs.chunk.store(10, Ordering::SeqCst);
    let client = Client::attach(daemon.options());
    let mut lane = client.lane();
    let mut tickets: Vec<_> = (1..=20).map(|i| lane.submit(&flow(i * 100))).collect();
    let mut sums: Vec<u64> = tickets.iter_mut().map(|t| lane.wait(t).bytes).collect();
    daemon.set(&daemon.knobs.hold, true);
    daemon.kill();
    for (ticket, sum) in tickets.iter_mut().zip(&mut sums) {
        *sum += drain(&mut lane, ticket).0;
        lane.complete(ticket, ticket.total());
    }
    assert_eq!(sums, (1..=20).map(|i| i * 100).collect::<Vec<u64>>());
    assert!(!client.is_scheduled());
    let mut ticket = lane.submit(&flow(3));
    assert_eq!(drain(&mut lane, &mut ticket), (3, true));

    let next = TestDaemon::at(&path, Geometry::default());
    eventually("the lane moves to the new daemon", || {
        let mut ticket = lane.submit(&flow(1));
        !drain(&mut lane, &mut ticket).1
    });
    assert!(client.is_scheduled());
    assert!(lane.is_attached());
    let stats = client.stats();
    assert_eq!(stats.reattaches, 1);
    assert!(stats.unscheduled_ns > 0);
    let settled = client.stats().unscheduled_ns;
    assert_eq!(
        settled, stats.unscheduled_ns,
        "does not grow while scheduled"
    );
    next.stop();
}

#[test]
fn a_death_is_noticed_by_a_lane_that_gives_each_flow_up_before_it_is_overdue() {
    let daemon = TestDaemon::start();
    let client = Client::attach(daemon.options());
    let mut lane = client.lane();
    daemon.set(&daemon.knobs.hold, true);
    daemon.kill();
    eventually("the lane lets go of it", || {
        let mut ticket = lane.submit(&flow(100));
        // Shorter than the time between two looks at the socket.
        let end = Instant::now() + Duration::from_millis(3);
        while Instant::now() < end && lane.poll(&mut ticket).is_none() {}
        if !ticket.is_done() {
            lane.cancel(ticket);
        }
        !lane.is_attached()
    });
}

/// A daemon vanishes while `attention` holds, under a lane whose flows of `stage` never wait;
/// another takes its place. The lane must find it, and let no byte out twice or not at all
/// meanwhile.
fn a_lane_that_never_waits_finds_the_next_daemon(attention: u32, stage: Stage) {
    let dir = tempfile::tempdir().expect("temporary directory");
    let path = dir.path().join("laxityd.sock");
    let start = || {
        let daemon = TestDaemon::at(&path, Geometry::default());
        daemon.knobs.credit.store(1 << 40, Ordering::SeqCst);
        daemon.knobs.attention.store(attention, Ordering::SeqCst);
        daemon
    };
    let daemon = start();
    let client = Client::attach(daemon.options());
    let mut lane = client.lane();
    let kind = Flow { stage, ..flow(100) };
    // Whether the flow went out at once. Asks neither the client for its counters nor anybody to
    // wait: either would look at the socket.
    let send = |lane: &mut Lane| {
        let mut ticket = lane.submit(&kind);
        let permit = lane.poll(&mut ticket);
        if let Some(permit) = permit {
            assert_eq!((permit.bytes, permit.last), (100, true), "once, and whole");
            lane.complete(&ticket, 100);
        } else {
            lane.cancel(ticket);
        }
        std::thread::sleep(Duration::from_micros(200));
        permit.is_some()
    };
    eventually("flows go out at once, as the daemon wants it", || {
        client.is_scheduled() == (attention == 0) && send(&mut lane)
    });
    daemon.kill();
    eventually("the lane lets go of a daemon that is gone", || {
        assert!(send(&mut lane), "nothing waits for it");
        !lane.is_attached()
    });
    let _next = start();
    eventually("the lane finds the next daemon", || {
        send(&mut lane);
        lane.is_attached()
    });
    let stats = client.stats();
    assert!(
        stats.reattaches == 1 && stats.unscheduled_ns > 0,
        "{stats:?}"
    );
}

#[test]
fn a_daemon_that_dies_while_bypassed_is_left_for_the_next() {
    a_lane_that_never_waits_finds_the_next_daemon(attention::BYPASS, Stage::KvReuse);
}

#[test]
fn a_daemon_that_dies_in_mode_off_is_left_for_the_next() {
    a_lane_that_never_waits_finds_the_next_daemon(attention::OFF, Stage::KvReuse);
}

#[test]
fn a_daemon_that_dies_in_mode_observe_is_left_for_the_next() {
    a_lane_that_never_waits_finds_the_next_daemon(attention::OBSERVE, Stage::KvReuse);
}

#[test]
fn a_daemon_that_dies_under_a_lane_on_credit_is_left_for_the_next() {
    a_lane_that_never_waits_finds_the_next_daemon(0, Stage::Collective);
}

#[test]
fn a_death_is_seen_in_the_counters_of_a_process_that_submits_nothing() {
    let daemon = TestDaemon::start();
    let client = Client::attach(daemon.options());
    let _lane = client.lane();
    let before = client.stats().unscheduled_ns;
    daemon.kill();
    eventually("the time without a scheduler grows", || {
        client.stats().unscheduled_ns > before
    });
    assert!(!client.is_scheduled());
}

#[test]
fn a_daemon_that_stops_releases_its_clients() {
    let daemon = TestDaemon::start();
    daemon.set(&daemon.knobs.hold, true);
    let client = Client::attach(daemon.options());
    let mut lane = client.lane();
    let mut ticket = lane.submit(&flow(42));
    let waiter = std::thread::spawn(move || drain(&mut lane, &mut ticket));
    std::thread::sleep(Duration::from_millis(30));
    daemon.stop();
    assert_eq!(waiter.join().expect("waiter"), (42, true));
    assert!(!client.is_scheduled());
}

#[test]
fn a_daemon_that_stalls_is_given_up_within_the_bound_and_taken_back_when_it_goes_on() {
    let daemon = TestDaemon::start();
    let stall = Duration::from_millis(300);
    let client = Client::attach(Options {
        stall_timeout: stall,
        ..daemon.options()
    });
    let mut lane = client.lane();
    let mut other = client.lane();
    let mut ticket = lane.submit(&flow(1));
    assert_eq!(drain(&mut lane, &mut ticket), (1, false));
    daemon.stall();
    let began = Instant::now();
    let mut ticket = lane.submit(&flow(10));
    let mut polled = other.submit(&flow(20));
    assert_eq!(drain(&mut lane, &mut ticket), (10, true));
    let took = began.elapsed();
    assert!(took < stall * 20, "bounded: {took:?}");
    let permit = other
        .poll(&mut polled)
        .expect("one lane's finding holds for all");
    assert_eq!((permit.bytes, permit.bypassed), (20, true));
    assert!(!client.is_scheduled());
    daemon.set(&daemon.knobs.stalled, false);
    eventually("it is taken back", || {
        let mut ticket = lane.submit(&flow(1));
        !drain(&mut lane, &mut ticket).1
    });
    eventually("by the other lane too", || {
        let mut ticket = other.submit(&flow(1));
        !drain(&mut other, &mut ticket).1
    });
    eventually("the old attachment is closed", || {
        daemon.knobs.clients.load(Ordering::SeqCst) == 1
    });
}

#[test]
fn an_event_loop_that_only_polls_notices_a_stall_too() {
    let daemon = TestDaemon::start();
    let stall = Duration::from_millis(50);
    let client = Client::attach(Options {
        stall_timeout: stall,
        ..daemon.options()
    });
    let mut lane = client.lane();
    daemon.stall();
    let mut ticket = lane.submit(&flow(10));
    let mut got = 0;
    eventually("polling ends", || {
        got += lane.poll(&mut ticket).map_or(0, |permit| permit.bytes);
        ticket.is_done()
    });
    assert_eq!(got, 10);
}

#[test]
fn a_slow_daemon_that_shows_life_is_waited_for() {
    let daemon = TestDaemon::start();
    daemon.set(&daemon.knobs.hold, true);
    let stall = Duration::from_secs(3);
    let client = Client::attach(Options {
        stall_timeout: stall,
        ..daemon.options()
    });
    let mut lane = client.lane();
    let mut ticket = lane.submit(&flow(10));
    assert!(
        !lane.wait_any(Duration::from_millis(100)),
        "nothing came, and that is no loss"
    );
    assert_eq!(lane.poll(&mut ticket), None);
    daemon.set(&daemon.knobs.hold, false);
    assert!(lane.wait_any(Duration::from_secs(20)));
    assert_eq!(drain(&mut lane, &mut ticket), (10, false));
}

#[test]
fn a_full_lane_bypasses_counts_and_recovers() {
    let geometry = Geometry {
        lanes: 2,
        slots: 16,
        colour: 3,
    };
    let daemon = TestDaemon::with(geometry);
    daemon.set(&daemon.knobs.hold, true);
    let client = Client::attach(daemon.options());
    let mut lane = client.lane();
    let mut tickets: Vec<_> = (0..40).map(|_| lane.submit(&flow(10))).collect();
    let full = client.stats().lane_full;
    assert!(full >= 40 - 15, "{full} flows found no slot");
    // Completions and hints still get through a lane that is full of waiting flows.
    lane.hint(Hint::LayerBegin { batch: 9, layer: 9 });
    eventually("the hint arrives", || {
        daemon
            .knobs
            .heard
            .lock()
            .expect("heard")
            .iter()
            .any(|record| {
                matches!(
                    record,
                    laxity_shm::record::Record::LayerBegin { batch: 9, layer: 9 }
                )
            })
    });
    daemon.set(&daemon.knobs.hold, false);
    let total: u64 = tickets
        .iter_mut()
        .map(|ticket| drain(&mut lane, ticket).0)
        .sum();
    assert_eq!(total, 400);
    let mut ticket = lane.submit(&flow(10));
    assert_eq!(
        drain(&mut lane, &mut ticket),
        (10, false),
        "slots came back"
    );
}

#[test]
fn more_lanes_than_seats_work_unscheduled_until_one_is_free() {
    let daemon = TestDaemon::with(Geometry {
        lanes: 2,
        slots: 16,
        colour: 0,
    });
    let client = Client::attach(daemon.options());
    let mut first = client.lane();
    let second = client.lane();
    let mut third = client.lane();
    assert!(first.is_attached() && second.is_attached() && !third.is_attached());
    let mut ticket = third.submit(&flow(5));
    assert_eq!(drain(&mut third, &mut ticket), (5, true));
    assert!(client.stats().lane_full > 0);
    drop(second);
    eventually("the seat is taken over", || {
        let mut ticket = third.submit(&flow(5));
        !drain(&mut third, &mut ticket).1
    });
    let mut ticket = first.submit(&flow(5));
    assert_eq!(drain(&mut first, &mut ticket), (5, false));
    assert_eq!(daemon.knobs.garbage.load(Ordering::SeqCst), 0);
}

#[test]
fn a_lane_dropped_with_flows_waiting_withdraws_them() {
    let daemon = TestDaemon::with(Geometry {
        lanes: 1,
        slots: 16,
        colour: 0,
    });
    daemon.set(&daemon.knobs.hold, true);
    let client = Client::attach(daemon.options());
    for _ in 0..10 {
        let mut lane = client.lane();
        eventually("the only seat is free again", || {
            let mut ticket = lane.submit(&flow(1));
            lane.poll(&mut ticket).is_none()
        });
        for _ in 0..5 {
            drop(lane.submit(&flow(3)));
        }
    }
    eventually("the daemon is told to forget them", || {
        // Not ten times: a lane that had no slot left to say so leaves it to the next owner.
        !daemon.knobs.heard.lock().expect("heard").is_empty()
    });
    daemon.set(&daemon.knobs.hold, false);
    let mut lane = client.lane();
    eventually("and the lane works", || {
        let mut ticket = lane.submit(&flow(1));
        !drain(&mut lane, &mut ticket).1
    });
    assert_eq!(daemon.knobs.garbage.load(Ordering::SeqCst), 0);
}

#[test]
fn cancelling_frees_the_slot_and_tells_the_daemon_what_went_out() {
    let daemon = TestDaemon::with(Geometry {
        lanes: 1,
        slots: 16,
        colour: 0,
    });
    daemon.knobs.chunk.store(10, Ordering::SeqCst);
    let client = Client::attach(daemon.options());
    let mut lane = client.lane();
    daemon.set(&daemon.knobs.hold, true);
    for _ in 0..200 {
        let ticket = lane.submit(&flow(1000));
        let gated = !ticket.is_done();
        lane.cancel(ticket);
        assert!(gated);
        std::thread::yield_now();
    }
    daemon.set(&daemon.knobs.hold, false);
    let mut ticket = lane.submit(&flow(1000));
    let got = lane.wait(&mut ticket);
    lane.cancel(ticket);
    if !got.bypassed {
        eventually("the daemon hears how much", || {
            daemon
                .knobs
                .heard
                .lock()
                .expect("heard")
                .iter()
                .any(|record| {
                    matches!(record, laxity_shm::record::Record::Cancelled { granted, .. }
                         if *granted == got.bytes)
                })
        });
    }
    let mut ticket = lane.submit(&flow(100));
    assert_eq!(drain(&mut lane, &mut ticket).0, 100);
}

#[test]
fn a_daemon_that_refuses_is_lived_without() {
    let daemon = TestDaemon::start();
    *daemon.knobs.refuse.lock().expect("knob") = Some(Reason::Version);
    let client = Client::attach(daemon.options());
    assert!(!client.is_scheduled());
    let mut lane = client.lane();
    let mut ticket = lane.submit(&flow(9));
    assert_eq!(drain(&mut lane, &mut ticket), (9, true));
    *daemon.knobs.refuse.lock().expect("knob") = None;
    eventually("asked again later", || {
        let mut ticket = lane.submit(&flow(1));
        !drain(&mut lane, &mut ticket).1
    });
}

#[test]
fn a_listener_that_never_answers_does_not_hold_attach_up() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let path = dir.path().join("mute.sock");
    let listener = laxity_shm::registration::listen(&path).expect("listens");
    let began = Instant::now();
    let client = Client::attach(Options {
        socket: path,
        attach_timeout: Duration::from_millis(20),
        ..Options::default()
    });
    assert!(began.elapsed() < Duration::from_secs(5));
    let mut lane = client.lane();
    let mut ticket = lane.submit(&flow(9));
    assert_eq!(drain(&mut lane, &mut ticket), (9, true));
    drop(listener);
}

#[test]
fn a_flow_too_large_for_a_permit_goes_out_unscheduled() {
    let daemon = TestDaemon::start();
    let client = Client::attach(daemon.options());
    let mut lane = client.lane();
    let mut ticket = lane.submit(&flow(u64::MAX));
    let permit = lane.wait(&mut ticket);
    assert_eq!((permit.bytes, permit.bypassed), (u64::MAX, true));
    assert_eq!(daemon.knobs.garbage.load(Ordering::SeqCst), 0);
}

#[test]
fn completions_that_found_no_slot_are_paid_by_a_thread_that_only_polls() {
    let daemon = TestDaemon::with(Geometry {
        slots: 16,
        ..Geometry::default()
    });
    let client = Client::attach(daemon.options());
    let mut lane = client.lane();
    let mut sent = lane.submit(&flow(1000));
    assert!(lane.wait(&mut sent).last);
    daemon.set(&daemon.knobs.hold, true);
    let mut waiting = lane.submit(&flow(10));
    eventually("the daemon has the second flow", || {
        daemon.knobs.submitted_bytes.load(Ordering::SeqCst) == 1010
    });
    daemon.set(&daemon.knobs.deaf, true);
    // Far more messages than slots: most are owed.
    for _ in 0..1000 {
        lane.complete(&sent, 1);
    }
    daemon.set(&daemon.knobs.deaf, false);
    eventually("every completion arrives", || {
        assert!(lane.poll(&mut waiting).is_none());
        daemon.knobs.completed_bytes.load(Ordering::SeqCst) == 1000
    });
}

#[test]
fn in_mode_off_the_daemon_still_learns_what_became_of_flows_that_it_knows() {
    let daemon = TestDaemon::start();
    let client = Client::attach(daemon.options());
    let mut lane = client.lane();
    let mut sent = lane.submit(&flow(1000));
    assert!(lane.wait(&mut sent).last);
    daemon.set(&daemon.knobs.hold, true);
    let mut waiting = lane.submit(&flow(10));
    daemon
        .knobs
        .attention
        .store(attention::OFF, Ordering::SeqCst);
    eventually("the mode reaches the client", || !client.is_scheduled());
    let permit = lane.wait(&mut waiting);
    assert_eq!(
        (permit.bytes, permit.last, permit.bypassed),
        (10, true, true)
    );
    lane.hint(Hint::ComputeEnd { batch: 1 });
    lane.complete(&sent, 1000);
    eventually("the completion arrives", || {
        daemon.knobs.completed_bytes.load(Ordering::SeqCst) == 1000
    });
    let heard = daemon.knobs.heard.lock().unwrap();
    assert!(
        matches!(heard[..], [Record::Cancelled { granted: 0, .. }]),
        "{heard:?}"
    );
}

/// Threads that begin at the same moment, beside one that asks for classes all the time, want the
/// same locks for an instant. That is no reason to send anything unscheduled.
#[test]
fn threads_that_begin_together_are_all_scheduled() {
    const THREADS: usize = 6;
    let daemon = TestDaemon::start();
    for _ in 0..40 {
        let client = Client::attach(daemon.options());
        assert!(client.is_scheduled());
        let start = std::sync::Barrier::new(THREADS + 1);
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                while !over.load(Ordering::Relaxed) {
                    let _ = client.dscp(1);
                }
            });
            let begin = || {
                start.wait();
                let mut lane = client.lane();
                let mut ticket = lane.submit(&flow(4096));
                let drained = drain(&mut lane, &mut ticket);
                lane.complete(&ticket, 4096);
                drained
            };
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(begin)).collect();
            let drained: Vec<_> = threads
                .into_iter()
                .map(std::thread::ScopedJoinHandle::join)
                .collect();
            over.store(true, Ordering::Relaxed);
            for drained in drained {
                assert_eq!(drained.expect("a thread"), (4096, false));
            }
        });
        assert_eq!(client.stats().bypassed_flows, 0);
    }
}
