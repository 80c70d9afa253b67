//! What passed through, counted; and written down at exit for whoever asks (`LAXITY_REPORT`).
//!
//! One line of JSON per process that made an engine, appended, as `liblaxity.so` does it: the processes of a job may share a file.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::Once;

use laxity_client::hints;

use crate::hub;

/// Names the file.
const REPORT_ENV: &str = "LAXITY_REPORT";

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

#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
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

/// A forked child that makes no engine reports nothing: the counts are its parent's.
static INHERITED: AtomicBool = AtomicBool::new(false);

/// In a forked child.
pub(crate) fn abandon() {
    INHERITED.store(true, Ordering::Relaxed);
}

/// Has the thread stand still, and the report written, when the process ends. Registered after Mooncake's library was loaded, so it runs
/// before the library's own objects go.
pub(crate) fn at_exit() {
    static ONCE: Once = Once::new();
    INHERITED.store(false, Ordering::Relaxed);
    ONCE.call_once(|| {
        // SAFETY: a plain call; `end` takes nothing and returns nothing.
        unsafe { libc::atexit(end) };
    });
}

extern "C" fn end() {
    // A panic must not reach C, and there is nobody to tell.
    let _ = std::panic::catch_unwind(|| {
        let Some(hub) = hub::known() else { return };
        hub.end();
        if !INHERITED.load(Ordering::Relaxed) {
            write();
        }
    });
}

fn write() {
    let Some(path) = std::env::var_os(REPORT_ENV).filter(|path| !path.is_empty()) else {
        return;
    };
    let file = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(&path);
    // One write, so that lines of several processes don't mix.
    let result = file.and_then(|mut file| file.write_all(line().as_bytes()));
    if let Err(error) = result {
        let path = path.to_string_lossy();
        eprintln!("laxity: cannot write {REPORT_ENV}={path}: {error}");
    }
}

fn line() -> String {
    let stats = hints::client().stats();
    let mut line = format!(
        "{{\"library\":\"liblaxity_mooncake\",\"pid\":{}",
        std::process::id()
    );
    for (name, count) in [
        ("calls", COUNTERS.calls.get()),
        ("transfers", COUNTERS.transfers.get()),
        ("bytes", COUNTERS.bytes.get()),
        ("deferred", COUNTERS.deferred.get()),
        ("passed", COUNTERS.passed.get()),
        ("hinted", COUNTERS.hinted.get()),
        ("failed_late", COUNTERS.failed_late.get()),
        ("prioritized", COUNTERS.prioritized.get()),
        ("scheduled_bytes", stats.scheduled_bytes),
        ("observed_bytes", stats.observed_bytes),
        ("bypassed_bytes", stats.bypassed_bytes),
        ("unscheduled_ns", stats.unscheduled_ns),
        ("reattaches", stats.reattaches),
    ] {
        let _ = write!(line, ",\"{name}\":{count}");
    }
    line.push_str("}\n");
    line
}
