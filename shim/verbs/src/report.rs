//! Counters of this process, written at exit to the file that `LAXITY_REPORT` names.

use core::sync::atomic::{AtomicU64, Ordering};

use laxity_job::counters;
use laxity_job::exit::at_exit;
use laxity_job::report::ReportLine;

use crate::bundle::agent;
use crate::{lanes, table};

counters! {
    /// Counters of rare events. Frequent ones are counted per queue pair. Relaxed: statistics.
    VerbsCounters, COUNTERS {
        /// Work requests that had to wait for a permit.
        deferred,
        /// Work requests that went out without a permit, because one behind them was permitted.
        pulled,
        /// Work requests that passed through, with their bytes. Their queue pairs have types that
        /// are not scheduled (UD, raw, XRC), are not ready to send, or were never seen.
        passed_work_requests,
        passed_bytes,
        /// Work requests refused because the send queue was full, or because they were not valid.
        refused,
        /// Work requests that the provider refused after the program's post succeeded.
        failed_late,
        /// Work requests that other queue pairs of a bundle carried than the program's own.
        by_siblings,
        /// Work requests that waited when their queue pair was reset or destroyed.
        dropped,
    }
}

/// Bit mask of the DSCPs that queue pairs were given.
static DSCPS: AtomicU64 = AtomicU64::new(0);

pub(crate) fn note_dscp(dscp: u8) {
    DSCPS.fetch_or(1 << (dscp & 63), Ordering::Relaxed);
}

pub(crate) fn at_end() {
    if at_exit(end) {
        COUNTERS.reset();
        DSCPS.store(0, Ordering::Relaxed);
    }
}

/// Sends all outstanding reports to the daemon and writes the report line.
fn end() {
    table::report_all_ahead();
    lanes::settle_all();
    let counts = table::counts();
    let dscps = DSCPS.load(Ordering::Relaxed);
    let dscps: Vec<_> = (0..64).filter(|dscp| dscps >> dscp & 1 == 1).collect();
    let mut line = ReportLine::of("liblaxity");
    line.counts([("work_requests", counts.posted), ("bytes", counts.posted_bytes)]);
    line.counts(COUNTERS.reported());
    line.value("bundles", agent::made());
    line.value("completions", counts.completions);
    line.counts(lanes::stats().reported());
    line.value("dscp", format_args!("{dscps:?}"));
    line.append();
}
