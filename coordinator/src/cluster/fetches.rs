//! The fetches of all hosts, which load the ports that they read from.

use std::collections::{BTreeMap, BTreeSet};

use laxity_policy::PortId;

use super::host::HostId;
use super::table::Key;

#[derive(Clone, Debug)]
pub(super) struct ClusterFetch {
    /// The host's [`Host::mark`](super::host::Host::mark) when it last reported the fetch.
    pub(super) mark: u64,
    pub(super) batch: Key,
    /// The id that hosts use for the request.
    pub(super) request: u64,
    pub(super) victim: PortId,
}

/// A fetch, named by its host and the host's own number.
type FetchId = (HostId, u64);

#[derive(Debug, Default)]
pub(super) struct ClusterFetches(pub(super) BTreeMap<FetchId, ClusterFetch>);

impl ClusterFetches {
    pub(super) fn of_host(&self, id: HostId) -> impl Iterator<Item = (u64, &ClusterFetch)> {
        let open = self.0.range((id, 0)..=(id, u64::MAX));
        open.map(|(&(_, number), fetch)| (number, fetch))
    }

    pub(super) fn at_ports(&self, ports: &BTreeSet<PortId>) -> Vec<FetchId> {
        let from = self.0.iter().filter(|(_, fetch)| ports.contains(&fetch.victim));
        from.map(|(&id, _)| id).collect()
    }
}
