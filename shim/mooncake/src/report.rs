//! Counters of a process that made an engine, written at exit to the file that `LAXITY_REPORT`
//! names.

use core::sync::atomic::{AtomicU64, Ordering};

use laxity_client::hints;
use laxity_job::counters;
use laxity_job::exit::at_exit;
use laxity_job::report::ReportLine;

use crate::hub;

counters! {
    /// Counters of this process. Relaxed: statistics.
    TransferCounters, COUNTERS {
        /// Calls of `submitTransfer` and `submitTransferWithNotify`.
        calls,
        transfers,
        bytes,
        /// Transfers that had to wait for a permit.
        deferred,
        /// Transfers of gated engines that were handed on unchanged, see `batch.rs`.
        passed,
        /// Transfers whose memory owner was recorded for `liblaxity.so`.
        hinted,
        /// Transfers that Mooncake refused after the program's call succeeded.
        failed_late,
        /// TENT's requests that were given a priority.
        prioritized,
    }
}

/// Bytes that were handed on without a permit, and that the client does not know of. Relaxed: a
/// statistic.
pub(crate) static UNASKED_BYTES: AtomicU64 = AtomicU64::new(0);

pub(crate) fn at_end() {
    if at_exit(end) {
        COUNTERS.reset();
        UNASKED_BYTES.store(0, Ordering::Relaxed);
    }
}

/// Stops the thread and writes the report. It was registered after Mooncake's library was loaded,
/// so it runs before that library's objects are destroyed.
fn end() {
    if let Some(hub) = hub::known() {
        hub.end();
        let mut line = ReportLine::of("liblaxity_mooncake");
        line.counts(COUNTERS.reported());
        let mut stats = hints::client().stats();
        // A program wrote the lengths, so the sum may be too large.
        let unasked = UNASKED_BYTES.load(Ordering::Relaxed);
        stats.bypassed_bytes = stats.bypassed_bytes.saturating_add(unasked);
        line.counts(stats.reported());
        line.append();
    }
}
