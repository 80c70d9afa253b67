//! How requests ended, as far as the coordinator sees it: a request ends when a host entitled to
//! say so says it, or when the owner of its batch says that the batch has finished. One that is
//! lost with its host has not ended.
//!
//! A report takes its time, so a request is counted as late if its end was *heard* after its
//! deadline; that is at most one report (milliseconds) stricter than what its users saw.

use laxity_policy::Time;

use super::Cluster;
use super::table::Key;

/// Requests that ended, since the coordinator started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// By their deadline.
    pub in_time: u64,
    /// After it.
    pub late: u64,
    /// Of those that ended late: pruned at that time.
    pub late_pruned: u64,
    /// Without one.
    pub undated: u64,
}

impl Cluster {
    /// The request is about to end in order.
    pub(super) fn count_end(&mut self, now: Time, key: Key) {
        let Some(request) = self.requests.get(key) else {
            return;
        };
        let ended = &mut self.ended;
        if request.deadline == Time::NEVER {
            ended.undated += 1;
        } else if now <= request.deadline {
            ended.in_time += 1;
        } else {
            ended.late += 1;
            ended.late_pruned += u64::from(request.pruned);
        }
    }

    /// The batch is about to end in order, with what it still has.
    pub(super) fn count_ends_of(&mut self, now: Time, key: Key) {
        let requests = self.batches.get(key).map(|batch| batch.requests.clone());
        for request in requests.into_iter().flatten() {
            self.count_end(now, request);
        }
    }
}
