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
