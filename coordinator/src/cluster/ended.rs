//! How requests ended. A request ends when a host that may report its end reports it, or when the
//! announcer reports that the batch has finished. A request that is lost with its host does not
//! count.
//!
//! A request is late if the *report* of its end came after its deadline. A report takes
//! milliseconds at most, so this is slightly stricter than what users saw.

use laxity_policy::Time;
use serde::Serialize;

use super::batch::ClusterRequest;

/// Requests that ended since the coordinator started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EndedRequests {
    pub in_time: u64,
    pub late: u64,
    /// Requests that ended late and were pruned at that time.
    pub late_pruned: u64,
    pub undated: u64,
}

impl EndedRequests {
    pub(super) fn count(&mut self, now: Time, request: &ClusterRequest) {
        if request.deadline == Time::NEVER {
            self.undated += 1;
        } else if now <= request.deadline {
            self.in_time += 1;
        } else {
            self.late += 1;
            self.late_pruned += u64::from(request.pruned);
        }
    }
}
