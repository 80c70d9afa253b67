//! Counters of a process that created a request, written at exit to the file that `LAXITY_REPORT`
//! names.

use laxity_client::hints;
use laxity_job::counters;
use laxity_job::report::ReportLine;

counters! {
    /// Counters of this process. Relaxed: statistics.
    PostCounters, COUNTERS {
        /// Calls of `postXferReq`, and their bytes where they are known.
        posts,
        bytes,
        /// Posts that had to wait for a permit after the call.
        deferred,
        /// Posts of recorded requests that went to NIXL unscheduled.
        passed,
        /// Posts among the passed ones whose permit didn't come in time.
        expired,
        /// Requests that their owner exempted because it waits for permits itself.
        exempt,
        /// Requests whose bytes are not known, since their descriptors can't be read here.
        unknown,
        /// Deferred posts whose request was released or whose agent was destroyed.
        dropped,
        /// Deferred posts that NIXL refused.
        failed_late,
    }
}

/// Appends the line of this library to the report, if `LAXITY_REPORT` names a file.
pub(crate) fn write() {
    let mut line = ReportLine::of("liblaxity_nixl");
    line.counts(COUNTERS.reported());
    line.counts(hints::client().stats().reported());
    line.append();
}
