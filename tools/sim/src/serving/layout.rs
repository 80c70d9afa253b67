//! The layout of the cluster: ranks, servers, racks, and the ports between them.
//!
//! The GPUs of a tensor-parallel group are one *rank*. A rank has one port per direction for all of
//! its NICs, because its transfers are striped over them. Prefill ranks come first and in the order
//! of servers, so that a unit's ranks are adjacent. Decode ranks have their own ingress ports.

use crate::network::{Network, PortId};
use crate::scenario::{Scenario, Spreading};

#[derive(Debug)]
pub(super) struct Layout {
    pub(super) units: u32,
    pub(super) ranks_per_unit: u32,
    pub(super) ranks: u32,
    pub(super) ranks_per_server: u32,
    pub(super) decodes: u32,
    /// Rate of a rank's NICs in each direction, in bytes per second.
    pub(super) rank_rate: f64,
    pub(super) decode_rate: f64,
    /// Rate of a rank's NVLinks, in bytes per second.
    pub(super) nvlink_rate: f64,
    prefill_servers: u32,
    decodes_per_server: u32,
    leaves: Option<Leaves>,
}

#[derive(Debug)]
struct Leaves {
    servers_per_rack: u32,
    racks: Vec<Rack>,
}

#[derive(Debug)]
struct Rack {
    first: u32,
    bundles: u32,
}

pub(super) type Path = ([PortId; 4], usize);

impl Layout {
    /// Places the ranks and adds their ports to the network. `nvlink` is a GPU's rate in bytes/s.
    pub(super) fn new(scenario: &Scenario, nvlink: f64, network: &mut Network) -> Self {
        let (cluster, model) = (&scenario.cluster, &scenario.model);
        let per_server = cluster.gpus_per_server;
        let prefill_servers = cluster.prefill_servers();
        let ranks_per_unit = model.ranks();
        let units = prefill_servers * per_server / (model.tp * ranks_per_unit);
        let ranks = units * ranks_per_unit;
        let decode_tp = scenario.serving.decode_tp;
        let decodes = (cluster.servers - prefill_servers) * per_server / decode_tp;
        let nic = cluster.nic_gbps * 1e9 / 8.0;
        let (rank_rate, decode_rate) = (nic * f64::from(model.tp), nic * f64::from(decode_tp));
        for _ in 0..2 * ranks {
            network.add_port(rank_rate);
        }
        for _ in 0..decodes {
            network.add_port(decode_rate);
        }
        let mut layout = Self {
            units,
            ranks_per_unit,
            ranks,
            ranks_per_server: per_server / model.tp,
            decodes,
            rank_rate,
            decode_rate,
            nvlink_rate: nvlink * f64::from(model.tp),
            prefill_servers,
            decodes_per_server: per_server / decode_tp,
            leaves: None,
        };
        if cluster.spreading == Spreading::Ecmp || cluster.oversubscription > 1.0 {
            layout.add_leaves(scenario, network);
        }
        layout
    }

    /// Adds uplinks and downlinks of every rack, in bundles of as many links as a rank has NICs. A
    /// rank's transfer uses all links of a bundle. A rack that is not full has fewer bundles.
    fn add_leaves(&mut self, scenario: &Scenario, network: &mut Network) {
        let cluster = &scenario.cluster;
        let mut first = 2 * self.ranks + self.decodes;
        let mut racks = Vec::new();
        let mut placed = 0;
        while placed < cluster.servers {
            let servers = cluster.servers_per_rack.min(cluster.servers - placed);
            let nics = f64::from(servers * cluster.gpus_per_server);
            let capacity = nics * cluster.nic_gbps * 1e9 / 8.0 / cluster.oversubscription;
            let bundles = match cluster.spreading {
                Spreading::Even => 1,
                Spreading::Ecmp => ((capacity / self.rank_rate).round() as u32).max(1),
            };
            for _ in 0..2 * bundles {
                network.add_port(capacity / f64::from(bundles));
            }
            racks.push(Rack { first, bundles });
            first += 2 * bundles;
            placed += servers;
        }
        self.leaves = Some(Leaves { servers_per_rack: cluster.servers_per_rack, racks });
    }

    pub(super) const fn egress(&self, rank: u32) -> PortId {
        PortId(2 * rank)
    }

    pub(super) const fn ingress(&self, rank: u32) -> PortId {
        PortId(2 * rank + 1)
    }

    /// Reports whether a rank sends by this port.
    pub(super) const fn is_egress(&self, port: PortId) -> bool {
        port.0 < 2 * self.ranks && port.0.is_multiple_of(2)
    }

    pub(super) const fn decode_ingress(&self, decode: u32) -> PortId {
        PortId(2 * self.ranks + decode)
    }

    /// Returns the prefill rank of this port, or `None` if it belongs to none.
    pub(super) const fn rank_of_port(&self, port: PortId) -> Option<u32> {
        if port.0 < 2 * self.ranks { Some(port.0 / 2) } else { None }
    }

    pub(super) const fn unit_of(&self, rank: u32) -> u32 {
        rank / self.ranks_per_unit
    }

    pub(super) const fn server_of(&self, rank: u32) -> u32 {
        rank / self.ranks_per_server
    }

    fn server_of_decode(&self, decode: u32) -> u32 {
        self.prefill_servers + decode / self.decodes_per_server
    }

    /// Returns the number of servers with ranks, prefill servers first.
    pub(super) const fn servers(&self) -> u32 {
        self.prefill_servers + self.decodes / self.decodes_per_server
    }

    /// Returns the ports of a server's NICs. A prefill server without a unit has none.
    pub(super) fn ports_of_server(&self, server: u32) -> core::ops::Range<u32> {
        let ranks = 2 * self.ranks;
        match server.checked_sub(self.prefill_servers) {
            None => {
                let first = 2 * server * self.ranks_per_server;
                first.min(ranks)..(first + 2 * self.ranks_per_server).min(ranks)
            }
            Some(server) => {
                let first = ranks + server * self.decodes_per_server;
                first..first + self.decodes_per_server
            }
        }
    }

    pub(super) fn ranks_of(&self, unit: u32) -> core::ops::Range<u32> {
        unit * self.ranks_per_unit..(unit + 1) * self.ranks_per_unit
    }

    pub(super) fn crosses_racks(&self, unit: u32) -> bool {
        let Some(leaves) = &self.leaves else { return false };
        let ranks = self.ranks_of(unit);
        let rack = |rank| self.server_of(rank) / leaves.servers_per_rack;
        rack(ranks.start) != rack(ranks.end - 1)
    }

    pub(super) fn between(&self, from: u32, to: u32) -> Path {
        let servers = (self.server_of(from), self.server_of(to));
        self.path(self.egress(from), self.ingress(to), servers)
    }

    pub(super) fn to_decode(&self, from: u32, decode: u32) -> Path {
        let servers = (self.server_of(from), self.server_of_decode(decode));
        self.path(self.egress(from), self.decode_ingress(decode), servers)
    }

    fn path(&self, from: PortId, to: PortId, servers: (u32, u32)) -> Path {
        let mut ports = [from, to, PortId(0), PortId(0)];
        let Some(leaves) = &self.leaves else { return (ports, 2) };
        let racks = (servers.0 / leaves.servers_per_rack, servers.1 / leaves.servers_per_rack);
        if racks.0 == racks.1 {
            return (ports, 2);
        }
        let hash = mix(u64::from(from.0) << 32 | u64::from(to.0));
        let port = |rack: u32, down: u32| {
            let Rack { first, bundles } = leaves.racks[rack as usize];
            PortId(first + down * bundles + (hash % u64::from(bundles)) as u32)
        };
        ports[2] = port(racks.0, 0);
        ports[3] = port(racks.1, 1);
        (ports, 4)
    }
}

/// Returns a hash of a number (splitmix64), for choices that look random and are reproducible.
pub(super) const fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
