//! Fail open: without a daemon, or with one that is gone, stalled or bypassed, everything goes out
//! at once or within the limit, in order, each byte once, and counted.

mod daemon;
#[path = "daemon/lanes.rs"]
mod lanes;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use daemon::{TestDaemon, completed, eventually, submitted};
use lanes::{attached, drain, flow, is_scheduled_in_the_end, send};
use laxity_client::{Client, Flow, Hint, Lane, Mode, Options, Stage, Verdict};
use laxity_shm::layout::{Geometry, attention};
use laxity_shm::marking::{Marking, Treatments};
use laxity_shm::record::Record;
use laxity_shm::registration::Reason;

fn nowhere() -> Options {
    Options {
        socket: "/nonexistent/laxityd.sock".into(),
        reattach_every: Duration::from_millis(1),
        ..Options::default()
    }
}

#[test]
fn without_a_daemon_every_flow_is_permitted_at_once_and_counted() {
    let client = Client::attach(nowhere());
    assert!(!client.is_scheduled());
    let mut lane = client.lane();
    for bytes in [0, 1, 4096, u64::from(u32::MAX)] {
        let mut ticket = lane.submit(&flow(bytes));
        let permit = lane.poll(&mut ticket).expect("permitted at once");
        assert_eq!((permit.bytes, permit.last, permit.bypassed), (bytes, true, true));
        assert_eq!((permit.level, permit.dscp), (0, 0));
        assert_eq!(lane.poll(&mut ticket), None);
        assert!(ticket.is_done());
        let again = lane.wait(&mut ticket);
        assert_eq!((again.bytes, again.last), (0, true));
        lane.complete(&ticket, bytes);
    }
    lane.hint(Hint::LayerBegin { batch: 1, layer: 2 });
    assert!(lane.wait_any(Duration::from_secs(60)), "nothing to wait for");
    let stats = client.stats();
    assert_eq!(stats.bypassed_flows, 4);
    assert_eq!(stats.bypassed_bytes, 4097 + u64::from(u32::MAX));
    assert_eq!(stats.scheduled_bytes, 0);
    assert!(stats.unscheduled_ns > 0);
    drop(lane);
    assert_eq!(client.stats().bypassed_flows, 4, "a lane that is gone still counts");
}

#[test]
fn mode_off_never_talks_to_the_daemon() {
    let daemon = TestDaemon::start();
    let client = Client::attach(Options { mode: Mode::Off, ..daemon.options() });
    let mut lane = client.lane();
    assert_eq!(send(&mut lane, 5), (5, true));
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
    let observed = Options { mode: Mode::Observe, ..daemon.options() };
    assert_eq!((of(observed), of(nowhere())), ([0; 5], [0; 5]));
}

#[test]
fn a_class_changes_as_the_daemon_says_and_under_an_older_one_as_before() {
    let daemon = TestDaemon::start();
    let verdicts = |options: Options| {
        let client = Client::attach(options);
        // The class of P2D is DSCP 53 there.
        [(0, false), (106, false), (106, true)]
            .map(|(class, is_chosen)| client.class_of(Stage::P2d, class, is_chosen))
    };
    let change = |class| Some(Verdict::Change(class));
    let before = [change(212), change(214), Some(Verdict::Chosen)];
    assert_eq!(verdicts(daemon.options()), before, "a daemon without marking");
    let set = |marking, treatments| {
        *daemon.knobs.marking.lock().expect("knob") = Some((marking, treatments));
        verdicts(daemon.options())
    };
    let lossless = Treatments::new(std::array::from_fn(|dscp| if dscp >> 3 == 3 { 2 } else { 1 }));
    let kept = [change(212), Some(Verdict::Unlike), Some(Verdict::Chosen)];
    assert_eq!(set(Marking::Preserve, lossless), kept);
    let forced = [change(212), change(214), change(214)];
    assert_eq!(set(Marking::Levels, lossless), forced);
    assert_eq!(set(Marking::Off, lossless), [Some(Verdict::Off); 3]);
    let unknown = [Some(Verdict::Unknown), Some(Verdict::Unknown), Some(Verdict::Chosen)];
    assert_eq!(set(Marking::Preserve, Treatments::UNKNOWN), unknown);
    assert_eq!(verdicts(nowhere()), [None; 3]);
    let observed = Options { mode: Mode::Observe, ..daemon.options() };
    assert_eq!(verdicts(observed), [None; 3], "observing marks nothing");
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
    // A daemon releases a client that reports "observed" without an order to observe.
    assert_eq!(client.stats().observed_bytes, 0);
    assert!(client.stats().bypassed_flows > 0, "the bypass was seen");
}

#[test]
fn bypass_resolves_waiting_flows_at_once_and_new_ones_too() {
    let (daemon, client, mut lane) = attached();
    daemon.knobs.chunk.store(100, Ordering::SeqCst);
    let mut first = lane.submit(&flow(1000));
    let some = lane.wait(&mut first).bytes;
    daemon.set(&daemon.knobs.hold, true);
    let mut second = lane.submit(&flow(500));
    daemon.knobs.attention.store(attention::BYPASS, Ordering::SeqCst);
    assert_eq!(drain(&mut lane, &mut first).0 + some, 1000);
    assert_eq!(drain(&mut lane, &mut second), (500, true));
    assert!(!client.is_scheduled());
    assert_eq!(send(&mut lane, 7), (7, true));
    eventually("the daemon is told", || !daemon.knobs.heard.lock().expect("heard").is_empty());
    let stats = client.stats();
    assert_eq!(stats.scheduled_bytes + stats.bypassed_bytes, 1507);
}

#[test]
fn observe_reports_every_flow_and_delays_none() {
    let daemon = TestDaemon::holding();
    let client = Client::attach(Options { mode: Mode::Observe, ..daemon.options() });
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
    eventually("the daemon has it all", || completed(&daemon) == 1000);
    assert_eq!(submitted(&daemon), 1000);
    let stats = client.stats();
    assert_eq!((stats.observed_bytes, stats.bypassed_bytes, stats.scheduled_bytes), (1000, 0, 0));
}

#[test]
fn a_daemon_that_dies_leaves_each_byte_permitted_once_and_lanes_move_to_the_next() {
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
    assert_eq!(send(&mut lane, 3), (3, true));

    let next = TestDaemon::at(&path, Geometry::default());
    is_scheduled_in_the_end(&mut lane);
    assert!(client.is_scheduled());
    assert!(lane.is_attached());
    let stats = client.stats();
    assert!(stats.reattaches == 1 && stats.unscheduled_ns > 0, "{stats:?}");
    let settled = client.stats().unscheduled_ns;
    assert_eq!(settled, stats.unscheduled_ns, "does not grow while scheduled");
    next.stop();
}

#[test]
fn a_death_is_noticed_by_a_lane_that_gives_each_flow_up_before_it_is_overdue() {
    let (daemon, _client, mut lane) = attached();
    daemon.set(&daemon.knobs.hold, true);
    daemon.kill();
    eventually("the lane lets go of it", || {
        let mut ticket = lane.submit(&flow(100));
        // The time is shorter than that between two checks of the socket.
        let end = Instant::now() + Duration::from_millis(3);
        while Instant::now() < end && lane.poll(&mut ticket).is_none() {}
        if !ticket.is_done() {
            lane.cancel(ticket);
        }
        !lane.is_attached()
    });
}

/// Checks a lane whose flows of `stage` never wait. A daemon vanishes while `attention` holds, and
/// another takes its place. The lane must find it, and send each byte exactly once meanwhile.
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
    // Reports whether the flow went out at once. It calls neither the counters nor a wait, since
    // either would check the socket.
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
    assert!(stats.reattaches == 1 && stats.unscheduled_ns > 0, "{stats:?}");
}

#[test]
fn a_daemon_that_dies_under_a_lane_that_never_waits_is_left_for_the_next() {
    for attention in [attention::BYPASS, attention::OFF, attention::OBSERVE] {
        a_lane_that_never_waits_finds_the_next_daemon(attention, Stage::KvReuse);
    }
    // The flows go on credit.
    a_lane_that_never_waits_finds_the_next_daemon(0, Stage::Collective);
}

#[test]
fn a_death_is_seen_in_the_counters_of_a_process_that_submits_nothing() {
    let daemon = TestDaemon::start();
    let client = Client::attach(daemon.options());
    let _lane = client.lane();
    let before = client.stats().unscheduled_ns;
    daemon.kill();
    eventually("the time without a scheduler grows", || client.stats().unscheduled_ns > before);
    assert!(!client.is_scheduled());
}

#[test]
fn a_daemon_that_stops_releases_its_clients() {
    let (daemon, client, mut lane) = attached();
    daemon.set(&daemon.knobs.hold, true);
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
    let client = Client::attach(Options { stall_timeout: stall, ..daemon.options() });
    let mut lane = client.lane();
    let mut other = client.lane();
    assert_eq!(send(&mut lane, 1), (1, false));
    daemon.stall();
    let began = Instant::now();
    let mut ticket = lane.submit(&flow(10));
    let mut polled = other.submit(&flow(20));
    assert_eq!(drain(&mut lane, &mut ticket), (10, true));
    let took = began.elapsed();
    assert!(took < stall * 20, "bounded: {took:?}");
    let permit = other.poll(&mut polled).expect("one lane's finding holds for all");
    assert_eq!((permit.bytes, permit.bypassed), (20, true));
    assert!(!client.is_scheduled());
    daemon.set(&daemon.knobs.stalled, false);
    is_scheduled_in_the_end(&mut lane);
    is_scheduled_in_the_end(&mut other);
    eventually("the old attachment is closed", || daemon.knobs.clients.load(Ordering::SeqCst) == 1);
}

#[test]
fn an_event_loop_that_only_polls_notices_a_stall_too() {
    let daemon = TestDaemon::start();
    let stall = Duration::from_millis(50);
    let client = Client::attach(Options { stall_timeout: stall, ..daemon.options() });
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
    let daemon = TestDaemon::holding();
    let stall = Duration::from_secs(3);
    let client = Client::attach(Options { stall_timeout: stall, ..daemon.options() });
    let mut lane = client.lane();
    let mut ticket = lane.submit(&flow(10));
    assert!(!lane.wait_any(Duration::from_millis(100)), "nothing came, and that is no loss");
    assert_eq!(lane.poll(&mut ticket), None);
    daemon.set(&daemon.knobs.hold, false);
    assert!(lane.wait_any(Duration::from_secs(20)));
    assert_eq!(drain(&mut lane, &mut ticket), (10, false));
}

#[test]
fn a_daemon_that_refuses_is_lived_without() {
    let daemon = TestDaemon::start();
    *daemon.knobs.refuse.lock().expect("knob") = Some(Reason::Version);
    let client = Client::attach(daemon.options());
    assert!(!client.is_scheduled());
    let mut lane = client.lane();
    assert_eq!(send(&mut lane, 9), (9, true));
    *daemon.knobs.refuse.lock().expect("knob") = None;
    is_scheduled_in_the_end(&mut lane);
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
    assert_eq!(send(&mut lane, 9), (9, true));
    drop(listener);
}

#[test]
fn in_mode_off_the_daemon_still_learns_what_became_of_flows_that_it_knows() {
    let (daemon, client, mut lane) = attached();
    let mut sent = lane.submit(&flow(1000));
    assert!(lane.wait(&mut sent).last);
    daemon.set(&daemon.knobs.hold, true);
    let mut waiting = lane.submit(&flow(10));
    daemon.knobs.attention.store(attention::OFF, Ordering::SeqCst);
    eventually("the mode reaches the client", || !client.is_scheduled());
    let permit = lane.wait(&mut waiting);
    assert_eq!((permit.bytes, permit.last, permit.bypassed), (10, true, true));
    lane.hint(Hint::ComputeEnd { batch: 1 });
    lane.complete(&sent, 1000);
    eventually("the completion arrives", || completed(&daemon) == 1000);
    let heard = daemon.knobs.heard.lock().unwrap();
    assert!(matches!(heard[..], [Record::Cancelled { permitted: 0, .. }]), "{heard:?}");
}
