//! What the scheduler counts, and the snapshot of it that leaves the thread.
//!
//! The scheduler bumps plain integers of its own. About ten times a second, while something
//! happens, it copies them into a [`Snapshot`] that the metrics endpoint and the control socket
//! read; nothing that is read by another thread is written on the hot path.

use std::sync::Arc;

use laxity_policy::link::LinkSnapshot;
use laxity_policy::{Level, PolicyKind, Span, Stage, Time};

use crate::config::Mode;
use crate::driver::fetches::FetchCounters;
use crate::owner::Owner;

/// Buckets of a [`WaitHistogram`]: powers of two from 1 ns to 9 minutes.
pub const WAIT_BUCKETS: usize = 40;

/// Waits by powers of two: bucket `b` holds waits of less than `2^b` ns and no less than half of
/// that. The sum of each bucket is kept, so that means and exported sums are exact.
#[derive(Clone, Debug)]
pub struct WaitHistogram {
    /// Waits per bucket.
    pub counts: [u64; WAIT_BUCKETS],
    /// Sum of the waits per bucket, in ns.
    pub sums_ns: [u64; WAIT_BUCKETS],
}

impl Default for WaitHistogram {
    fn default() -> Self {
        Self {
            counts: [0; WAIT_BUCKETS],
            sums_ns: [0; WAIT_BUCKETS],
        }
    }
}

impl WaitHistogram {
    /// Counts one wait.
    #[inline]
    pub fn record(&mut self, wait: Span) {
        let bucket = ((u64::BITS - wait.0.leading_zeros()) as usize).min(WAIT_BUCKETS - 1);
        self.counts[bucket] += 1;
        self.sums_ns[bucket] = self.sums_ns[bucket].saturating_add(wait.0);
    }

    /// Waits counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Their mean, zero if there are none.
    #[must_use]
    pub fn mean_ns(&self) -> u64 {
        self.sums_ns
            .iter()
            .sum::<u64>()
            .checked_div(self.count())
            .unwrap_or(0)
    }

    /// Upper edge of the bucket that holds the `permille`-th wait, zero if there are none.
    #[must_use]
    pub fn quantile_ns(&self, permille: u64) -> u64 {
        let rank = (self.count() * permille).div_ceil(1000);
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if *count > 0 && seen >= rank {
                return 1 << bucket;
            }
        }
        0
    }
}

/// Counters of one stage on one port.
#[derive(Clone, Debug, Default)]
pub struct StageCounters {
    /// Flows submitted, on credit too.
    pub submitted_flows: u64,
    /// Their bytes.
    pub submitted_bytes: u64,
    /// Flows sent on credit or observed, i.e. without a permit of their own.
    pub credited_flows: u64,
    /// Their bytes.
    pub credited_bytes: u64,
    /// Permits by [`Level::row`], credit included.
    pub permits: [u64; Level::ROWS],
    /// Bytes permitted by [`Level::row`], credit included.
    pub permitted_bytes: [u64; Level::ROWS],
    /// Flows that completed all their bytes.
    pub completed_flows: u64,
    /// Bytes completed.
    pub completed_bytes: u64,
    /// Flows that completed after their deadline.
    pub deadline_misses: u64,
    /// Submit to first permit, for flows that had to have one.
    pub wait: WaitHistogram,
}

impl StageCounters {
    /// Counts a permit.
    #[inline]
    pub const fn permit(&mut self, level: Level, bytes: u64) {
        self.permits[level.row()] += 1;
        self.permitted_bytes[level.row()] += bytes;
    }

    /// Counts a flow that was sent without a permit of its own.
    #[inline]
    pub const fn on_credit(&mut self, bytes: u64) {
        self.submitted_flows += 1;
        self.submitted_bytes += bytes;
        self.credited_flows += 1;
        self.credited_bytes += bytes;
    }
}

/// Counters of one port, by [`Stage::index`].
#[derive(Clone, Debug, Default)]
pub struct PortCounters {
    /// The stages.
    pub stages: [StageCounters; Stage::ALL.len()],
}

/// Counters of one client, or of all that are gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientCounters {
    /// Flows submitted.
    pub flows: u64,
    /// Bytes submitted.
    pub submitted_bytes: u64,
    /// Bytes permitted, credit included.
    pub permitted_bytes: u64,
    /// Bytes completed.
    pub completed_bytes: u64,
    /// Bytes of flows that it submitted and that went out unscheduled: withdrawn under a bypass,
    /// or passed without scheduling. What it did not even submit, it counts itself.
    pub bypassed_bytes: u64,
    /// Flows cancelled, by the client or by its death.
    pub cancelled_flows: u64,
    /// Flows beyond the client's limit, permitted without scheduling.
    pub overflowed_flows: u64,
    /// Permitted bytes that were never reported as completed and were given up on.
    pub written_off_bytes: u64,
    /// Permitted bytes that stopped counting in a port's window, because their client completed
    /// nothing while others waited.
    pub set_aside_bytes: u64,
    /// Flows of NICs that the configuration doesn't have, let out unscheduled.
    pub unknown_nic_flows: u64,
    /// Records that made no sense.
    pub garbage_records: u64,
}

impl ClientCounters {
    /// Adds `other` to every counter.
    pub fn add(&mut self, other: &Self) {
        self.flows += other.flows;
        self.submitted_bytes += other.submitted_bytes;
        self.permitted_bytes += other.permitted_bytes;
        self.completed_bytes += other.completed_bytes;
        self.bypassed_bytes += other.bypassed_bytes;
        self.cancelled_flows += other.cancelled_flows;
        self.overflowed_flows += other.overflowed_flows;
        self.written_off_bytes += other.written_off_bytes;
        self.set_aside_bytes += other.set_aside_bytes;
        self.unknown_nic_flows += other.unknown_nic_flows;
        self.garbage_records += other.garbage_records;
    }
}

/// Counters of the scheduler's loop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoopCounters {
    /// Rounds over the lanes.
    pub rounds: u64,
    /// Records consumed.
    pub records: u64,
    /// Permits published.
    pub permits: u64,
    /// Permits published on the fast path, before any bookkeeping.
    pub permits_at_once: u64,
    /// Times the thread slept.
    pub sleeps: u64,
    /// Sleeping clients woken.
    pub client_wakes: u64,
    /// Most records consumed from one lane in a row: how deep rings get.
    pub ring_depth_max: u64,
    /// Most records consumed from one lane in a row since the last snapshot.
    pub ring_depth: u64,
    /// Attachments so far.
    pub attachments: u64,
    /// Orders issued by admission.
    pub orders: u64,
    /// Requests in the pruned set that holds.
    pub pruned_requests: u64,
}

/// One port at the moment of a snapshot.
#[derive(Clone, Debug)]
pub struct PortSnapshot {
    /// Index of the NIC.
    pub nic: u8,
    /// Its name.
    pub name: Arc<str>,
    /// `egress` or `ingress`.
    pub direction: &'static str,
    /// Bytes per second.
    pub rate: u64,
    /// Bytes in flight at most.
    pub window_bytes: u64,
    /// Number of levels.
    pub levels: u8,
    /// What the arbitration says.
    pub link: LinkSnapshot,
    /// What the driver counted.
    pub counters: PortCounters,
}

/// One client at the moment of a snapshot.
#[derive(Clone, Debug)]
pub struct ClientSnapshot {
    /// Number of the attachment.
    pub id: u64,
    /// Process.
    pub pid: u32,
    /// Whose process.
    pub owner: Owner,
    /// What it calls itself.
    pub name: Arc<str>,
    /// The mode that holds for it.
    pub mode: Mode,
    /// When it attached.
    pub attached: Time,
    /// Lanes in use.
    pub lanes: u32,
    /// Living flows.
    pub flows: u64,
    /// Flows with bytes not yet permitted.
    pub waiting_flows: u64,
    /// Lanes that are no longer read.
    pub quarantined_lanes: u32,
    /// Bytes that were set aside and not completed since.
    pub owed_bytes: u64,
    /// Flows of it are held for that.
    pub held: bool,
    /// Nothing of it is scheduled, for what its owner lost.
    pub distrusted: bool,
    /// Its counters.
    pub counters: ClientCounters,
}

/// The daemon at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The moment.
    pub at: Time,
    /// Mode in force.
    pub mode: Mode,
    /// Policy in force.
    pub policy: PolicyKind,
    /// Whether everything is bypassed.
    pub bypass: bool,
    /// DSCP by [`Level::row`].
    pub dscp: [u8; Level::ROWS],
    /// Ports.
    pub ports: Vec<PortSnapshot>,
    /// Attached clients.
    pub clients: Vec<ClientSnapshot>,
    /// Sum over all clients, gone ones included.
    pub all_clients: ClientCounters,
    /// The loop.
    pub scheduler: LoopCounters,
    /// What came in from other hosts, in order.
    pub fetches: FetchCounters,
    /// Owners that are distrusted, and until when.
    pub distrusted: Vec<(Owner, Time)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_lands_in_the_power_of_two_above_it_and_sums_stay_exact() {
        let mut waits = WaitHistogram::default();
        for ns in [0, 1, 3, 1000, 1000, u64::MAX >> 20] {
            waits.record(Span(ns));
        }
        assert_eq!(waits.counts[0], 1);
        assert_eq!(waits.counts[1], 1);
        assert_eq!(waits.counts[2], 1);
        assert_eq!(waits.counts[10], 2);
        assert_eq!(waits.counts[WAIT_BUCKETS - 1], 1);
        assert_eq!(waits.sums_ns[10], 2000);
        assert_eq!(waits.quantile_ns(500), 4);
        assert_eq!(waits.quantile_ns(800), 1024);
        assert_eq!(WaitHistogram::default().quantile_ns(500), 0);
        assert_eq!(WaitHistogram::default().mean_ns(), 0);
    }
}
