//! What a page shows of the last hour: how counters grew, in buckets.

use std::collections::VecDeque;
use std::time::Duration;

/// The time of one bucket.
pub const BUCKET: Duration = Duration::from_secs(10);
/// Maximum number of complete buckets: an hour.
const BUCKETS_MAX: usize = 360;

/// The growth of `N` counters in each [`BUCKET`].
#[derive(Debug)]
pub struct History<const N: usize> {
    /// Complete buckets, newest last.
    buckets: VecDeque<[u64; N]>,
    /// The counters at the end of the newest complete bucket.
    before: [u64; N],
}

impl<const N: usize> Default for History<N> {
    fn default() -> Self {
        Self { buckets: VecDeque::new(), before: [0; N] }
    }
}

impl<const N: usize> History<N> {
    fn since(&self, now: [u64; N]) -> [u64; N] {
        std::array::from_fn(|index| now[index].saturating_sub(self.before[index]))
    }

    /// Ends a bucket in which the counters have become `now`.
    pub fn close(&mut self, now: [u64; N]) {
        self.buckets.push_back(self.since(now));
        if self.buckets.len() > BUCKETS_MAX {
            self.buckets.pop_front();
        }
        self.before = now;
    }

    /// Returns all buckets, newest last. The last one is not complete.
    pub fn buckets(&self, now: [u64; N]) -> Vec<[u64; N]> {
        self.buckets.iter().copied().chain([self.since(now)]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_has_what_came_since_the_one_before_and_an_hour_is_kept() {
        let mut history = History::default();
        assert_eq!(history.buckets([3, 1]), [[3, 1]]);
        history.close([5, 1]);
        assert_eq!(history.buckets([5, 4]), [[5, 1], [0, 3]]);
        for n in 0..1000 {
            history.close([n, 0]);
        }
        assert_eq!(history.buckets([999, 0]).len(), BUCKETS_MAX + 1);
    }
}
