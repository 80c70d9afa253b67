//! Permits, credit, slots and seats: the fate of flows under a live daemon.

mod daemon;
#[path = "daemon/lanes.rs"]
mod lanes;

use std::sync::atomic::Ordering;

use daemon::{TestDaemon, completed, eventually, submitted};
use lanes::{attached, attached_to, drain, flow, is_scheduled_in_the_end, send};
use laxity_client::{Client, Direction, Flow, Hint, Stage};
use laxity_shm::layout::Geometry;
use laxity_shm::record::Record;

#[test]
fn a_ticket_on_the_wrong_lane_is_bypassed_and_disturbs_nobody() {
    let (_daemon, client, mut one) = attached();
    let mut other = client.lane();
    let mut right = one.submit(&flow(10));
    let mut wrong = other.submit(&flow(20));
    assert_eq!(drain(&mut one, &mut wrong), (20, true));
    assert_eq!(drain(&mut one, &mut right), (10, false));
    assert_eq!(send(&mut other, 5), (5, false));
}

#[test]
fn a_flow_is_permitted_in_chunks_that_add_up_to_it() {
    let (daemon, client, mut lane) = attached();
    daemon.knobs.chunk.store(1000, Ordering::SeqCst);
    assert!(client.is_scheduled());
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
    eventually("completions arrive", || completed(&daemon) == total);
    let stats = client.stats();
    assert_eq!((stats.scheduled_bytes, stats.bypassed_bytes), (total, 0));
    assert_eq!(daemon.knobs.garbage.load(Ordering::SeqCst), 0);
}

#[test]
fn collectives_go_on_credit_as_far_as_it_reaches_and_wait_beyond() {
    let (daemon, _client, mut lane) = attached();
    daemon.knobs.credit.store(10_000, Ordering::SeqCst);
    let collective = Flow { stage: Stage::Collective, ..flow(4000) };
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
    assert!(on_credit <= 20_000 && !waiting.is_empty(), "credit is bounded: {on_credit}");
    // Other stages, and ports without a counter, have no credit.
    for other in [
        flow(1),
        Flow { nic: 200, ..collective },
        Flow { direction: Direction::Ingress, ..flow(1) },
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
fn credit_for_idle_ports_ends_for_flows_in_one_piece_when_something_waits() {
    let (daemon, _client, mut lane) = attached();
    daemon.knobs.credit.store(10_000, Ordering::SeqCst);
    daemon.set(&daemon.knobs.idle, true);
    let whole = Flow { whole: true, ..flow(1000) };
    eventually("credit arrives", || {
        let mut ticket = lane.submit(&whole);
        let on_credit = lane.poll(&mut ticket).is_some();
        drain(&mut lane, &mut ticket);
        on_credit
    });
    daemon.set(&daemon.knobs.hold, true);
    let mut ticket = lane.submit(&whole);
    assert!(lane.poll(&mut ticket).is_some(), "credit is at hand");
    daemon.set(&daemon.knobs.idle, false);
    eventually("clients are told", || !daemon.knobs.is_idle.load(Ordering::SeqCst));
    let mut ticket = lane.submit(&whole);
    assert!(lane.poll(&mut ticket).is_none(), "it waits, though credit is at hand");
    daemon.set(&daemon.knobs.hold, false);
    assert_eq!(drain(&mut lane, &mut ticket), (1000, false));
}

#[test]
fn a_full_lane_bypasses_counts_and_recovers() {
    let (daemon, client, mut lane) = attached_to(Geometry { lanes: 2, slots: 16, colour: 3 });
    daemon.set(&daemon.knobs.hold, true);
    let mut tickets: Vec<_> = (0..40).map(|_| lane.submit(&flow(10))).collect();
    let full = client.stats().lane_full;
    assert!(full >= 40 - 15, "{full} flows found no slot");
    // Completions and hints still reach the daemon if the lane is full of waiting flows.
    lane.hint(Hint::LayerBegin { batch: 9, layer: 9 });
    eventually("the hint arrives", || {
        let heard = daemon.knobs.heard.lock().expect("heard");
        heard.contains(&Record::Hint(Hint::LayerBegin { batch: 9, layer: 9 }))
    });
    daemon.set(&daemon.knobs.hold, false);
    let total: u64 = tickets.iter_mut().map(|ticket| drain(&mut lane, ticket).0).sum();
    assert_eq!(total, 400);
    assert_eq!(send(&mut lane, 10), (10, false), "slots came back");
}

#[test]
fn more_lanes_than_seats_work_unscheduled_until_one_is_free() {
    let (daemon, client, mut first) = attached_to(Geometry { lanes: 2, slots: 16, colour: 0 });
    let second = client.lane();
    let mut third = client.lane();
    assert!(first.is_attached() && second.is_attached() && !third.is_attached());
    assert_eq!(send(&mut third, 5), (5, true));
    assert!(client.stats().lane_full > 0);
    drop(second);
    is_scheduled_in_the_end(&mut third);
    assert_eq!(send(&mut first, 5), (5, false));
    assert_eq!(daemon.knobs.garbage.load(Ordering::SeqCst), 0);
}

#[test]
fn a_lane_dropped_with_flows_waiting_withdraws_them() {
    let daemon = TestDaemon::with(Geometry { lanes: 1, slots: 16, colour: 0 });
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
        // The number is not exact, since a lane without a slot leaves them to its next owner.
        !daemon.knobs.heard.lock().expect("heard").is_empty()
    });
    daemon.set(&daemon.knobs.hold, false);
    let mut lane = client.lane();
    is_scheduled_in_the_end(&mut lane);
    assert_eq!(daemon.knobs.garbage.load(Ordering::SeqCst), 0);
}

#[test]
fn cancelling_frees_the_slot_and_tells_the_daemon_what_went_out() {
    let (daemon, _client, mut lane) = attached_to(Geometry { lanes: 1, slots: 16, colour: 0 });
    daemon.knobs.chunk.store(10, Ordering::SeqCst);
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
            let heard = daemon.knobs.heard.lock().expect("heard");
            heard.iter().any(|record| match record {
                Record::Cancelled { permitted, .. } => *permitted == got.bytes,
                _ => false,
            })
        });
    }
    let mut ticket = lane.submit(&flow(100));
    assert_eq!(drain(&mut lane, &mut ticket).0, 100);
}

#[test]
fn a_flow_too_large_for_a_permit_goes_out_unscheduled() {
    let (daemon, _client, mut lane) = attached();
    let mut ticket = lane.submit(&flow(u64::MAX));
    let permit = lane.wait(&mut ticket);
    assert_eq!((permit.bytes, permit.bypassed), (u64::MAX, true));
    assert_eq!(daemon.knobs.garbage.load(Ordering::SeqCst), 0);
}

#[test]
fn completions_that_found_no_slot_are_paid_by_a_thread_that_only_polls() {
    let (daemon, _client, mut lane) = attached_to(Geometry { slots: 16, ..Geometry::default() });
    let mut sent = lane.submit(&flow(1000));
    assert!(lane.wait(&mut sent).last);
    daemon.set(&daemon.knobs.hold, true);
    let mut waiting = lane.submit(&flow(10));
    eventually("the daemon has the second flow", || submitted(&daemon) == 1010);
    daemon.set(&daemon.knobs.deaf, true);
    // There are far more records than slots, so most of them wait.
    for _ in 0..1000 {
        lane.complete(&sent, 1);
    }
    daemon.set(&daemon.knobs.deaf, false);
    eventually("every completion arrives", || {
        assert!(lane.poll(&mut waiting).is_none());
        completed(&daemon) == 1000
    });
}

/// Threads that begin at the same moment, and one that asks for classes all the time, compete for
/// the same locks. No flow may be bypassed for that.
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
            let drained: Vec<_> =
                threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
            over.store(true, Ordering::Relaxed);
            for drained in drained {
                assert_eq!(drained.expect("a thread"), (4096, false));
            }
        });
        assert_eq!(client.stats().bypassed_flows, 0);
    }
}
