//! Attainment over the last hour: how many requests ended in time and how many late, in buckets of
//! [`EVERY`].

use std::collections::VecDeque;
use std::time::Duration;

use crate::cluster::EndedRequests;

pub(super) const EVERY: Duration = Duration::from_secs(10);
/// Maximum number of buckets that are stored: an hour.
const BUCKETS_MAX: usize = 360;

/// Complete buckets, newest last, and the counts at the end of the newest one.
#[derive(Debug, Default)]
pub(super) struct History {
    buckets: VecDeque<[u64; 2]>,
    before: EndedRequests,
}

impl History {
    fn since(&self, sums: EndedRequests) -> [u64; 2] {
        [
            sums.in_time.saturating_sub(self.before.in_time),
            sums.late.saturating_sub(self.before.late),
        ]
    }

    pub(super) fn close(&mut self, sums: EndedRequests) {
        let bucket = self.since(sums);
        self.buckets.push_back(bucket);
        if self.buckets.len() > BUCKETS_MAX {
            self.buckets.pop_front();
        }
        self.before = sums;
    }

    /// Returns (in time, late) of each bucket, newest last. The last one is not complete.
    pub(super) fn buckets(&self, sums: EndedRequests) -> Vec<[u64; 2]> {
        let open = self.since(sums);
        self.buckets.iter().copied().chain([open]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(in_time: u64, late: u64) -> EndedRequests {
        EndedRequests { in_time, late, ..EndedRequests::default() }
    }

    #[test]
    fn a_bucket_has_what_ended_since_the_one_before_and_the_open_one_shows_at_once() {
        let mut history = History::default();
        assert_eq!(history.buckets(sums(3, 1)), [[3, 1]]);
        history.close(sums(5, 1));
        assert_eq!(history.buckets(sums(5, 4)), [[5, 1], [0, 3]]);
    }

    #[test]
    fn an_hour_is_kept() {
        let mut history = History::default();
        for n in 0..1000 {
            history.close(sums(n, 0));
        }
        assert_eq!(history.buckets(sums(999, 0)).len(), BUCKETS_MAX + 1);
    }
}
