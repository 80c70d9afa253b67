//! Counters of a process that created a request, written at exit to the file that `LAXITY_REPORT`
//! names.

use laxity_client::hints;
use laxity_job::report::{Count, ReportLine};

/// Counters of this process. Relaxed: statistics.
#[derive(Debug, Default)]
pub(crate) struct PostCounters {
    /// Calls of `postXferReq`, and their bytes where they are known.
    pub(crate) posts: Count,
    pub(crate) bytes: Count,
    /// Posts that had to wait for a permit after the call.
    pub(crate) deferred: Count,
    /// Posts that went to NIXL unscheduled.
    pub(crate) passed: Count,
    /// Of these: posts whose permit didn't come in time.
    pub(crate) expired: Count,
    /// Requests that their owner exempted because it waits for permits itself.
    pub(crate) exempt: Count,
    /// Requests and lists whose descriptors can't be read here.
    pub(crate) unknown: Count,
    /// Deferred posts whose request was released or whose agent was destroyed.
    pub(crate) dropped: Count,
    /// Deferred posts that NIXL refused.
    pub(crate) failed_late: Count,
}

pub(crate) static COUNTERS: PostCounters = PostCounters {
    posts: Count::new(),
    bytes: Count::new(),
    deferred: Count::new(),
    passed: Count::new(),
    expired: Count::new(),
    exempt: Count::new(),
    unknown: Count::new(),
    dropped: Count::new(),
    failed_late: Count::new(),
};

/// Appends the line of this library to the report, if `LAXITY_REPORT` names a file.
pub(crate) fn write() {
    let mut line = ReportLine::of("liblaxity_nixl");
    line.counts([
        ("posts", COUNTERS.posts.get()),
        ("bytes", COUNTERS.bytes.get()),
        ("deferred", COUNTERS.deferred.get()),
        ("passed", COUNTERS.passed.get()),
        ("expired", COUNTERS.expired.get()),
        ("exempt", COUNTERS.exempt.get()),
        ("unknown", COUNTERS.unknown.get()),
        ("dropped", COUNTERS.dropped.get()),
        ("failed_late", COUNTERS.failed_late.get()),
    ]);
    line.counts(hints::client().stats().reported());
    line.append();
}
