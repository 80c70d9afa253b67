//! What passed through, counted; and written down at exit for whoever asks (`LAXITY_REPORT`).
//!
//! One line of JSON per process, appended, so that the processes of a job may share a file.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::{Once, OnceLock};

use crate::{lanes, table};

/// Names the file.
pub(crate) const REPORT_ENV: &str = "LAXITY_REPORT";

/// Counters of what is rare; the rest is counted per queue pair. Relaxed: statistics.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Those that had to wait for a permit.
    pub(crate) deferred: Count,
    /// Those that went out ahead of their permit, because one behind them had its own.
    pub(crate) pulled: Count,
    /// Queue pairs of kinds that are not scheduled (UD, raw, XRC) or that were never seen: work
    /// requests passed through.
    pub(crate) passed: Count,
    pub(crate) passed_bytes: Count,
    /// Work requests refused because the send queue was full.
    pub(crate) refused: Count,
    /// Work requests that the provider refused after the program had been told that all is well.
    pub(crate) failed_late: Count,
    /// Work requests that waited when their queue pair was reset or destroyed.
    pub(crate) dropped: Count,
}

#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    #[inline]
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

pub(crate) static COUNTERS: Counters = Counters {
    deferred: Count::new(),
    pulled: Count::new(),
    passed: Count::new(),
    passed_bytes: Count::new(),
    refused: Count::new(),
    failed_late: Count::new(),
    dropped: Count::new(),
};
/// DSCPs that queue pairs were given, one bit each.
static DSCPS: AtomicU64 = AtomicU64::new(0);
/// A forked child that opens nothing reports nothing: the counts are its parent's.
static INHERITED: AtomicBool = AtomicBool::new(false);

/// A queue pair was given a class.
pub(crate) fn note_dscp(dscp: u8) {
    DSCPS.fetch_or(1 << (dscp & 63), Ordering::Relaxed);
}

/// In a forked child.
pub(crate) fn abandon() {
    INHERITED.store(true, Ordering::Relaxed);
}

fn path() -> Option<&'static PathBuf> {
    static PATH: OnceLock<Option<PathBuf>> = OnceLock::new();
    PATH.get_or_init(|| {
        let path = std::env::var_os(REPORT_ENV).filter(|path| !path.is_empty())?;
        Some(PathBuf::from(path))
    })
    .as_ref()
}

/// Has the daemon told what it has not heard so far, and the report written, when the process ends.
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
        if INHERITED.load(Ordering::Relaxed) {
            return;
        }
        table::tell_all();
        lanes::settle_all();
        let Some(path) = path() else { return };
        let file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path);
        // One write, so that lines of several processes don't mix.
        let result = file.and_then(|mut file| file.write_all(line().as_bytes()));
        if let Err(error) = result {
            eprintln!(
                "laxity: cannot write {REPORT_ENV}={}: {error}",
                path.display()
            );
        }
    });
}

fn line() -> String {
    let program = std::env::current_exe().ok();
    let program = program
        .as_deref()
        .and_then(std::path::Path::file_name)
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    let stats = lanes::stats();
    let counts = table::counts();
    let dscps = DSCPS.load(Ordering::Relaxed);
    let dscps: Vec<_> = (0..64).filter(|dscp| dscps >> dscp & 1 == 1).collect();
    let mut line = String::from("{");
    let _ = write!(line, "\"program\":{},", quoted(&program));
    let _ = write!(line, "\"pid\":{}", std::process::id());
    for (name, count) in [
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
        ("scheduled_bytes", stats.scheduled_bytes),
        ("observed_bytes", stats.observed_bytes),
        ("bypassed_bytes", stats.bypassed_bytes),
        ("unscheduled_ns", stats.unscheduled_ns),
        ("reattaches", stats.reattaches),
    ] {
        let _ = write!(line, ",\"{name}\":{count}");
    }
    let _ = writeln!(line, ",\"dscp\":{dscps:?}}}");
    line
}

fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c < ' ' => {
                let _ = write!(quoted, "\\u{:04x}", c as u32);
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_json() {
        assert_eq!(quoted("a\"b\\c\n"), r#""a\"b\\c\u000a""#);
    }
}
