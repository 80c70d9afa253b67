//! How requests ended, as far as the coordinator sees it: a request ends when a host entitled to
//! say so says it, or when the announcer of its batch says that the batch has finished. A request
//! that is lost with its host has not ended.
//!
//! A report takes its time, so a request counts as late if its end was *heard* after its deadline.
//! That is at most one report (milliseconds) stricter than what its users saw.

use laxity_policy::Time;

use super::batch::Request;

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

impl Ended {
    pub(super) fn count(&mut self, now: Time, request: &Request) {
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
