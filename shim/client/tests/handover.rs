//! A planned upgrade: the daemon hands its clients over, and the next one answers at its socket.
//! What waits is scheduled by the next daemon, or goes out once if that one does not come.

mod daemon;
#[path = "daemon/lanes.rs"]
mod lanes;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use daemon::{TestDaemon, completed, eventually, submitted};
use lanes::{drain, flow, send};
use laxity_client::{Client, Flow, Lane, Mode, Options, Stage, Ticket};
use laxity_shm::layout::{Geometry, attention};
use laxity_shm::record::Record;

/// The documented bound of a wait for the next daemon.
const BOUND: Duration = Duration::from_secs(1);

/// More bytes than the daemon permits in small chunks while a test runs.
const LONG: u64 = 1 << 40;

struct Host {
    daemon: TestDaemon,
    client: Client,
    lane: Lane,
    dir: tempfile::TempDir,
}

impl Host {
    fn start(mode: Mode) -> Self {
        let dir = tempfile::tempdir().expect("temporary directory");
        let daemon = TestDaemon::at(&dir.path().join("laxityd.sock"), Geometry::default());
        // Only a handover looks for the next daemon at once.
        let options = Options { mode, reattach_every: Duration::from_secs(60), ..daemon.options() };
        let client = Client::attach(options);
        let lane = client.lane();
        Self { daemon, client, lane, dir }
    }

    /// Returns a flow of [`LONG`] bytes that has some of its permits, and one of 500 without any.
    fn waiting(&mut self) -> (u64, [Ticket; 2]) {
        self.daemon.knobs.chunk.store(100, Ordering::SeqCst);
        let mut begun = self.lane.submit(&flow(LONG));
        let got = self.lane.wait(&mut begun).bytes;
        // What is permitted meanwhile is not read.
        self.daemon.set(&self.daemon.knobs.hold, true);
        self.daemon.stall();
        self.daemon.set(&self.daemon.knobs.stalled, false);
        let waits = self.lane.submit(&flow(500));
        eventually("the daemon has both", || submitted(&self.daemon) == LONG + 500);
        (got, [begun, waits])
    }
}

#[test]
fn what_waits_and_what_comes_is_scheduled_by_the_next_daemon() {
    let mut host = Host::start(Mode::Enforce);
    let (mut got, [mut begun, mut waits]) = host.waiting();
    let path = host.daemon.socket.clone();
    let listener = host.daemon.hand_over();
    let Host { client, mut lane, .. } = host;
    // Permits that the last daemon wrote before its end may still be read.
    while let Some(permit) = lane.poll(&mut begun) {
        assert!(!permit.bypassed);
        got += permit.bytes;
    }
    let mut comes = lane.submit(&flow(70));
    let mut other = client.lane();
    let mut urgent = other.submit(&Flow { stage: Stage::Collective, ..flow(7) });
    for (lane, ticket) in [(&mut lane, &mut comes), (&mut other, &mut urgent)] {
        assert!(lane.poll(ticket).is_none() && !lane.wait_any(Duration::from_millis(10)));
        lane.prepare_sleep().expect("a look for the next daemon comes later").sleep();
    }
    assert!(!client.is_scheduled());
    let next = TestDaemon::serving(&path, listener, Geometry::default());
    next.knobs.chunk.store(LONG / 4, Ordering::SeqCst);
    assert!(lane.wait_any(BOUND), "the next daemon is there");
    assert_eq!(drain(&mut lane, &mut waits), (500, false));
    assert_eq!(drain(&mut lane, &mut begun), (LONG - got, false));
    assert_eq!((begun.permitted(), begun.total()), (LONG, LONG));
    assert_eq!(drain(&mut lane, &mut comes), (70, false));
    assert_eq!(drain(&mut other, &mut urgent), (7, false));
    let stats = client.stats();
    assert_eq!((stats.bypassed_bytes, stats.scheduled_bytes), (0, LONG + 577));
    assert_eq!(stats.reattaches, 1);
    // The next daemon got no byte that was permitted before, and gets the completions of the
    // others.
    assert_eq!(submitted(&next), LONG + 577 - got);
    lane.complete(&waits, 500);
    eventually("the next daemon has the completion", || completed(&next) == 500);
    next.stop();
    assert_eq!(send(&mut lane, 3), (3, true), "a stop without a heir is as before");
}

#[test]
fn a_daemon_that_never_comes_delays_each_byte_by_the_bound_and_no_longer() {
    let mut host = Host::start(Mode::Enforce);
    let (got, mut tickets) = host.waiting();
    let _listener = host.daemon.hand_over();
    let began = Instant::now();
    let mut comes = host.lane.submit(&flow(70));
    let mut sum = got;
    for ticket in tickets.iter_mut().chain([&mut comes]) {
        let (bytes, bypassed) = drain(&mut host.lane, ticket);
        assert!(bypassed);
        sum += bytes;
    }
    let took = began.elapsed();
    assert_eq!(sum, LONG + 570, "each byte once");
    assert!(took >= BOUND / 2 && took < 5 * BOUND, "{took:?}");
    let began = Instant::now();
    assert_eq!(send(&mut host.lane, 9), (9, true));
    assert_eq!(send(&mut host.client.lane(), 9), (9, true));
    assert!(began.elapsed() < BOUND / 2, "nothing waits twice");
}

#[test]
fn nothing_waits_once_nobody_listens() {
    let mut host = Host::start(Mode::Enforce);
    let (got, mut tickets) = host.waiting();
    drop(host.daemon.hand_over());
    drop(host.daemon);
    let began = Instant::now();
    let sums = tickets.each_mut().map(|ticket| drain(&mut host.lane, ticket));
    assert_eq!(sums, [(LONG - got, true), (500, true)]);
    assert!(began.elapsed() < BOUND, "{:?}", began.elapsed());
}

#[test]
fn what_is_not_enforced_does_not_wait_for_the_next_daemon() {
    let mut observed = Host::start(Mode::Observe);
    let _listener = observed.daemon.hand_over();
    let mut ticket = observed.lane.submit(&flow(5));
    assert!(observed.lane.poll(&mut ticket).is_some());
    let mut bypassed = Host::start(Mode::Enforce);
    bypassed.daemon.knobs.attention.store(attention::BYPASS, Ordering::SeqCst);
    eventually("the bypass is on", || !bypassed.client.is_scheduled());
    let _listener = bypassed.daemon.hand_over();
    let mut ticket = bypassed.lane.submit(&flow(5));
    assert!(bypassed.lane.poll(&mut ticket).is_some());
}

#[test]
fn a_flow_that_nobody_polls_goes_through_two_upgrades_and_can_be_cancelled_in_each() {
    let mut host = Host::start(Mode::Enforce);
    let (mut got, [mut begun, waits]) = host.waiting();
    let path = host.daemon.socket.clone();
    let listener = host.daemon.hand_over();
    while let Some(permit) = host.lane.poll(&mut begun) {
        got += permit.bytes;
    }
    let lost = host.lane.submit(&flow(30));
    host.lane.cancel(lost);
    let mut second = TestDaemon::serving(&path, listener, Geometry::default());
    second.set(&second.knobs.hold, true);
    eventually("the second daemon has both flows", || {
        host.lane.try_attach();
        submitted(&second) == LONG + 500 - got
    });
    let listener = second.hand_over();
    // The lane notices the handover by another flow than those two.
    let mut comes = host.lane.submit(&flow(70));
    assert!(host.lane.poll(&mut comes).is_none());
    let third = TestDaemon::serving(&path, listener, Geometry::default());
    third.set(&third.knobs.hold, true);
    eventually("the third daemon has all flows", || {
        host.lane.try_attach();
        submitted(&third) == LONG + 570 - got
    });
    host.lane.cancel(waits);
    assert!(host.lane.poll(&mut begun).is_none());
    third.knobs.chunk.store(100, Ordering::SeqCst);
    third.set(&third.knobs.hold, false);
    let more = host.lane.wait(&mut begun).bytes;
    host.lane.cancel(begun);
    eventually("the daemon hears of both", || third.knobs.heard.lock().unwrap().len() == 2);
    let heard = third.knobs.heard.lock().unwrap().clone();
    assert!(matches!(heard[0], Record::Cancelled { permitted: 0, .. }), "{heard:?}");
    // The third daemon permitted only these bytes.
    assert!(
        matches!(heard[1], Record::Cancelled { permitted, .. } if permitted == more),
        "{heard:?}"
    );
    assert_eq!(drain(&mut host.lane, &mut comes), (70, false));
    assert_eq!(host.client.stats().bypassed_bytes, 0);
}

/// Sends flows of several kinds until `stop`. Returns their bytes.
fn load(lane: &mut Lane, stop: &AtomicBool) -> u64 {
    let mut sent = 0;
    while !stop.load(Ordering::SeqCst) {
        let stages = [Stage::KvReuse, Stage::Collective, Stage::P2d];
        let mut tickets = stages.map(|stage| lane.submit(&Flow { stage, ..flow(1000) }));
        for ticket in &mut tickets {
            let mut bytes = 0;
            while !ticket.is_done() {
                let permit = lane.wait(ticket);
                bytes += permit.bytes;
                lane.complete(ticket, permit.bytes);
            }
            assert_eq!(bytes, 1000, "each byte once");
            sent += bytes;
        }
    }
    sent
}

#[test]
fn upgrades_under_load_bypass_nothing_and_lose_nothing() {
    let Host { mut daemon, client, dir, .. } = Host::start(Mode::Enforce);
    let path = dir.path().join("laxityd.sock");
    let (stop, mut gaps) = (AtomicBool::new(false), Vec::new());
    let sent: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..3).map(|_| scope.spawn(|| load(&mut client.lane(), &stop))).collect();
        for round in 0..6 {
            daemon.knobs.chunk.store(300, Ordering::SeqCst);
            daemon.knobs.credit.store(round % 2 * 5000, Ordering::SeqCst);
            let before = client.stats().scheduled_bytes;
            eventually("the daemon schedules", || client.stats().scheduled_bytes > before + 50_000);
            let began = Instant::now();
            let listener = daemon.hand_over();
            std::thread::sleep(Duration::from_millis(20));
            daemon = TestDaemon::serving(&path, listener, Geometry::default());
            eventually("the next daemon has the client", || client.is_scheduled());
            gaps.push(began.elapsed());
        }
        stop.store(true, Ordering::SeqCst);
        threads.into_iter().map(|thread| thread.join().expect("a thread")).sum()
    });
    let stats = client.stats();
    assert_eq!(stats.scheduled_bytes + stats.bypassed_bytes, sent, "{stats:?}");
    assert_eq!(daemon.knobs.garbage.load(Ordering::SeqCst), 0);
    // A busy machine may take longer than flows wait.
    if gaps.iter().all(|gap| *gap < BOUND / 2) {
        assert_eq!((stats.bypassed_bytes, stats.reattaches), (0, 6), "{stats:?} {gaps:?}");
    }
}
