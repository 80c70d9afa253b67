//! What passed through, counted; and written down at exit for whoever asks (`LAXITY_REPORT`), by
//! processes that made an engine.

use laxity_client::hints;
use laxity_job::report::{Count, ReportLine};

use crate::hub;

/// Relaxed: statistics.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Calls of `submitTransfer` and `submitTransferWithNotify`.
    pub(crate) calls: Count,
    /// Transfers in them.
    pub(crate) transfers: Count,
    pub(crate) bytes: Count,
    /// Those that had to wait for a permit.
    pub(crate) deferred: Count,
    /// Those of gated engines that were handed on as they came, see `batch.rs`.
    pub(crate) passed: Count,
    /// Those whose memory was said to be somebody's, for `liblaxity.so`.
    pub(crate) hinted: Count,
    /// Those that Mooncake refused after the program had been told that all is well.
    pub(crate) failed_late: Count,
    /// TENT's requests that were given a priority.
    pub(crate) prioritized: Count,
}

pub(crate) static COUNTERS: Counters = Counters {
    calls: Count::new(),
    transfers: Count::new(),
    bytes: Count::new(),
    deferred: Count::new(),
    passed: Count::new(),
    hinted: Count::new(),
    failed_late: Count::new(),
    prioritized: Count::new(),
};

/// The thread stands still, and the report is written. Registered after Mooncake's library was
/// loaded, so it runs before the library's own objects go.
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
