//! Counters of a client. Only a lane's thread writes its counters, so that counting is a load, an
//! add and a store. [`Stats`] is the sum of all lanes.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a client since it attached, over all past and present lanes. The layout is that of
/// the end of `lax_stats`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes permitted by the daemon, by permit or credit.
    pub scheduled_bytes: u64,
    /// Bytes permitted without the daemon, because there was none, it stalled, a bypass was on, or
    /// the lane was full.
    pub bypassed_bytes: u64,
    /// Flows with at least one bypassed byte.
    pub bypassed_flows: u64,
    /// Bytes permitted at once and only reported, in mode `observe`.
    pub observed_bytes: u64,
    /// Nanoseconds without a scheduler since `attach`.
    pub unscheduled_ns: u64,
    /// Number of times that a daemon was found after one was lost.
    pub reattaches: u64,
    /// Flows that were bypassed because all slots or all lanes were in use.
    pub lane_full: u64,
}

impl Stats {
    /// Returns the counters that a library's report at exit contains.
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

#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct LaneCounters {
    pub(crate) scheduled_bytes: Counter,
    pub(crate) bypassed_bytes: Counter,
    pub(crate) bypassed_flows: Counter,
    pub(crate) observed_bytes: Counter,
    pub(crate) lane_full: Counter,
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Adds to the counter. Only its writer calls this. Relaxed, because it is a statistic.
    #[inline]
    pub(crate) fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
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
