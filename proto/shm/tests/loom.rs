//! Every interleaving, within bounds, of the protocols of `lane.rs` and `sleep.rs`.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p laxity-shm --test loom --release`. Loom replaces
//! the atomics by its own and tries every outcome that the C11 model allows, including weak
//! reorderings. The bounds are: lanes of eight slots (the minimum), two threads, and at most three
//! preemptions in bounded models. `membarrier` is modelled as a `SeqCst` fence on both sides, see
//! `sync.rs`.
//!
//! Each weakened ordering made a model fail, except for two that loom cannot check, because it
//! never lets a load return what is stored later. These are a copy that is torn by an *early*
//! overwrite (the Release of a permit or of `consumed`), and a load of `wakes` that sinks below the
//! store of `awaited`. The arguments in `lane.rs` and `sleep.rs` cover them.

#![cfg(loom)]

use laxity_shm::consumer::{Consumer, Wake};
use laxity_shm::lane::LaneMemory;
use laxity_shm::layout::{Header, attention};
use laxity_shm::permit::{SlotState, decode};
use laxity_shm::producer::Producer;
use laxity_shm::record::{Flow, Hint, Record};
use laxity_shm::sleep::Awaited;
use laxity_shm::sync::heavy_fence;
use loom::sync::Arc;
use loom::thread;

const SLOTS: u16 = 8;

fn lane() -> (Producer, Consumer) {
    let memory = LaneMemory::heap(SLOTS);
    (Producer::new(memory.clone()), Consumer::new(memory, false))
}

fn bounded(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Returns a record whose fields all depend on `n`, so that a torn or stale copy shows.
fn hint(n: u64) -> Record {
    Record::Hint(Hint::RequestJoin { batch: n, request: n << 8, deadline_ns: !n, bytes: n * 3 })
}

fn flow(bytes: u64) -> Flow {
    Flow { bytes, batch: bytes, request: bytes, deadline_ns: bytes, ..Flow::default() }
}

fn take(consumer: &mut Consumer) -> laxity_shm::consumer::Incoming {
    loop {
        if let Some(incoming) = consumer.poll() {
            return incoming.expect("no garbage");
        }
        thread::yield_now();
    }
}

#[test]
fn records_arrive_whole_once_and_in_order() {
    bounded(3, || {
        let (mut producer, mut consumer) = lane();
        let client = thread::spawn(move || {
            for n in 1..=3 {
                producer.publish(&hint(n)).expect("room");
            }
        });
        for n in 1..=3 {
            let incoming = take(&mut consumer);
            assert_eq!(incoming.record, hint(n));
            assert_eq!(incoming.at.tag, n);
        }
        assert!(consumer.poll().is_none());
        client.join().expect("client");
    });
}

/// The lane is full, so that every further record overwrites a slot that `consumed` freed.
#[test]
fn a_slot_is_overwritten_only_after_its_record_was_copied() {
    bounded(2, || {
        let (mut producer, mut consumer) = lane();
        for n in 1..u64::from(SLOTS) {
            producer.publish(&hint(n)).expect("room");
        }
        let client = thread::spawn(move || {
            let mut n = u64::from(SLOTS);
            while n < u64::from(SLOTS) + 2 {
                match producer.publish(&hint(n)) {
                    Ok(_) => n += 1,
                    Err(_) => thread::yield_now(),
                }
            }
        });
        for n in 1..u64::from(SLOTS) + 2 {
            assert_eq!(take(&mut consumer).record, hint(n));
            consumer.flush();
        }
        client.join().expect("client");
    });
}

/// Chunks arrive as growing sums. After the last one the client uses the slot again while the
/// daemon still handles the old flow.
#[test]
fn a_permit_in_chunks_is_given_once_and_its_slot_is_free_after_the_last() {
    bounded(3, || {
        let (mut producer, mut consumer) = lane();
        let client = thread::spawn(move || {
            let at = producer.publish_gated(&Record::Submit(flow(10))).expect("room");
            let mut permitted = 0;
            loop {
                if let SlotState::Permit { cumulative, last, .. } = producer.state(at) {
                    assert!(cumulative >= permitted, "never takes back");
                    permitted = cumulative;
                    if last {
                        break;
                    }
                }
                thread::yield_now();
            }
            assert_eq!(permitted, 10);
            producer.release(at);
            producer.publish(&hint(7)).expect("room");
        });
        let first = take(&mut consumer);
        assert_eq!(first.record, Record::Submit(flow(10)));
        let _ = consumer.permit(first.at, 4, 2, false).expect("waits");
        let _ = consumer.permit(first.at, 10, 2, true).expect("waits");
        consumer.permit(first.at, 10, 2, true).expect_err("had its last");
        assert_eq!(take(&mut consumer).record, hint(7));
        client.join().expect("client");
    });
}

/// Bypass races with permits: the client counts the bytes that it read, sends the rest itself, and
/// reuses the slot. No later write of the daemon may count as the next flow's permit.
#[test]
fn a_permit_that_crosses_a_withdrawal_reaches_nobody() {
    bounded(3, || {
        let (mut producer, mut consumer) = lane();
        let client = thread::spawn(move || {
            let at = producer.publish_gated(&Record::Submit(flow(10))).expect("room");
            let seen = match producer.state(at) {
                SlotState::Permit { cumulative, last: false, .. } => cumulative,
                SlotState::Permit { cumulative, last: true, .. } => {
                    producer.release(at);
                    return (cumulative, 0, None);
                }
                _ => 0,
            };
            // From here on the word is not read again.
            producer.withdraw(at, seen).expect("room");
            (seen, 10 - seen, Some(seen))
        });
        let first = take(&mut consumer);
        let mut written = 0;
        let mut told = None;
        for sum in [4, 10] {
            if let Some(Ok(incoming)) = consumer.poll() {
                match incoming.record {
                    Record::Cancelled { tag, permitted } if tag == first.at.tag => {
                        told = Some(permitted);
                    }
                    other => panic!("{other:?}"),
                }
            }
            match consumer.permit(first.at, sum, 2, sum == 10) {
                Ok(_) => written = sum,
                Err(_) => assert!(told.is_some(), "refused only after the withdrawal"),
            }
        }
        let (permitted, bypassed, withdrawn) = client.join().expect("client");
        assert_eq!(permitted + bypassed, 10, "each byte once");
        assert!(permitted <= written || withdrawn.is_none());
        if let Some(Ok(incoming)) = consumer.poll()
            && let Record::Cancelled { permitted, .. } = incoming.record
        {
            told = Some(permitted);
        }
        assert_eq!(told, withdrawn, "the daemon learns how much went out with its leave");
    });
}

#[test]
fn a_withdrawn_slot_comes_back_only_after_the_daemon_forgot_the_flow() {
    bounded(2, || {
        let (mut producer, mut consumer) = lane();
        let client = thread::spawn(move || {
            let at = producer.publish_gated(&Record::Submit(flow(10))).expect("room");
            producer.withdraw(at, 0).expect("room");
            // Fill the lane, so that the slot is used again.
            let mut rounds = 0;
            while rounds < u64::from(SLOTS) {
                match producer.publish(&hint(rounds + 1)) {
                    Ok(_) => rounds += 1,
                    Err(_) => thread::yield_now(),
                }
            }
        });
        let first = take(&mut consumer);
        // The latest possible permit: just before the daemon reads the withdrawal.
        let _ = consumer.permit(first.at, 10, 2, false);
        assert!(matches!(take(&mut consumer).record, Record::Cancelled { permitted: 0, .. }));
        consumer.permit(first.at, 10, 2, true).expect_err("forgotten");
        consumer.flush();
        for n in 1..=u64::from(SLOTS) {
            assert_eq!(take(&mut consumer).record, hint(n), "not torn by a late permit");
            consumer.flush();
        }
        client.join().expect("client");
    });
}

#[test]
fn credit_only_grows_and_is_never_seen_larger_than_given() {
    bounded(3, || {
        let (producer, mut consumer) = lane();
        let client = thread::spawn(move || {
            let first = producer.credit(0);
            let second = producer.credit(0);
            assert!(first <= second && second <= 30);
        });
        consumer.give_credit(0, 10);
        consumer.give_credit(0, 30);
        consumer.give_credit(0, 20);
        assert_eq!(consumer.credit(0), (30, 0));
        client.join().expect("client");
    });
}

/// A client that sleeps on a permit is woken: it never sleeps with the permit written and no
/// wake-up counted. `woken_since` stands for `futex_wait`, which compares and sleeps at once.
#[test]
fn no_wake_up_of_a_client_is_lost() {
    bounded(3, || {
        let (mut producer, mut consumer) = lane();
        let at = producer.publish_gated(&Record::Submit(flow(10))).expect("room");
        let client = thread::spawn(move || {
            let mut known = producer.word(at.slot);
            for turn in 1.. {
                if matches!(decode(known), SlotState::Permit { last: true, .. }) {
                    break;
                }
                let waiter = &producer.memory().header().waiter;
                let announced = waiter.announce(Awaited::Slot(at.slot), turn);
                let word = producer.word(at.slot);
                if word == known {
                    // The client sleeps. If no wake-up ends this loop, loom reports a deadlock.
                    while !waiter.woken_since(announced) {
                        thread::yield_now();
                    }
                }
                waiter.awake();
                known = producer.word(at.slot);
            }
        });
        let first = take(&mut consumer);
        for (sum, last) in [(5, false), (10, true)] {
            if consumer.permit(first.at, sum, 2, last).expect("waits") == Wake::Needed {
                consumer.wake();
            }
        }
        client.join().expect("client");
    });
}

/// Without a second look, either the sleeper sees the permit or the waker sees the sleeper.
#[test]
fn the_waker_sees_the_sleeper_or_the_sleeper_sees_the_permit() {
    loom::model(|| {
        let (mut producer, mut consumer) = lane();
        let at = producer.publish_gated(&Record::Submit(flow(10))).expect("room");
        let first = take(&mut consumer);
        let client = thread::spawn(move || {
            let known = producer.word(at.slot);
            let waiter = &producer.memory().header().waiter;
            let announced = waiter.announce(Awaited::Slot(at.slot), 1);
            let sees = producer.word(at.slot) != known
                || matches!(decode(known), SlotState::Permit { .. });
            (sees, announced, producer)
        });
        let woke = consumer.permit(first.at, 10, 2, true).expect("waits") == Wake::Needed
            && consumer.wake();
        let (sees, announced, producer) = client.join().expect("client");
        assert!(sees || woke, "asleep for ever");
        if !sees {
            assert!(producer.memory().header().waiter.woken_since(announced));
        }
    });
}

/// The daemon's sleep: either its last look finds the record, or the submitter sees the flag and
/// writes the eventfd.
#[test]
fn the_daemon_finds_the_record_or_the_submitter_rings() {
    loom::model(|| {
        let (mut producer, mut consumer) = lane();
        let header = Arc::new(Header::new());
        let theirs = Arc::clone(&header);
        let client = thread::spawn(move || {
            producer.publish(&hint(1)).expect("room");
            let seen = theirs.after_publish();
            seen != 0 && theirs.answer(0, seen)
        });
        header.raise(attention::SLEEPING);
        heavy_fence();
        let found = consumer.poll().is_some();
        let rung = client.join().expect("client");
        assert!(found || rung, "asleep with a record in the lane");
    });
}

/// Switching doorbells on: the sweep finds a record of a submitter that did not see the flag.
#[test]
fn no_record_is_missed_when_doorbells_are_switched_on() {
    loom::model(|| {
        let (mut producer, mut consumer) = lane();
        let header = Arc::new(Header::new());
        let theirs = Arc::clone(&header);
        let client = thread::spawn(move || {
            producer.publish(&hint(1)).expect("room");
            let seen = theirs.after_publish();
            if seen != 0 {
                let _ = theirs.answer(0, seen);
            }
        });
        header.raise(attention::DOORBELL);
        heavy_fence();
        let found = consumer.poll().is_some();
        client.join().expect("client");
        assert!(found || header.rings(0) == 1, "in the lane, and no bell rang");
    });
}
