//! What `status` shows. Every number says its unit in its name; counters count from the daemon's
//! start, everything else is a value of the moment of the snapshot.

use serde::{Deserialize, Serialize};

/// A daemon at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Release of the daemon.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Milliseconds since it started.
    pub uptime_ms: u64,
    /// Policy of the ports.
    pub policy: String,
    /// `off`, `observe` or `enforce`.
    pub mode: String,
    /// Whether all traffic goes out unscheduled by an operator's order.
    pub bypass: bool,
    /// Attached processes, in order of attachment.
    pub clients: Vec<ClientStatus>,
    /// Both directions of every NIC, in the order of the configuration.
    pub ports: Vec<PortStatus>,
    /// Owners of whom nothing that attaches is scheduled now, by user and control group.
    #[serde(default)]
    pub distrusted: Vec<DistrustedOwner>,
    /// Users whose processes were refused, the latest first; those refused longest ago are left
    /// out if there are many.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<RefusalStatus>,
    /// Sums over clients (gone ones too) and ports.
    pub totals: Totals,
    /// The part in a cluster; none without a coordinator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterStatus>,
    /// The scheduler thread.
    pub scheduler: SchedulerStatus,
}

/// The daemon's part in a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterStatus {
    /// Where the coordinator is.
    pub endpoint: String,
    /// What this host is called there.
    pub host: String,
    /// There is a stream.
    pub connected: bool,
    /// Release of the coordinator, as it says.
    pub coordinator: String,
    /// An operator has taken this host out of the cluster's order.
    pub drained: bool,
    /// Whose order between batches is in force: `cluster`, or the daemon's `own`.
    pub order: String,
    /// Term of the newest order of the coordinator that was applied.
    pub term: Option<u64>,
    /// Its sequence.
    pub sequence: Option<u64>,
    /// Milliseconds since it was last confirmed.
    pub age_ms: Option<u64>,
    /// Orders applied.
    pub orders: u64,
    /// Orders refused because a later one, or one of a later term, was seen before.
    pub stale_orders: u64,
    /// Orders dropped because a part was missing or made no sense.
    pub broken_orders: u64,
    /// Streams that a coordinator welcomed.
    pub connects: u64,
    /// Attempts that failed, and streams that ended.
    pub failures: u64,
    /// Reports sent.
    pub reports: u64,
    /// Events that the coordinator refused.
    pub refused_events: u64,
    /// Fetches from other hosts that it could order.
    #[serde(default)]
    pub fetches: u64,
    /// Times that it had one wait.
    #[serde(default)]
    pub fetches_held: u64,
    /// Fetches that waited for as long as they may, and went ahead.
    #[serde(default)]
    pub fetches_ahead: u64,
    /// Why there was no stream last time; empty if there always was.
    pub problem: String,
}

/// One attached process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClientStatus {
    /// Increases with every attachment, never used twice.
    pub id: u64,
    /// Its process, as the kernel says.
    pub pid: u32,
    /// Its user, as the kernel says.
    pub uid: u32,
    /// What it calls itself.
    pub name: String,
    /// The mode that holds for it: the more lenient of its own and the daemon's.
    pub mode: String,
    /// Milliseconds since it attached.
    pub attached_ms: u64,
    /// Lanes that its threads own.
    pub lanes: u32,
    /// Flows that live: submitted and not completed.
    pub flows: u64,
    /// Flows that have bytes not yet permitted.
    pub waiting_flows: u64,
    /// Bytes it has submitted.
    pub submitted_bytes: u64,
    /// Bytes it was permitted, credit included.
    pub permitted_bytes: u64,
    /// Bytes it reported as completed.
    pub completed_bytes: u64,
    /// Bytes it reported to have sent unscheduled.
    pub bypassed_bytes: u64,
    /// Flows of it that named a NIC which the daemon doesn't have, let out unscheduled.
    #[serde(default)]
    pub unknown_nic_flows: u64,
    /// Records of it that made no sense.
    pub garbage_records: u64,
    /// Lanes of it that are no longer read because of such records.
    pub quarantined_lanes: u32,
    /// Permitted bytes that it has not completed while others waited. They do not count in the
    /// windows of the ports.
    #[serde(default)]
    pub owed_bytes: u64,
    /// Whether its flows are held until it completes those bytes.
    #[serde(default)]
    pub held: bool,
    /// Whether all of it goes unscheduled, because clients of its owner lost permitted bytes.
    #[serde(default)]
    pub distrusted: bool,
}

/// A user, or a control group of it, whose clients lost permitted bytes: what attaches of it goes
/// unscheduled for a while.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DistrustedOwner {
    /// User.
    pub uid: u32,
    /// Control group, empty if it is not known.
    pub cgroup: String,
    /// Milliseconds until it is trusted again.
    pub for_ms: u64,
}

/// A user whose processes were refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusalStatus {
    /// The user, as the kernel says.
    pub uid: u32,
    /// The process that was refused last.
    pub pid: u32,
    /// Registrations of this user that were refused.
    pub count: u64,
    /// Milliseconds since the last.
    pub last_ms: u64,
    /// Why the last was, and what to do about it.
    pub why: String,
}

/// One direction of one NIC.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PortStatus {
    /// Index of the NIC in the configuration.
    pub nic: u8,
    /// Its name.
    pub name: String,
    /// `egress` or `ingress`.
    pub direction: String,
    /// `B`, in bytes per second.
    pub rate_bytes_per_s: u64,
    /// Policy of this port.
    pub policy: String,
    /// Bytes permitted and not completed.
    pub in_flight_bytes: u64,
    /// Most bytes that may be in flight.
    pub window_bytes: u64,
    /// `ρ`, load that precedes the lowest level, 0 to 1.
    pub load: f64,
    /// Flows with bytes not yet permitted.
    pub waiting_flows: u64,
    /// Their bytes.
    pub waiting_bytes: u64,
    /// Flows that are held back: others that read from the same host come first.
    #[serde(default)]
    pub held_flows: u64,
    /// Their bytes that are not yet permitted.
    #[serde(default)]
    pub held_bytes: u64,
    /// `P1` … `PK` and `scavenger`, from the highest.
    pub levels: Vec<LevelStatus>,
    /// The stages, by number.
    pub stages: Vec<StageStatus>,
    /// Permitted bytes by stage and level, zeros left out.
    pub permitted: Vec<PermittedBytes>,
    /// Times a waiting flow moved to a higher level.
    pub promotions: u64,
    /// Times a waiting flow moved into the scavenger.
    pub demotions: u64,
}

/// One level of one port.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LevelStatus {
    /// `P1`, `P2`, … or `scavenger`.
    pub level: String,
    /// DSCP that its traffic carries.
    pub dscp: u8,
    /// Flows that wait at it.
    pub waiting_flows: u64,
    /// Their bytes that are not yet permitted.
    pub waiting_bytes: u64,
    /// Bytes permitted at it.
    pub permitted_bytes: u64,
}

/// One stage of one port.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageStatus {
    /// `kv_reuse`, `collective`, `p2d`, `weights` or `background`.
    pub stage: String,
    /// Flows of it that wait.
    pub waiting_flows: u64,
    /// Their bytes that are not yet permitted.
    pub waiting_bytes: u64,
    /// Bytes submitted.
    pub submitted_bytes: u64,
    /// Bytes permitted.
    pub permitted_bytes: u64,
    /// Bytes completed.
    pub completed_bytes: u64,
    /// Flows whose last byte completed after their deadline.
    pub deadline_misses: u64,
    /// Time from submit to first permit.
    pub wait: WaitStatus,
}

/// A distribution of waits. Quantiles are upper edges of buckets that grow by powers of two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WaitStatus {
    /// Flows measured.
    pub flows: u64,
    /// Mean, in nanoseconds.
    pub mean_ns: u64,
    /// Median, in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile, in nanoseconds.
    pub p99_ns: u64,
}

/// Bytes permitted for one stage at one level.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PermittedBytes {
    /// The stage.
    pub stage: String,
    /// The level.
    pub level: String,
    /// Bytes since the daemon started.
    pub bytes: u64,
}

/// Sums since the daemon started, clients that are gone included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// Processes attached now.
    pub attached_clients: u64,
    /// Attachments so far.
    pub attachments: u64,
    /// Registrations refused (version, credentials, limits).
    pub refusals: u64,
    /// Flows submitted.
    pub flows: u64,
    /// Flows cancelled, by their client or by its death.
    pub cancelled_flows: u64,
    /// Flows refused because their client had too many, and so permitted at once.
    pub overflowed_flows: u64,
    /// Bytes submitted.
    pub submitted_bytes: u64,
    /// Bytes permitted.
    pub permitted_bytes: u64,
    /// Of those, bytes sent on credit.
    pub credited_bytes: u64,
    /// Bytes completed.
    pub completed_bytes: u64,
    /// Permitted bytes whose completion never came and was given up on.
    #[serde(default)]
    pub written_off_bytes: u64,
    /// Permitted bytes that stopped counting in the windows of the ports, because their client
    /// completed nothing while others waited.
    #[serde(default)]
    pub set_aside_bytes: u64,
    /// Bytes that clients reported to have sent unscheduled.
    pub bypassed_bytes: u64,
    /// Flows that completed after their deadline.
    pub deadline_misses: u64,
    /// Promotions on all ports.
    pub promotions: u64,
    /// Demotions on all ports.
    pub demotions: u64,
    /// Requests in the pruned set of the order that holds now.
    pub pruned_requests: u64,
    /// Orders issued by admission.
    pub orders: u64,
    /// Flows of NICs that the daemon doesn't have, let out unscheduled.
    #[serde(default)]
    pub unknown_nic_flows: u64,
    /// Records that made no sense.
    pub garbage_records: u64,
}

/// The scheduler thread: how busy it is and how often it sleeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SchedulerStatus {
    /// Rounds over the lanes.
    pub rounds: u64,
    /// Records consumed.
    pub records: u64,
    /// Permits published.
    pub permits: u64,
    /// Of those, permits published on the fast path, before any bookkeeping.
    #[serde(default)]
    pub permits_at_once: u64,
    /// Times it went to sleep.
    pub sleeps: u64,
    /// Wakes of sleeping clients.
    pub client_wakes: u64,
    /// Records consumed in the busiest round.
    pub ring_depth_max: u64,
}
