//! A fabric of racks under load. It is too large for the oracle, so rates are checked by their
//! definition.

use laxity_policy::Time;

use super::super::{Network, PortId};

const RACKS: u64 = 6;
const SERVERS: u64 = 12;
const NIC: f64 = 25e9;

/// Servers with an egress and an ingress. Leaf switches have an uplink and a downlink with half the
/// capacity of their servers.
struct Fabric {
    network: Network,
    egress: Vec<PortId>,
    ingress: Vec<PortId>,
    up: Vec<PortId>,
    down: Vec<PortId>,
    now: Time,
    seed: u64,
    /// Bytes started, by server, for egress and ingress.
    sent: Vec<u64>,
    received: Vec<u64>,
}

impl Fabric {
    fn new(patience: usize) -> Self {
        let mut network = Network::new();
        network.patience = patience;
        let mut ports = |count: u64, rate: f64| -> Vec<PortId> {
            (0..count).map(|_| network.add_port(rate)).collect()
        };
        let servers = RACKS * SERVERS;
        let uplink = NIC * SERVERS as f64 / 2.0;
        Self {
            egress: ports(servers, NIC),
            ingress: ports(servers, NIC),
            up: ports(RACKS, uplink),
            down: ports(RACKS, uplink),
            now: Time(0),
            seed: 1,
            sent: vec![0; servers as usize],
            received: vec![0; servers as usize],
            network,
        }
    }

    /// Returns a number below `bound` by SplitMix64.
    fn draw(&mut self, bound: u64) -> u64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.seed ^ (self.seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    /// Starts a transfer from `from` to another server, or an aggregate on its egress.
    fn send(&mut self, from: usize) {
        let to = self.draw(RACKS * SERVERS) as usize;
        let bytes = 1 + self.draw(8 << 20);
        let class = 1 + self.draw(4) as u8;
        let weight = 1.0 + self.draw(3) as f64;
        let (rack, other) = (from / SERVERS as usize, to / SERVERS as usize);
        let mut path = vec![self.egress[from]];
        if class > 1 {
            path.push(self.ingress[to]);
            self.received[to] += bytes;
            if rack != other {
                path.extend([self.up[rack], self.down[other]]);
            }
        }
        self.sent[from] += bytes;
        self.network.start(self.now, &path, bytes, class, weight, from as u32);
    }

    /// Advances to the next end and returns the senders of the transfers that end.
    fn step(&mut self) -> Option<Vec<usize>> {
        self.now = self.network.next_end(self.now)?;
        let ended = std::iter::from_fn(|| self.network.pop_ended(self.now));
        Some(ended.map(|(_, from)| from as usize).collect())
    }
}

/// Runs `events` ends with ten transfers per server. Returns their times and senders.
fn run(patience: usize, events: usize) -> Vec<(Time, usize)> {
    let mut fabric = Fabric::new(patience);
    for nth in 0..10 * RACKS * SERVERS {
        fabric.send((nth % (RACKS * SERVERS)) as usize);
    }
    let mut log = Vec::new();
    while let Some(ended) = fabric.step() {
        for from in ended {
            log.push((fabric.now, from));
            if log.len() < events {
                fabric.send(from);
            }
        }
        if log.len().is_multiple_of(50) {
            fabric.network.next_end(fabric.now);
            fabric.network.check().expect("the network is sound");
        }
    }
    for (server, port) in fabric.egress.iter().enumerate() {
        let carried = fabric.network.carried(*port, fabric.now);
        assert_eq!(carried, fabric.sent[server] as f64);
        let carried = fabric.network.carried(fabric.ingress[server], fabric.now);
        assert_eq!(carried, fabric.received[server] as f64);
    }
    log
}

#[test]
fn a_loaded_fabric_is_shared_as_it_should_be() {
    run(super::super::PATIENCE, 1000);
}

#[test]
fn filling_from_scratch_gives_the_same_ends() {
    let log = run(super::super::PATIENCE, 300);
    let scratch = run(0, 300);
    // Rounding may move ends by a nanosecond, after which other transfers start.
    let same = log.iter().zip(&scratch).take_while(|(a, b)| a == b).count();
    assert!(same > 250, "{same} of {} are the same", log.len());
}
