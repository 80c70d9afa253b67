//! Counters of this process, written at exit to the file that `LAXITY_REPORT` names.

use core::sync::atomic::{AtomicU64, Ordering};

use laxity_job::report::{Count, ReportLine};

use crate::{lanes, table};

/// Counters of rare events. Frequent ones are counted per queue pair. Relaxed: statistics.
#[derive(Debug, Default)]
pub(crate) struct VerbsCounters {
    /// Work requests that had to wait for a permit.
    pub(crate) deferred: Count,
    /// Work requests that went out without a permit, because one behind them was permitted.
    pub(crate) pulled: Count,
    /// Work requests that passed through, with their bytes. Their queue pairs have types that are
    /// not scheduled (UD, raw, XRC) or were never seen.
    pub(crate) passed: Count,
    pub(crate) passed_bytes: Count,
    /// Work requests refused because the send queue was full.
    pub(crate) refused: Count,
    /// Work requests that the provider refused after the program's post succeeded.
    pub(crate) failed_late: Count,
    /// Work requests that waited when their queue pair was reset or destroyed.
    pub(crate) dropped: Count,
}

pub(crate) static COUNTERS: VerbsCounters = VerbsCounters {
    deferred: Count::new(),
    pulled: Count::new(),
    passed: Count::new(),
    passed_bytes: Count::new(),
    refused: Count::new(),
    failed_late: Count::new(),
    dropped: Count::new(),
};
/// Bit mask of the DSCPs that queue pairs were given.
static DSCPS: AtomicU64 = AtomicU64::new(0);
/// Records a DSCP that a queue pair was given.
pub(crate) fn note_dscp(dscp: u8) {
    DSCPS.fetch_or(1 << (dscp & 63), Ordering::Relaxed);
}

/// Sends all outstanding reports to the daemon and writes the report line.
pub(crate) fn end() {
    table::report_all_ahead();
    lanes::settle_all();
    line().append();
}

fn line() -> ReportLine {
    let counts = table::counts();
    let dscps = DSCPS.load(Ordering::Relaxed);
    let dscps: Vec<_> = (0..64).filter(|dscp| dscps >> dscp & 1 == 1).collect();
    let mut line = ReportLine::of("liblaxity");
    line.counts([
        ("work_requests", counts.posted),
        ("bytes", counts.posted_bytes),
        ("deferred", COUNTERS.deferred.get()),
        ("pulled", COUNTERS.pulled.get()),
        ("passed_work_requests", COUNTERS.passed.get()),
        ("passed_bytes", COUNTERS.passed_bytes.get()),
        ("refused", COUNTERS.refused.get()),
        ("failed_late", COUNTERS.failed_late.get()),
        ("dropped", COUNTERS.dropped.get()),
        ("completions", counts.completions),
    ]);
    line.counts(lanes::stats().reported());
    line.value("dscp", format_args!("{dscps:?}"));
    line
}
