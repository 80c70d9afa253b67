//! Batches and requests with the hosts that reported them.

use std::collections::BTreeSet;

use laxity_policy::admission::RequestLoad;
use laxity_policy::{PortId, RequestId, Time};

use super::host::{HostId, Tenant};
use super::table::Key;

#[derive(Debug, Default)]
pub(super) struct ClusterBatch {
    /// The id that hosts use for the batch.
    pub(super) name: u64,
    pub(super) tenant: Tenant,
    /// Hosts that take part. The first one is the announcer.
    pub(super) members: Vec<HostId>,
    pub(super) requests: BTreeSet<Key>,
    pub(super) arrived: Time,
    pub(super) started: Option<Time>,
    pub(super) layer: u32,
    pub(super) layers: u32,
    /// The sort key that daemons got for the batch. See [`rank`](super::rank).
    pub(super) sort_key: Option<u64>,
}

impl ClusterBatch {
    /// Creates a batch of which only the announcer is known.
    pub(super) fn new(name: u64, tenant: Tenant, owner: HostId, now: Time) -> Self {
        Self { name, tenant, members: vec![owner], arrived: now, ..Self::default() }
    }

    pub(super) fn owner(&self) -> Option<HostId> {
        self.members.first().copied()
    }
}

/// Bytes that a request still has to move through one port, as one host reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReportedLoad {
    pub(super) port: PortId,
    /// The host that reported it: the port's host, or one that fetches from the port.
    pub(super) by: HostId,
    pub(super) bytes: u64,
    /// The [`Host::mark`](super::host::Host::mark) of `by` at the time of the report.
    pub(super) mark: u64,
}

#[derive(Debug)]
pub(super) struct ClusterRequest {
    /// The id that hosts use for the request.
    pub(super) name: u64,
    pub(super) tenant: Tenant,
    pub(super) batch: Key,
    /// The host that the request is charged to: the announcer of its batch, if that host reported
    /// the request, else the one that reported it first or, if that host is gone, one of the
    /// others.
    pub(super) by: HostId,
    /// The [`Host::mark`](super::host::Host::mark) of `by` at the time of the report.
    pub(super) mark: u64,
    /// The deadline that counts. [`Time::NEVER`] if no host that may set one has set it.
    pub(super) deadline: Time,
    pub(super) loads: Vec<ReportedLoad>,
    /// Whether daemons got the request as pruned.
    pub(super) pruned: bool,
}

impl ClusterRequest {
    /// Returns the request's loads as admission gets them. What a port's own host reports replaces
    /// what fetching hosts report about the same port, since both describe the same bytes.
    pub(super) fn merged(&self, key: Key, owns: impl Fn(HostId, PortId) -> bool) -> RequestLoad {
        let own = |load: &&ReportedLoad| owns(load.by, load.port);
        let owned = || self.loads.iter().filter(own);
        let mut ports: Vec<(PortId, u64)> = Vec::with_capacity(self.loads.len());
        ports.extend(owned().map(|load| (load.port, load.bytes)));
        if ports.len() < self.loads.len() {
            let outweighs: BTreeSet<PortId> = owned().map(|load| load.port).collect();
            let others = self.loads.iter().filter(|load| !own(load));
            let others = others.filter(|load| !outweighs.contains(&load.port));
            ports.extend(others.map(|load| (load.port, load.bytes)));
        }
        RequestLoad { request: RequestId(key), deadline: self.deadline, ports, started: false }
    }
}
