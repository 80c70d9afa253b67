//! What the coordinator stores about one host.

use std::collections::BTreeMap;

use laxity_policy::{PortId, Time};
use laxity_wire::v1::{self, Epoch};

use super::outbox::Outbox;
use super::table::Key;
use crate::pace::Pace;

/// The id of a host: its slot in the table of hosts. The slot of a forgotten host is used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub(super) u32);

/// A tenant, as an index into the configuration's list. Hosts of two tenants share no ids.
pub(crate) type Tenant = u16;

/// A port, as the host described it and last reported it.
#[derive(Debug)]
pub(super) struct HostPort {
    pub(super) id: PortId,
    pub(super) info: v1::PortInfo,
    pub(super) load: v1::PortLoad,
}

/// What a host is charged for. Each kind has its own [`Quota`](super::quota::Quota).
#[derive(Clone, Copy, Debug)]
pub(super) enum Charge {
    /// A batch whose announcer the host is.
    Batch,
    /// A request that the host reported first, or took over: as the announcer of its batch, or from
    /// a host that is gone.
    Request,
    /// A (request, port) pair that the host reported.
    Load,
    Fetch,
}

pub(super) type Usage = [usize; 4];

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostCounters {
    pub reports: u64,
    /// Events in these reports, including refused ones.
    pub events: u64,
    pub refused_events: u64,
    pub orders: u64,
    /// Orders that were merged into a later one because the host had not read them.
    pub coalesced_orders: u64,
    pub refused_hellos: u64,
    pub(super) completed_flows: u64,
    pub(super) missed_flows: u64,
}

impl HostCounters {
    pub(super) fn add(&mut self, other: &Self) {
        self.reports += other.reports;
        self.events += other.events;
        self.refused_events += other.refused_events;
        self.orders += other.orders;
        self.coalesced_orders += other.coalesced_orders;
        self.refused_hellos += other.refused_hellos;
    }
}

#[derive(Debug, Default)]
pub(super) struct Host {
    pub(super) name: String,
    pub(super) tenant: Tenant,
    pub(super) software: String,
    /// The host's configuration, as it said last on this stream.
    pub(super) settings: Option<v1::HostSettings>,
    pub(super) ports: Vec<HostPort>,
    pub(super) stream: Option<u64>,
    /// When the host is forgotten, if it has no stream.
    pub(super) lost_at: Time,
    pub(super) heard_at: Time,
    /// Whether the last stream ended with the daemon's goodbye.
    pub(super) left: bool,
    /// The rate at which the host begins streams.
    pub(super) hellos: Pace,
    pub(super) drained: bool,
    /// Batches that the host takes part in, each with the [`Host::mark`] of its last report.
    pub(super) batches: BTreeMap<Key, u64>,
    pub(super) usage: Usage,
    /// Number of the host's last snapshot. When one ends, entries with an older number are removed.
    pub(super) mark: u64,
    pub(super) in_snapshot: bool,
    /// Whether the stream has sent a complete snapshot.
    pub(super) complete: bool,
    pub(super) reported: u64,
    pub(super) considered: u64,
    /// Whether a report arrived after the last run, so that this host needs a new order.
    pub(super) owed: bool,
    pub(super) applied: Option<Epoch>,
    pub(super) outbox: Outbox,
    /// Whether the host got an order since the last [`Cluster::summary`](super::Cluster::summary).
    pub(super) told: bool,
    pub(super) counters: HostCounters,
    /// When an event or a Hello of the host was last refused.
    pub(super) refused_at: Option<Time>,
}

impl Host {
    /// Creates a host without a stream or reports.
    pub(super) fn new(name: &str, tenant: Tenant) -> Self {
        Self { name: name.to_owned(), tenant, ..Self::default() }
    }

    /// Makes `stream` the host's current stream and resets the state of the previous one.
    pub(super) fn begin_stream(&mut self, now: Time, stream: u64, hello: &v1::Hello) {
        self.stream = Some(stream);
        self.heard_at = now;
        self.left = false;
        self.settings = None;
        self.software = hello.software.chars().take(64).collect();
        self.in_snapshot = false;
        self.complete = false;
        self.owed = false;
        (self.reported, self.considered) = (0, 0);
        self.applied = hello.applied;
        self.outbox.restart();
    }

    /// Reports whether the host gets orders: it has sent a complete snapshot and is not drained.
    pub(super) fn gets_orders(&self) -> bool {
        self.stream.is_some() && self.complete && !self.drained
    }
}
