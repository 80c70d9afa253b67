//! RED, the robust effective deadline of a batch: MFS §4.4.2 and Appendix B, step 1.
//!
//! For a batch whose requests are due at `d_1 ≤ d_2 ≤ … ≤ d_n` (instants, nanoseconds):
//!
//! ```text
//! k*      = argmax over 1 ≤ k < n of (d_{k+1} − d_k)     the widest gap
//! f       = k* / n                                        share of the tight requests
//! D_min^T = d_1            D_min^Lo = d_{k*+1}            first deadline of each part
//! RED     = f · D_min^T + (1 − f) · D_min^Lo
//! ```
//!
//! So the majority of the requests sets the urgency of a batch. One request with an early deadline
//! does not move its whole batch ahead of others (the Piggyback effect). The feasibility check of
//! Algorithm 1 compares with `D_min^Lo`.
//!
//! The paper leaves four points open. This module reads them so:
//!
//! * *One request.* There is no gap. Both RED and `D^Lo` are the deadline of the request.
//! * *Equal gaps.* The first gap wins, which is the smallest `k`. The paper finds `k*` by "a linear
//!   scan", which keeps the first maximum. The earlier gap also calls fewer requests outliers and
//!   gives the earlier `D^Lo`, so the feasibility check is not skipped in doubtful cases.
//! * *No deadline.* A request due [`Time::NEVER`] cannot be late, so it is not one of the `n`.
//!   Otherwise it would always follow the widest gap and make `D^Lo` infinite. The other requests
//!   of the batch would then lose their urgency and their feasibility check. A batch in which no
//!   request has a deadline has neither RED nor `D^Lo`.
//! * *Arithmetic.* All arithmetic uses integers, so that two machines agree. RED is rounded down to
//!   the nanosecond, and products have 128 bits, so that no deadline overflows.

use crate::time::Time;

/// The robust effective deadline of one batch, with its tight and loose parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Red {
    /// `RED`, by which batches are ordered; [`Time::NEVER`] if no request has a deadline.
    pub score: Time,
    /// `D_min^T`: when the first request is due.
    pub tight: Time,
    /// `D_min^Lo`: when the first request that is not an outlier is due.
    pub loose: Time,
    /// `k*`: the number of tight requests, zero if fewer than two requests have a deadline.
    pub tight_count: usize,
    /// `n`: the number of requests with a deadline.
    pub count: usize,
}

impl Red {
    /// The RED of a batch without deadlines. Such a batch comes last and is never late.
    pub const NONE: Self = Self {
        score: Time::NEVER,
        tight: Time::NEVER,
        loose: Time::NEVER,
        tight_count: 0,
        count: 0,
    };

    /// Returns the RED of requests that are due at `deadlines`, which must be in ascending order.
    ///
    /// # Panics
    /// In debug builds, if the deadlines are not in ascending order.
    pub fn of_sorted(deadlines: &[Time]) -> Self {
        debug_assert!(deadlines.is_sorted(), "deadlines must be in ascending order");
        let count = deadlines.partition_point(|&deadline| deadline < Time::NEVER);
        let due = &deadlines[..count];
        match *due {
            [] => Self::NONE,
            [only] => Self { score: only, tight: only, loose: only, tight_count: 0, count: 1 },
            [tight, ..] => {
                let tight_count = widest_gap(due);
                let loose = due[tight_count];
                Self {
                    score: weigh(tight, loose, tight_count, count),
                    tight,
                    loose,
                    tight_count,
                    count,
                }
            }
        }
    }
}

/// Returns `k*` of at least two deadlines: the first of the widest gaps.
fn widest_gap(due: &[Time]) -> usize {
    let (mut widest, mut k_star) = (due[1].since(due[0]), 1);
    for k in 2..due.len() {
        let gap = due[k].since(due[k - 1]);
        if gap > widest {
            (widest, k_star) = (gap, k);
        }
    }
    k_star
}

/// Returns `(k · tight + (n − k) · loose) / n`, rounded down. The result lies between the two
/// instants, so it fits 64 bits. The products need 128 bits.
fn weigh(tight: Time, loose: Time, k: usize, n: usize) -> Time {
    let sum = k as u128 * u128::from(tight.0) + (n - k) as u128 * u128::from(loose.0);
    Time((sum / n as u128) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn red(deadlines: &[u64]) -> Red {
        let times: Vec<Time> = deadlines.iter().map(|&ns| Time(ns)).collect();
        Red::of_sorted(&times)
    }

    #[test]
    fn a_single_request_gives_its_own_deadline() {
        let red = red(&[700]);
        assert_eq!((red.score, red.loose), (Time(700), Time(700)));
    }

    #[test]
    fn equal_deadlines_give_that_deadline() {
        let red = red(&[500; 7]);
        assert_eq!((red.score, red.loose), (Time(500), Time(500)));
    }

    #[test]
    fn one_tight_outlier_hardly_moves_the_batch() {
        // f = 1/10: RED = 0.1 · 100 + 0.9 · 10_000.
        let mut deadlines = vec![100];
        deadlines.extend([10_000; 9]);
        let red = red(&deadlines);
        assert_eq!(red.score, Time(9_010));
        assert_eq!((red.tight_count, red.loose), (1, Time(10_000)));
    }

    #[test]
    fn one_loose_outlier_leaves_the_batch_nearly_as_urgent_as_it_was() {
        // f = 9/10: RED = 0.9 · 100 + 0.1 · 10_000.
        let mut deadlines = vec![100; 9];
        deadlines.push(10_000);
        let red = red(&deadlines);
        assert_eq!(red.score, Time(1_090));
        assert_eq!((red.tight_count, red.loose), (9, Time(10_000)));
    }

    #[test]
    fn of_equal_gaps_the_first_splits() {
        let red = red(&[0, 10, 20, 30]);
        assert_eq!((red.tight_count, red.loose), (1, Time(10)));
        assert_eq!(red.score, Time(7), "0.25 · 0 + 0.75 · 10, rounded down");
    }

    #[test]
    fn a_request_without_deadline_does_not_dilute_those_that_have_one() {
        let never = Time::NEVER.0;
        let diluted = red(&[100, 200, 900, never, never]);
        assert_eq!(diluted, red(&[100, 200, 900]));
        assert_eq!(red(&[100, never]), red(&[100]));
    }

    #[test]
    fn a_batch_without_deadlines_is_never_due() {
        assert_eq!(red(&[]), Red::NONE);
        assert_eq!(red(&[Time::NEVER.0; 3]), Red::NONE);
    }

    #[test]
    fn deadlines_near_the_end_of_time_do_not_overflow() {
        let last = u64::MAX - 1;
        let red = red(&[last - 2, last, last, last]);
        assert_eq!(red.score, Time(last - 1), "last − 2/4, rounded down");
    }
}
