//! The answer to `status`. The names of numbers end in their unit. Counters count from the daemon's
//! start. Other values are those at the time of the snapshot. Fields that an older daemon does not
//! know are empty.

#![allow(missing_docs, reason = "most fields say by their names what they are")]

use std::fmt;

use serde::{Deserialize, Serialize};

/// The state of a daemon at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// The release of the daemon.
    pub version: String,
    pub pid: u32,
    /// Milliseconds since the daemon started.
    pub uptime_ms: u64,
    pub policy: String,
    /// The mode: `off`, `observe` or `enforce`.
    pub mode: String,
    /// The mode of the configuration, if an operator has set another one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub configured_mode: String,
    /// What clients do to traffic classes: `preserve`, `levels` or `off`. Empty for a daemon that
    /// has no such setting.
    pub marking: String,
    /// Whether an operator has turned the bypass on.
    pub bypass: bool,
    /// What is wrong with the daemon itself, each with what to do. Other problems follow from other
    /// fields.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// The last changes that operators ordered, the latest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<OperatorChange>,
    /// The attached clients, in order of attachment.
    pub clients: Vec<ClientStatus>,
    /// The ports: both directions of every NIC, in the order of the configuration.
    pub ports: Vec<PortStatus>,
    /// The distrusted owners, in order.
    pub distrusted: Vec<DistrustedOwner>,
    /// Users whose processes were refused, the latest first. The number of users is limited.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<RefusalStatus>,
    /// Sums over ports and clients, with clients that are gone.
    pub totals: Totals,
    /// The daemon's state in the cluster. `None` without a coordinator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterStatus>,
    /// The state of the scheduler thread.
    pub scheduler: SchedulerStatus,
}

/// A change of the daemon's state by an operator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OperatorChange {
    /// Milliseconds since the change.
    pub ago_ms: u64,
    /// The user id of the operator, or `None` if it was a signal.
    pub uid: Option<u32>,
    /// The daemon's answer, which says what has changed.
    pub what: String,
}

/// The daemon's state in the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterStatus {
    /// The URL of the coordinator.
    pub endpoint: String,
    /// The name of this host at the coordinator.
    pub host: String,
    /// Whether there is a stream to the coordinator.
    pub connected: bool,
    /// The release of the coordinator, as it reports.
    pub coordinator: String,
    /// Whether an operator has drained this host.
    pub drained: bool,
    /// The order in force: `cluster`, or the daemon's `own`.
    pub order: String,
    /// The term of the newest cluster order that was applied.
    pub term: Option<u64>,
    /// The sequence of the newest cluster order that was applied.
    pub sequence: Option<u64>,
    /// Milliseconds since the cluster order was last confirmed.
    pub age_ms: Option<u64>,
    /// Cluster orders that were applied.
    pub orders: u64,
    /// Cluster orders that were refused because of an outdated term or sequence.
    pub stale_orders: u64,
    /// Cluster orders that were dropped because of a missing or invalid part.
    pub broken_orders: u64,
    /// Streams that a coordinator welcomed.
    pub connects: u64,
    /// Attempts that failed, plus streams that ended.
    pub failures: u64,
    /// Reports that were sent.
    pub reports: u64,
    pub refused_events: u64,
    /// Fetches from other hosts whose flows name a batch and a peer, as the coordinator needs.
    pub fetches: u64,
    /// Why the last stream ended or failed. Empty if none did.
    pub problem: String,
}

/// An attached client.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClientStatus {
    /// The number of the attachment, which increases and is never used twice.
    pub id: u64,
    /// The process id, as the kernel reports it.
    pub pid: u32,
    /// The user id, as the kernel reports it.
    pub uid: u32,
    /// The name that the client gave.
    pub name: String,
    /// The release of the client's library, or `unknown`.
    pub library: String,
    /// Whether the client's library is older than the daemon.
    pub library_is_older: bool,
    /// The mode that the client is in: the more lenient of its own and the daemon's.
    pub mode: String,
    /// Milliseconds since the client attached.
    pub attached_ms: u64,
    /// Lanes that threads of the client own.
    pub lanes: u32,
    /// Flows submitted and not completed.
    pub flows: u64,
    /// Flows with bytes that are not yet permitted.
    pub waiting_flows: u64,
    pub submitted_bytes: u64,
    /// Bytes that were permitted, credit included.
    pub permitted_bytes: u64,
    /// Bytes that were sent without a permit in mode `observe`.
    pub observed_bytes: u64,
    /// Bytes that the client reported as completed.
    pub completed_bytes: u64,
    /// Submitted bytes that went out unscheduled, withdrawn by the client or permitted without
    /// scheduling.
    pub bypassed_bytes: u64,
    /// Flows of NICs that the daemon does not have. They went out unscheduled.
    pub unknown_nic_flows: u64,
    /// Records that did not decode.
    pub garbage_records: u64,
    /// Lanes that are no longer read because of garbage.
    pub quarantined_lanes: u32,
    /// Permitted bytes that the client did not complete while others waited. They do not count in
    /// the windows of the ports.
    pub owed_bytes: u64,
    /// Whether flows of the client are held until it completes its owed bytes.
    pub held: bool,
    /// Whether the client is unscheduled, because clients of its owner lost permitted bytes.
    pub distrusted: bool,
    /// Whether flows of the client wait because its trust domain has no more than its part of a
    /// port's window, while other domains use the port.
    pub limited: bool,
    /// The container of Kubernetes that the client runs in, if it runs in one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodStatus>,
}

/// A container of Kubernetes. The names are empty if the host does not know them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodStatus {
    pub namespace: String,
    pub name: String,
    pub container: String,
    pub uid: String,
    pub container_id: String,
}

impl fmt::Display for PodStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name.as_str() {
            "" => write!(f, "pod {}", self.uid),
            name => write!(f, "{}/{name}/{}", self.namespace, self.container),
        }
    }
}

/// An owner whose clients lost permitted bytes. New clients of it are unscheduled for a while.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DistrustedOwner {
    pub uid: u32,
    /// The control group, empty if it is unknown.
    pub cgroup: String,
    /// Milliseconds until the owner is trusted again.
    pub for_ms: u64,
}

/// A user whose processes were refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RefusalStatus {
    /// The user id, as the kernel reports it.
    pub uid: u32,
    /// The id of the process that was refused last.
    pub pid: u32,
    /// Refused registrations of this user.
    pub count: u64,
    /// Milliseconds since the last refusal.
    pub last_ms: u64,
    /// The reason of the last refusal, and its remedy.
    pub why: String,
    /// The line of the daemon's configuration that would admit this user and all others who are not
    /// admitted. Empty if that is not why.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub setting: String,
}

/// A port: one direction of one NIC.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PortStatus {
    /// The index of the NIC in the configuration.
    pub nic: u8,
    pub name: String,
    /// The direction: `egress` or `ingress`.
    pub direction: String,
    /// Whether the NIC is gone from the host. Its flows go out unscheduled until it returns.
    pub absent: bool,
    /// The configured rate `B` in bytes per second.
    pub rate_bytes_per_s: u64,
    /// Whether this rate is assumed, since the kernel knows none and the configuration has none.
    pub rate_assumed: bool,
    /// The rate that is left for scheduled traffic. 0 from a daemon that does not know.
    pub rate_in_force_bytes_per_s: u64,
    /// The source of the port's counters: `netdev`, `pma`, `hw_counters` or `irdma`. `None` if the
    /// traffic of others is not measured.
    pub counters: Option<String>,
    /// Whether the counters stand still although scheduled bytes pass the port.
    pub counters_stale: bool,
    /// Bytes that passed the port without a permit.
    pub foreign_bytes: u64,
    /// The rate of such bytes, averaged over 200 ms.
    pub foreign_bytes_per_s: u64,
    /// The rate that congestion in the network takes, averaged over 200 ms.
    pub congestion_bytes_per_s: u64,
    /// Signals of congestion: CNPs, marked packets and PFC pauses.
    pub congestion_signals: u64,
    pub policy: String,
    /// Bytes that are permitted and not completed.
    pub in_flight_bytes: u64,
    pub window_bytes: u64,
    /// Recent share of the rate that early stages used (`ρ`), 0 to 1.
    pub load: f64,
    /// Flows with bytes that are not yet permitted.
    pub waiting_flows: u64,
    /// Bytes that are not yet permitted.
    pub waiting_bytes: u64,
    /// Flows that are held, because their client owes bytes.
    pub held_flows: u64,
    /// Bytes of held flows that are not yet permitted.
    pub held_bytes: u64,
    /// The levels from the highest: `P1` … `PK` and `scavenger`.
    pub levels: Vec<LevelStatus>,
    pub stages: Vec<StageStatus>,
    /// Permitted bytes by stage and level, without zeros.
    pub permitted: Vec<PermittedBytes>,
    /// Moves of a waiting flow to a higher level.
    pub promotions: u64,
    /// Moves of a waiting flow to the scavenger.
    pub demotions: u64,
    /// What enforcing would have done to flows that were only observed: the minutes with such
    /// flows of the last hour, the latest last.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub would: Vec<WouldStatus>,
    /// Which collectives enforcing would have sent ahead of other stages, by minute and job.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub would_ahead: Vec<AheadStatus>,
}

/// What enforcing would have done to the flows of one minute, by a simulation with the port's
/// rate, window and policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WouldStatus {
    /// How many minutes ago the minute began, rounded down. 0 is the current one.
    pub minutes_ago: u64,
    /// Flows that were observed.
    pub flows: u64,
    /// Bytes that were observed.
    pub bytes: u64,
    /// Flows that would have waited.
    pub delayed_flows: u64,
    /// Bytes of those flows.
    pub delayed_bytes: u64,
    /// The sum of their waits in nanoseconds.
    pub delay_ns: u64,
    /// Collectives that would have overtaken flows of other stages.
    pub collectives_ahead: u64,
    /// Moves of a waiting flow to a higher level.
    pub promotions: u64,
    /// Flows of pruned requests, which would have been served last.
    pub pruned_flows: u64,
    /// Flows that the simulation left out, because more waited than it holds.
    pub lost_flows: u64,
}

/// The collectives of one job that enforcing would have sent ahead of other stages in one minute.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AheadStatus {
    /// How many minutes ago the minute began, as in [`WouldStatus`].
    pub minutes_ago: u64,
    /// The name of the job, or `other` for the jobs that the minute does not name.
    pub job: String,
    /// The owner of the job: `uid N` or `namespace NAME`. Empty for `other`.
    pub user: String,
    /// The number of collectives, each the part of one process.
    pub collectives: u64,
    /// The bytes of these collectives.
    pub bytes: u64,
}

/// The state of one level of one port.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LevelStatus {
    /// The name of the level: `P1`, `P2`, … or `scavenger`.
    pub level: String,
    /// The DSCP of the level's traffic.
    pub dscp: u8,
    /// The level's service level on InfiniBand, if the configuration names one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sl: Option<u8>,
    pub waiting_flows: u64,
    /// Bytes of the waiting flows that are not yet permitted.
    pub waiting_bytes: u64,
    pub permitted_bytes: u64,
}

/// The state of one stage of one port.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageStatus {
    /// The name: `kv_reuse`, `collective`, `p2d`, `weights` or `background`.
    pub stage: String,
    pub waiting_flows: u64,
    /// Bytes of the waiting flows that are not yet permitted.
    pub waiting_bytes: u64,
    pub submitted_bytes: u64,
    pub permitted_bytes: u64,
    pub completed_bytes: u64,
    /// Flows whose last byte completed after their deadline.
    pub deadline_misses: u64,
    /// Time from submit to first permit.
    pub wait: WaitStatus,
}

/// A distribution of waits. Quantiles are upper edges of buckets that are powers of two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WaitStatus {
    /// The number of flows that were measured.
    pub flows: u64,
    pub mean_ns: u64,
    pub p50_ns: u64,
    pub p99_ns: u64,
}

/// Bytes permitted for one stage at one level.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PermittedBytes {
    pub stage: String,
    pub level: String,
    /// Bytes permitted since the daemon started.
    pub bytes: u64,
}

/// Sums since the daemon started, with clients that are gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Totals {
    pub attached_clients: u64,
    /// Clients that attached so far.
    pub attachments: u64,
    /// Registrations that were refused because of version, credentials or limits.
    pub refusals: u64,
    pub flows: u64,
    /// Flows that ended without completing: withdrawn, ended with their client, released or written
    /// off.
    pub cancelled_flows: u64,
    /// Flows beyond their client's limit, which were permitted without scheduling. The limit is 0
    /// for a client in mode `off` or of a distrusted owner.
    pub overflowed_flows: u64,
    pub submitted_bytes: u64,
    pub permitted_bytes: u64,
    /// Bytes that were sent without a permit in mode `observe`.
    pub observed_bytes: u64,
    /// Bytes sent on credit, which `permitted_bytes` includes.
    pub credited_bytes: u64,
    pub completed_bytes: u64,
    /// Permitted bytes that were not completed in time and were written off.
    pub written_off_bytes: u64,
    /// Permitted bytes that stopped counting in a port's window, because their client completed
    /// nothing while others waited.
    pub set_aside_bytes: u64,
    /// Submitted bytes that went out unscheduled, as in [`ClientStatus::bypassed_bytes`].
    pub bypassed_bytes: u64,
    /// Bytes of cancelled flows that were not permitted and are not in `bypassed_bytes`.
    pub withdrawn_bytes: u64,
    /// Flows that completed after their deadline.
    pub deadline_misses: u64,
    pub promotions: u64,
    pub demotions: u64,
    /// Requests in the pruned set of the order in force.
    pub pruned_requests: u64,
    /// Orders issued by admission.
    pub orders: u64,
    /// Flows of NICs that the daemon does not have. They went out unscheduled.
    pub unknown_nic_flows: u64,
    /// Records that did not decode.
    pub garbage_records: u64,
}

/// The load and the sleeps of the scheduler thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SchedulerStatus {
    /// Rounds of scanning the lanes.
    pub rounds: u64,
    pub records: u64,
    pub permits: u64,
    /// Permits published on the fast path, before any accounting. `permits` includes them.
    pub permits_at_once: u64,
    /// Times that the thread went to sleep.
    pub sleeps: u64,
    /// Sleeping clients that were woken.
    pub client_wakes: u64,
    /// Maximum number of records consumed from one lane in a row.
    pub ring_depth_max: u64,
}
