//! What the coordinator keeps of one host.

use std::collections::BTreeMap;

use laxity_policy::{PortId, Time};
use laxity_wire::v1::{self, Epoch};

use super::outbox::Outbox;
use super::table::Key;

/// What this release can do beyond the first version of the protocol.
pub(super) const CAPABILITIES: [v1::Capability; 3] = [
    v1::Capability::OrderDeltas,
    v1::Capability::FetchTokens,
    v1::Capability::PruneCauses,
];

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

/// What a host is charged for. Each has a [`Quota`](super::quota::Quota) of its own.
#[derive(Clone, Copy, Debug)]
pub(super) enum Charge {
    /// A batch that the host owns.
    Batch,
    /// A request that the host told of.
    Request,
    /// What the host said of a request on a port.
    Load,
    /// A fetch of the host.
    Fetch,
}

/// How much a host is charged for, by [`Charge`].
pub(super) type Usage = [usize; 4];

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

impl HostCounters {
    pub(super) fn add(&mut self, other: &Self) {
        self.reports += other.reports;
        self.events += other.events;
        self.refused_events += other.refused_events;
        self.orders += other.orders;
        self.coalesced_orders += other.coalesced_orders;
    }
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
    /// Batches that it takes part in, with the [`Host::mark`] of when it last said so.
    pub(super) batches: BTreeMap<Key, u64>,
    pub(super) usage: Usage,
    /// Grows with each snapshot. What does not have this mark when a snapshot ends is forgotten.
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
    /// A host without a stream that has said nothing.
    pub(super) fn new(name: &str, tenant: Tenant) -> Self {
        Self {
            name: name.to_owned(),
            tenant,
            software: String::new(),
            ports: Vec::new(),
            stream: None,
            lost_at: Time::ZERO,
            heard_at: Time::ZERO,
            capabilities: Vec::new(),
            drained: false,
            batches: BTreeMap::new(),
            usage: Usage::default(),
            mark: 0,
            in_snapshot: false,
            complete: false,
            reported: 0,
            considered: 0,
            owed: false,
            applied: None,
            outbox: Outbox::default(),
            told: false,
            counters: HostCounters::default(),
        }
    }

    /// A new stream speaks for it.
    pub(super) fn begin_stream(&mut self, now: Time, stream: u64, hello: &v1::Hello) {
        self.stream = Some(stream);
        self.heard_at = now;
        self.software = hello.software.chars().take(64).collect();
        self.capabilities = v1::common_capabilities(&CAPABILITIES, &hello.capabilities);
        self.in_snapshot = false;
        self.complete = false;
        self.owed = false;
        (self.reported, self.considered) = (0, 0);
        self.applied = hello.applied;
        self.outbox.restart();
    }

    pub(super) fn can(&self, capability: v1::Capability) -> bool {
        self.capabilities.contains(&capability)
    }

    /// Orders are for those that have said all they know, and whom no operator took out.
    pub(super) fn gets_orders(&self) -> bool {
        self.stream.is_some() && self.complete && !self.drained
    }
}
