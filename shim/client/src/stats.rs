//! What a client counts. Each lane has its own counters, written by its thread alone, so that
//! counting is a load, an add and a store; [`Stats`] is their sum.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a client since it attached, over all its lanes, past and present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes permitted by the daemon, by permit or credit.
    pub scheduled_bytes: u64,
    /// Bytes permitted without it, because there was none, it stalled, was told to step aside, or
    /// the lane was full.
    pub bypassed_bytes: u64,
    /// Flows of which at least one byte was.
    pub bypassed_flows: u64,
    /// Bytes permitted at once and merely reported, in mode `observe`.
    pub observed_bytes: u64,
    /// Nanoseconds without a scheduler since `attach`.
    pub unscheduled_ns: u64,
    /// Times that a daemon was found again after one was lost.
    pub reattaches: u64,
    /// Flows that were bypassed because all slots or all lanes were in use.
    pub lane_full: u64,
}

impl Stats {
    /// What of them a library's report at exit has.
    #[must_use]
    pub fn reported(&self) -> [(&'static str, u64); 5] {
        [
            ("scheduled_bytes", self.scheduled_bytes),
            ("observed_bytes", self.observed_bytes),
            ("bypassed_bytes", self.bypassed_bytes),
            ("unscheduled_ns", self.unscheduled_ns),
            ("reattaches", self.reattaches),
        ]
    }
}

/// One lane's counters.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct LaneCounters {
    pub(crate) scheduled_bytes: Counter,
    pub(crate) bypassed_bytes: Counter,
    pub(crate) bypassed_flows: Counter,
    pub(crate) observed_bytes: Counter,
    pub(crate) lane_full: Counter,
}

/// A counter with one writer.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Adds; by the one writer only. Relaxed: a statistic, ordered with nothing.
    #[inline]
    pub(crate) fn add(&self, n: u64) {
        self.0.store(
            self.0.load(Ordering::Relaxed).wrapping_add(n),
            Ordering::Relaxed,
        );
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl LaneCounters {
    pub(crate) fn add_to(&self, sum: &mut Stats) {
        sum.scheduled_bytes += self.scheduled_bytes.get();
        sum.bypassed_bytes += self.bypassed_bytes.get();
        sum.bypassed_flows += self.bypassed_flows.get();
        sum.observed_bytes += self.observed_bytes.get();
        sum.lane_full += self.lane_full.get();
    }
}
