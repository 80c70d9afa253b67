//! The batch table at its bounds, when all its entries have waiting flows.

use super::*;
use crate::link::named::FORGET_TRIES;

const SPEC: BatchSpec = BatchSpec { batch: BatchId(0), layers: 4, layer_time: Span(10) };

/// A table that is full of batches and requests with waiting flows.
fn full() -> BatchTable {
    let mut batches = BatchTable::new();
    for id in 1..=BATCHES_MAX as u64 {
        let slot = batches.enter_batch(BatchId(id));
        batches.batch_mut(slot).waiting = 1;
    }
    for id in 1..=REQUESTS_MAX as u64 {
        let slot = batches.enter_request(RequestId(id));
        batches.request_mut(slot).first = 7;
    }
    batches
}

#[test]
fn at_the_cap_a_newcomer_is_not_entered_and_few_old_ones_are_looked_at() {
    let mut batches = full();
    for nth in 0..1000_u64 {
        let before = [batches.batches.oldest().0, batches.requests.oldest().0];
        let id = 1_000_000 + nth;
        assert_eq!(batches.enter_batch(BatchId(id)), NULL_BATCH);
        assert_eq!(batches.enter_request(RequestId(id)), NONE);
        // Each record has one entry in `ages`, by number. So the front says how many were checked.
        let turned = |new: u64, old: u64, all: usize| (new + all as u64 - old) % all as u64;
        let tries = FORGET_TRIES as u64;
        let after = [batches.batches.oldest().0, batches.requests.oldest().0];
        assert!(turned(after[0], before[0], BATCHES_MAX) <= tries);
        assert!(turned(after[1], before[1], REQUESTS_MAX) <= tries);
    }
    assert_eq!(batches.batches_known(), BATCHES_MAX);
    assert_eq!(batches.requests_known(), REQUESTS_MAX);
    assert_eq!(batches.batches.oldest().1, BATCHES_MAX);
}

#[test]
fn a_hint_of_a_batch_that_finds_no_room_says_nothing_of_the_unknown_one() {
    let mut batches = full();
    let batch = BatchId(u64::MAX);
    assert_eq!(batches.announce(&BatchSpec { batch, ..SPEC }), NULL_BATCH);
    assert!(!batches.batch(NULL_BATCH).announced);
    assert_eq!(batches.batch(NULL_BATCH).layers, 0);
}

#[test]
fn whatever_waits_no_more_makes_room_once_the_line_has_come_round_to_it() {
    let mut batches = full();
    let slot = batches.find_batch(BatchId(40_000)).expect("known");
    batches.batch_mut(slot).waiting = 0;
    let newcomer = BatchId(u64::MAX);
    let calls = (1..).find(|_| batches.enter_batch(newcomer) != NULL_BATCH);
    assert_eq!(calls, Some(40_000_usize.div_ceil(FORGET_TRIES)));
    assert_eq!(batches.find_batch(BatchId(40_000)), None);
    assert_eq!(batches.batches_known(), BATCHES_MAX);
}
