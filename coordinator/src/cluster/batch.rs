//! What the coordinator keeps of batches and requests, beside what admission does: who said what.

use std::collections::BTreeSet;

use laxity_policy::admission::RequestLoad;
use laxity_policy::{PortId, RequestId, Time};

use super::host::{HostId, Tenant};
use super::table::Key;

/// A batch that one host or several take part in.
#[derive(Debug)]
pub(super) struct Batch {
    /// The id that hosts use.
    pub(super) name: u64,
    pub(super) tenant: Tenant,
    /// Whose word holds; always the first of `members`.
    pub(super) members: Vec<HostId>,
    /// Hosts that the owner named, by a hash of the name: a name is as long as its sender likes.
    pub(super) invited: Vec<u64>,
    pub(super) requests: BTreeSet<Key>,
    pub(super) arrived: Time,
    pub(super) started: Option<Time>,
    pub(super) layer: u32,
    pub(super) layers: u32,
    /// What daemons know as its place; see [`rank`](super::rank).
    pub(super) sort_key: Option<u64>,
}

impl Batch {
    /// A batch of which nothing is known but who announced it.
    pub(super) fn new(name: u64, tenant: Tenant, owner: HostId, now: Time) -> Self {
        Self {
            name,
            tenant,
            members: vec![owner],
            invited: Vec::new(),
            requests: BTreeSet::new(),
            arrived: now,
            started: None,
            layer: 0,
            layers: 0,
            sort_key: None,
        }
    }

    pub(super) fn owner(&self) -> Option<HostId> {
        self.members.first().copied()
    }
}

/// Bytes that a request has still to move through one port, as one host said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) port: PortId,
    /// Who said so: the port's host, or one that wants to fetch from it.
    pub(super) by: HostId,
    pub(super) bytes: u64,
    /// See [`Host::mark`](super::host::Host::mark) of `by`.
    pub(super) mark: u64,
}

/// A request of such a batch.
#[derive(Debug)]
pub(super) struct Request {
    /// The id that hosts use.
    pub(super) name: u64,
    pub(super) tenant: Tenant,
    pub(super) batch: Key,
    /// Who told of it first: its deadline is that host's, or the batch's owner's.
    pub(super) by: HostId,
    /// See [`Host::mark`](super::host::Host::mark) of `by`.
    pub(super) mark: u64,
    /// As counted: [`Time::NEVER`] if nobody entitled has said one.
    pub(super) deadline: Time,
    pub(super) started: bool,
    pub(super) loads: Vec<Load>,
    /// As published.
    pub(super) pruned: bool,
}

impl Request {
    /// What admission gets. What the owner of a port says of it outweighs what those say who want
    /// to fetch from it, since both mean the same bytes.
    pub(super) fn merged(&self, key: Key, owns: impl Fn(HostId, PortId) -> bool) -> RequestLoad {
        let own = |load: &&Load| owns(load.by, load.port);
        let owned = || self.loads.iter().filter(own);
        let mut ports: Vec<(PortId, u64)> = Vec::with_capacity(self.loads.len());
        ports.extend(owned().map(|load| (load.port, load.bytes)));
        if ports.len() < self.loads.len() {
            let outweighs: BTreeSet<PortId> = owned().map(|load| load.port).collect();
            let others = self.loads.iter().filter(|load| !own(load));
            let others = others.filter(|load| !outweighs.contains(&load.port));
            ports.extend(others.map(|load| (load.port, load.bytes)));
        }
        RequestLoad {
            request: RequestId(key),
            deadline: self.deadline,
            ports,
            started: self.started,
        }
    }
}
