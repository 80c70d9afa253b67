//! Tests of campaigns in virtual time.

use super::play;
use crate::faults::schedule::{FaultKind, Schedule};

fn schedule(seed: u64, round: u64) -> Schedule {
    Schedule::draw_of(&FaultKind::VIRTUAL, seed, round, 50)
}

#[test]
fn a_seed_gives_the_same_events_each_time() {
    let one = schedule(7, 0);
    let (first, second) = (play(&one, None).unwrap(), play(&one, None).unwrap());
    assert_eq!((first.events, first.digest), (second.events, second.digest));
    assert_ne!(first.digest, play(&schedule(7, 1), None).unwrap().digest);
}
