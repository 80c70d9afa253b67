//! Which collectives would have gone ahead of other stages, by minute and job.
//!
//! A host may have many jobs, and each snapshot has this table. So a minute names few of them, and
//! the collectives of the others count as those of [`OTHER`].

use std::collections::VecDeque;

use crate::jobs::OTHER;
use crate::stats::AheadCount;

const JOBS_MAX: usize = 4;
/// Maximum number of entries: an hour of minutes, with [`OTHER`] in each.
const ENTRIES_MAX: usize = 60 * (JOBS_MAX + 1);

/// The counts, each with its number of the minute, the latest minute last.
#[derive(Debug, Default)]
pub struct AheadByJob(VecDeque<(u64, AheadCount)>);

impl AheadByJob {
    /// Counts a collective of a job that would have gone ahead in a minute.
    pub fn count(&mut self, minute: u64, job: usize, bytes: u64) {
        let of_minute = || self.0.iter().rev().take_while(|(number, _)| *number == minute);
        let is_known = of_minute().any(|(_, count)| count.job == job);
        let named = of_minute().filter(|(_, count)| count.job != OTHER).count();
        let job = if is_known || named < JOBS_MAX { job } else { OTHER };
        let mut latest = self.0.iter_mut().rev().take_while(|(number, _)| *number == minute);
        if let Some((_, known)) = latest.find(|(_, count)| count.job == job) {
            known.collectives += 1;
            known.bytes += bytes;
            return;
        }
        if self.0.len() == ENTRIES_MAX {
            self.0.pop_front();
        }
        self.0.push_back((minute, AheadCount { minutes_ago: 0, job, collectives: 1, bytes }));
    }

    /// Returns the counts of an hour, seen from the minute `now`.
    pub fn counts(&self, now: u64) -> Vec<AheadCount> {
        let seen = self.0.iter().map(|&(number, count)| AheadCount {
            minutes_ago: now.saturating_sub(number),
            ..count
        });
        seen.filter(|count| count.minutes_ago <= 60).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minute_names_few_jobs_and_counts_the_collectives_of_all() {
        let mut ahead = AheadByJob::default();
        for job in [3, 1, 3, 2, 4, 5, 6, 1] {
            ahead.count(7, job, 100);
        }
        ahead.count(8, 5, 100);
        let seen = ahead.counts(9);
        let row = |count: &AheadCount| (count.minutes_ago, count.job, count.collectives);
        let rows: Vec<_> = seen.iter().map(row).collect();
        assert_eq!(rows, [(2, 3, 2), (2, 1, 2), (2, 2, 1), (2, 4, 1), (2, OTHER, 2), (1, 5, 1)]);
        assert_eq!(seen.iter().map(|count| count.bytes).sum::<u64>(), 900);
        assert!(ahead.counts(100).is_empty(), "an hour later");
    }

    #[test]
    fn the_table_is_bounded() {
        let mut ahead = AheadByJob::default();
        for minute in 0..1000 {
            for job in 1..10 {
                ahead.count(minute, job, 1);
            }
        }
        assert_eq!(ahead.0.len(), ENTRIES_MAX);
    }
}
