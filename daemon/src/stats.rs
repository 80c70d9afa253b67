//! The scheduler's counters and their snapshot.
//!
//! The counters are plain integers of the scheduler thread. About ten times a second while there is
//! work, it copies them into a [`Snapshot`] for the metrics endpoint and the control socket. So the
//! hot path writes nothing that another thread reads.

use std::sync::Arc;

use laxity_policy::link::LinkSnapshot;
use laxity_policy::residual::Capacity;
use laxity_policy::{Level, PolicyKind, Span, Stage, Time};
use laxity_shm::marking::Marking;
use laxity_shm::registration::Release;
use laxity_wire::{PodStatus, SchedulerStatus, WouldStatus};

use crate::config::Mode;
use crate::owner::Owner;

/// The number of buckets of a [`WaitHistogram`]: powers of two from 1 ns to 9 minutes.
pub const WAIT_BUCKETS: usize = 40;

/// Waits by powers of two: bucket `b` holds waits of at least `2^(b-1)` ns and less than `2^b` ns.
/// Each bucket has its sum, so means and exported sums are exact.
#[derive(Clone, Debug)]
pub struct WaitHistogram {
    pub counts: [u64; WAIT_BUCKETS],
    /// The sum of the waits in each bucket, in ns.
    pub sums_ns: [u64; WAIT_BUCKETS],
}

impl Default for WaitHistogram {
    fn default() -> Self {
        Self { counts: [0; WAIT_BUCKETS], sums_ns: [0; WAIT_BUCKETS] }
    }
}

impl WaitHistogram {
    #[inline]
    pub fn record(&mut self, wait: Span) {
        let bucket = ((u64::BITS - wait.0.leading_zeros()) as usize).min(WAIT_BUCKETS - 1);
        self.counts[bucket] += 1;
        self.sums_ns[bucket] = self.sums_ns[bucket].saturating_add(wait.0);
    }

    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the mean wait in ns, or zero if there are none.
    pub fn mean_ns(&self) -> u64 {
        self.sums_ns.iter().sum::<u64>().checked_div(self.count()).unwrap_or(0)
    }

    /// Returns the upper edge in ns of the bucket that holds the `permille`-th wait, or zero.
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

/// Counters of the flows of one stage on one port. Submitted ones include those on credit.
#[derive(Clone, Debug, Default)]
pub struct StageCounters {
    pub submitted_flows: u64,
    pub submitted_bytes: u64,
    /// Bytes sent on credit or only observed, i.e. without a permit of their own.
    pub credited_bytes: u64,
    /// Permits by [`Level::row`], credit included.
    pub permits: [u64; Level::ROWS],
    /// Bytes permitted by [`Level::row`], credit included.
    pub permitted_bytes: [u64; Level::ROWS],
    pub completed_flows: u64,
    pub completed_bytes: u64,
    pub deadline_misses: u64,
    /// Waits from submit to first permit, of flows that needed a permit.
    pub wait: WaitHistogram,
}

impl StageCounters {
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
        self.credited_bytes += bytes;
    }
}

#[derive(Clone, Debug, Default)]
pub struct PortCounters {
    pub stages: [StageCounters; Stage::ALL.len()],
    pub promotions: u64,
    pub demotions: u64,
    pub foreign_bytes: u64,
    /// CNPs, PFC frames and ECN-marked packets in the NIC's counters.
    pub signals: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientCounters {
    pub flows: u64,
    pub submitted_bytes: u64,
    pub permitted_bytes: u64,
    /// Bytes that were sent without a permit in mode `observe`.
    pub observed_bytes: u64,
    pub completed_bytes: u64,
    pub deadline_misses: u64,
    /// Bytes of submitted flows that went out unscheduled: withdrawn under a bypass, or permitted
    /// without scheduling. The client itself counts bytes that it did not submit.
    pub bypassed_bytes: u64,
    /// Bytes that were not permitted when their flow was cancelled, and are not bypassed. The
    /// daemon does not know whether the client sent them.
    pub withdrawn_bytes: u64,
    /// Flows that ended without completing: withdrawn, ended with their client, released or written
    /// off.
    pub cancelled_flows: u64,
    /// Flows beyond the client's limit, which were permitted without scheduling. The limit is 0
    /// while the client is not scheduled.
    pub overflowed_flows: u64,
    /// Permitted bytes that were never reported as completed and were written off.
    pub written_off_bytes: u64,
    /// Permitted bytes that stopped counting in a port's window, because the client completed
    /// nothing while others waited.
    pub set_aside_bytes: u64,
    /// Flows of NICs that the configuration does not have, or that are gone. They went out
    /// unscheduled.
    pub unknown_nic_flows: u64,
    pub garbage_records: u64,
}

impl ClientCounters {
    pub fn add(&mut self, other: &Self) {
        self.flows += other.flows;
        self.submitted_bytes += other.submitted_bytes;
        self.permitted_bytes += other.permitted_bytes;
        self.observed_bytes += other.observed_bytes;
        self.completed_bytes += other.completed_bytes;
        self.deadline_misses += other.deadline_misses;
        self.bypassed_bytes += other.bypassed_bytes;
        self.withdrawn_bytes += other.withdrawn_bytes;
        self.cancelled_flows += other.cancelled_flows;
        self.overflowed_flows += other.overflowed_flows;
        self.written_off_bytes += other.written_off_bytes;
        self.set_aside_bytes += other.set_aside_bytes;
        self.unknown_nic_flows += other.unknown_nic_flows;
        self.garbage_records += other.garbage_records;
    }
}

/// Counters of the scheduler thread's loop, over all ports.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoopCounters {
    pub status: SchedulerStatus,
    /// Maximum number of records consumed from one lane in a row since the last snapshot.
    pub ring_depth: u64,
    pub attachments: u64,
    pub orders: u64,
    pub pruned_requests: u64,
}

/// The capacity of a port that other traffic leaves.
#[derive(Clone, Copy, Debug)]
pub struct PortResidual {
    pub source: &'static str,
    pub capacity: Capacity,
}

/// How permits use a port, for comparison with the counters of its NIC. The rate is the configured
/// one in bytes per second, and bytes include unspent credit.
#[derive(Clone, Copy, Debug, Default)]
pub struct PortUse {
    pub rate: u64,
    pub permitted_bytes: u64,
    pub in_flight_bytes: u64,
}

/// The collectives of one job that would have gone ahead of other stages in one minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AheadCount {
    pub minutes_ago: u64,
    /// The number of the job in [`Snapshot::jobs`].
    pub job: usize,
    pub collectives: u64,
    pub bytes: u64,
}

#[derive(Clone, Debug)]
pub struct PortSnapshot {
    pub nic: u8,
    pub name: Arc<str>,
    pub direction: &'static str,
    pub is_absent: bool,
    pub is_rate_assumed: bool,
    pub rate: u64,
    pub rate_in_force: u64,
    pub window_bytes: u64,
    pub residual: Option<PortResidual>,
    pub levels: u8,
    pub link: LinkSnapshot,
    pub counters: PortCounters,
    /// What enforcing would have done, by minute.
    pub would: Vec<WouldStatus>,
    pub ahead: Vec<AheadCount>,
}

#[derive(Clone, Debug)]
pub struct ClientSnapshot {
    pub id: u64,
    pub pid: u32,
    pub owner: Owner,
    pub pod: Option<Arc<PodStatus>>,
    pub name: Arc<str>,
    /// The number of the client's job in [`Snapshot::jobs`].
    pub job: usize,
    pub release: Release,
    pub mode: Mode,
    pub attached: Time,
    pub lanes: u32,
    /// Flows submitted and not completed.
    pub flows: u64,
    pub waiting_flows: u64,
    pub quarantined_lanes: u32,
    pub owed_bytes: u64,
    pub held: bool,
    /// Whether the client is unscheduled because of its owner's lost bytes.
    pub distrusted: bool,
    /// Whether flows of the client wait because other trust domains have parts of the window.
    pub limited: bool,
    pub counters: ClientCounters,
}

/// The user or namespace that a job belongs to. A client can't choose it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobUser {
    Several,
    Uid(u32),
    Namespace(Arc<str>),
}

/// The clients of one user that have one name. See [`crate::jobs`].
#[derive(Clone, Debug)]
pub struct JobAccount {
    pub name: Arc<str>,
    pub user: JobUser,
    /// The summed counters of its clients that are gone.
    pub gone: ClientCounters,
}

#[derive(Clone, Debug)]
pub struct Snapshot {
    pub at: Time,
    pub mode: Mode,
    pub marking: Marking,
    pub policy: PolicyKind,
    pub bypass: bool,
    /// The DSCP of each level, by [`Level::row`].
    pub dscp: [u8; Level::ROWS],
    /// The service level of each level, by [`Level::row`].
    pub sl: Option<[u8; Level::ROWS]>,
    /// Number of levels whose DSCP the NICs treat unlike that of the highest level.
    pub unlike_levels: usize,
    pub ports: Vec<PortSnapshot>,
    pub clients: Vec<ClientSnapshot>,
    /// The jobs by number. The first has the clients of jobs that have no number of their own.
    pub jobs: Arc<Vec<JobAccount>>,
    /// The sum over all clients, with those that are gone.
    pub all_clients: ClientCounters,
    pub scheduler: LoopCounters,
    pub fetches: u64,
    /// The distrusted owners, each with the time when distrust ends.
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
