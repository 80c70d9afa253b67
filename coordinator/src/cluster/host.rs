//! What the coordinator keeps of one host.

use std::collections::BTreeMap;

use laxity_policy::{PortId, Time};
use laxity_wire::v1::{self, Epoch};

use super::outbox::Outbox;
use super::table::Key;

/// Which host: its slot in the table of hosts. Slots are used again after a host was forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub(super) u32);

/// Hosts of two tenants share no ids. An index into the configuration's list.
pub(crate) type Tenant = u16;

/// One port, as the host described it and as it last reported it.
#[derive(Debug)]
pub(super) struct HostPort {
    pub(super) id: PortId,
    pub(super) info: v1::PortInfo,
    pub(super) load: v1::PortLoad,
}

/// What a host's share of the totals is; see [`Quota`](super::quota::Quota).
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) batches: usize,
    pub(super) requests: usize,
    pub(super) loads: usize,
    pub(super) fetches: usize,
}

/// What has happened with a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HostCounters {
    pub(super) reports: u64,
    pub(super) events: u64,
    pub(super) refused_events: u64,
    pub(super) orders: u64,
    pub(super) coalesced_orders: u64,
    pub(super) completed_flows: u64,
    pub(super) missed_flows: u64,
}

/// What host is taking part in a batch.
#[derive(Debug)]
pub(super) struct Membership {
    /// See [`Host::mark`].
    pub(super) mark: u64,
}

/// A fetch that the host waits for or carries out.
#[derive(Debug)]
pub(super) struct HostFetch {
    pub(super) key: Key,
    pub(super) mark: u64,
    pub(super) batch: Key,
    pub(super) request: u64,
    pub(super) victim: PortId,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) name: String,
    pub(super) tenant: Tenant,
    pub(super) software: String,
    pub(super) ports: Vec<HostPort>,
    /// The stream that speaks for it now.
    pub(super) stream: Option<u64>,
    /// When the last stream ended.
    pub(super) lost_at: Time,
    pub(super) heard_at: Time,
    pub(super) capabilities: Vec<v1::Capability>,
    pub(super) drained: bool,
    pub(super) batches: BTreeMap<Key, Membership>,
    pub(super) fetches: BTreeMap<u64, HostFetch>,
    pub(super) usage: Usage,
    /// Grows with each snapshot. What is not marked with it when the snapshot ends, is gone.
    pub(super) mark: u64,
    pub(super) in_snapshot: bool,
    /// The stream has sent a whole snapshot.
    pub(super) complete: bool,
    /// Sequence of the newest report, and of the newest that a run has seen.
    pub(super) reported: u64,
    pub(super) considered: u64,
    /// A report since the last run wants an answer.
    pub(super) owed: bool,
    pub(super) applied: Option<Epoch>,
    pub(super) outbox: Outbox,
    /// It got an order since the last [`Cluster::summary`](super::Cluster::summary).
    pub(super) told: bool,
    pub(super) counters: HostCounters,
}

impl Host {
    pub(super) fn can(&self, capability: v1::Capability) -> bool {
        self.capabilities.contains(&capability)
    }

    /// The port with this index in the host's own list.
    pub(super) fn port(&self, index: u32) -> Option<PortId> {
        self.ports.get(index as usize).map(|port| port.id)
    }

    /// Orders are for those that have said all they know, and whom no operator took out.
    pub(super) fn gets_orders(&self) -> bool {
        self.stream.is_some() && self.complete && !self.drained
    }
}
