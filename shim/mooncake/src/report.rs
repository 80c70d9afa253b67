//! Counters of a process that made an engine, written at exit to the file that `LAXITY_REPORT`
//! names.

use laxity_client::hints;
use laxity_job::report::{Count, ReportLine};

use crate::hub;

/// Counters of this process. Relaxed: statistics.
#[derive(Debug, Default)]
pub(crate) struct TransferCounters {
    /// Calls of `submitTransfer` and `submitTransferWithNotify`.
    pub(crate) calls: Count,
    pub(crate) transfers: Count,
    pub(crate) bytes: Count,
    /// Transfers that had to wait for a permit.
    pub(crate) deferred: Count,
    /// Transfers of gated engines that were handed on unchanged, see `batch.rs`.
    pub(crate) passed: Count,
    /// Transfers whose memory owner was recorded for `liblaxity.so`.
    pub(crate) hinted: Count,
    /// Transfers that Mooncake refused after the program's call succeeded.
    pub(crate) failed_late: Count,
    /// TENT's requests that were given a priority.
    pub(crate) prioritized: Count,
}

pub(crate) static COUNTERS: TransferCounters = TransferCounters {
    calls: Count::new(),
    transfers: Count::new(),
    bytes: Count::new(),
    deferred: Count::new(),
    passed: Count::new(),
    hinted: Count::new(),
    failed_late: Count::new(),
    prioritized: Count::new(),
};

/// Stops the thread and writes the report. It was registered after Mooncake's library was loaded,
/// so it runs before that library's objects are destroyed.
pub(crate) fn end() {
    if let Some(hub) = hub::known() {
        hub.end();
        line().append();
    }
}

fn line() -> ReportLine {
    let mut line = ReportLine::of("liblaxity_mooncake");
    line.counts([
        ("calls", COUNTERS.calls.get()),
        ("transfers", COUNTERS.transfers.get()),
        ("bytes", COUNTERS.bytes.get()),
        ("deferred", COUNTERS.deferred.get()),
        ("passed", COUNTERS.passed.get()),
        ("hinted", COUNTERS.hinted.get()),
        ("failed_late", COUNTERS.failed_late.get()),
        ("prioritized", COUNTERS.prioritized.get()),
    ]);
    line.counts(hints::client().stats().reported());
    line
}
