//! Sort keys, by which daemons learn the order `σ` without messages about all batches.
//!
//! The key of a batch is its RED on the coordinator's clock. `σ` is ascending RED, so to compare
//! keys is to compare places. A batch that arrives or departs changes no other batch's key.
//!
//! *Hysteresis.* A key stays until RED is more than a margin away from it, and is then RED again:
//!
//! ```text
//! key' = key   if |RED − key| ≤ margin,   else RED
//! ```
//!
//! * *Ranks don't flap.* Between two changes of a key, RED moves by more than the margin. Smaller
//!   moves are noise: the deadline of a request that is reported again shifts by the difference of
//!   two transit times, and one ended request of many moves RED little.
//! * *The cost is bounded.* Two batches are served against their REDs only if these are less than
//!   two margins apart. With the default of 2 ms, a batch can lose 4 ms of laxity.
//! * *A key depends on no other batch*, so there are no cycles, and deltas stay small.
//!
//! Two alternatives were rejected. A margin between pairs of batches is not transitive. A hold time
//! before a new rank delays urgent batches most.

use laxity_policy::{Span, Time};
use laxity_wire::v1::SORT_KEY_LAST;

/// Returns the sort key of a batch with the RED `red`, whose key was `held`.
pub(crate) fn follow(held: Option<u64>, red: Time, margin: Span) -> u64 {
    if red == Time::NEVER {
        return SORT_KEY_LAST;
    }
    match held {
        Some(key) if key != SORT_KEY_LAST && key.abs_diff(red.0) <= margin.0 => key,
        _ => red.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_key_stays_within_the_margin_and_follows_beyond_it() {
        let margin = Span(10);
        assert_eq!(follow(None, Time(100), margin), 100);
        assert_eq!(follow(Some(100), Time(110), margin), 100);
        assert_eq!(follow(Some(100), Time(90), margin), 100);
        assert_eq!(follow(Some(100), Time(111), margin), 111);
        assert_eq!(follow(Some(100), Time::NEVER, margin), SORT_KEY_LAST);
        assert_eq!(follow(Some(SORT_KEY_LAST), Time(5), margin), 5);
    }

    proptest! {
        #[test]
        fn keys_invert_reds_only_within_two_margins(
            reds in proptest::collection::vec((0_u64..1000, 0_u64..1000), 1..50),
            margin in 0_u64..100,
        ) {
            let (mut one, mut two) = (None, None);
            for (red_one, red_two) in reds {
                let one_key = follow(one, Time(red_one), Span(margin));
                let two_key = follow(two, Time(red_two), Span(margin));
                if red_one + 2 * margin < red_two {
                    prop_assert!(one_key < two_key);
                }
                (one, two) = (Some(one_key), Some(two_key));
            }
        }

        #[test]
        fn a_key_changes_only_after_red_has_moved_by_more_than_the_margin(
            reds in proptest::collection::vec(0_u64..1000, 1..50),
            margin in 0_u64..100,
        ) {
            let mut held = None;
            for red in reds {
                let key = follow(held, Time(red), Span(margin));
                if let Some(before) = held && before != key {
                    prop_assert!(u64::abs_diff(before, red) > margin);
                }
                held = Some(key);
            }
        }
    }
}
