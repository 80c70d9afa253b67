//! The choice of a decode rank by what the network will cost, as in NetKV.
//!
//! NetKV (arXiv 2606.03910) is a greedy choice per request: of all decode instances the one with
//! the least expected time to receive the KV cache. An oracle tells the bandwidth of the path
//! between two hosts and its congestion. Here the oracle reads the simulated network, so it is
//! never stale:
//!
//! ```text
//! cost(d) = W_d / B_d + S / min{ B_p / (1 + n_p) : p on the path to d }   [s]
//! ```
//!
//! `W_d` are the bytes on their way to decode rank `d`, `B` a port's rate, `n_p` the transfers that
//! cross port `p` now, and `S` the bytes of the request.
//!
//! Departures: the paper adds terms for the load of decode and for prefixes that decode holds.
//! Neither is modelled here. The formula above is derived from the paper's abstract.

use super::world::World;

impl World<'_> {
    pub(super) fn cheapest_decode(&mut self, rank: u32, bytes: u64) -> u32 {
        let layout = &self.setup.layout;
        let costs: Vec<f64> = (0..layout.decodes)
            .map(|decode| {
                let (ports, count) = layout.to_decode(rank, decode);
                let rate = |&port: &_| {
                    self.network.capacity(port) / (1.0 + self.network.active(port) as f64)
                };
                let slowest = ports[..count].iter().map(rate).fold(f64::INFINITY, f64::min);
                let queued = self.router.decode_load[decode as usize] as f64;
                queued / layout.decode_rate + bytes as f64 / slowest
            })
            .collect();
        self.router.place_cheapest(bytes, &costs)
    }
}

#[cfg(test)]
mod tests {
    use laxity_policy::Time;

    use super::super::tests::{inputs, small, world};
    use crate::network::{NewTransfer, PortId};
    use crate::scenario::Placement;

    #[test]
    fn the_cheapest_is_idle_itself_and_behind_idle_links() {
        const GBYTE: u64 = 1_000_000_000;
        let mut scenario = small();
        scenario.serving.placement = Placement::NetworkCost;
        // Racks of one server: every path to decode crosses two uplinks.
        (scenario.cluster.servers_per_rack, scenario.cluster.oversubscription) = (1, 2.0);
        let inputs = inputs(&scenario, &[(0, 100, 0)]);
        let mut world = world(&scenario, &inputs);
        let decodes = world.setup.layout.decodes;
        // All are idle, so they take turns.
        let turns: Vec<u32> = (0..decodes).map(|_| world.cheapest_decode(0, 0)).collect();
        assert_eq!(turns, (0..decodes).collect::<Vec<_>>());
        // The last one alone has nothing on its way.
        for decode in 0..decodes - 1 {
            world.router.decode_load[decode as usize] = GBYTE;
        }
        assert_eq!(world.cheapest_decode(0, GBYTE / 10), decodes - 1);
        // A congested downlink of its rack costs more than the queues of the others.
        world.router.decode_load[decodes as usize - 1] = 0;
        let (path, _) = world.setup.layout.to_decode(0, decodes - 1);
        let downlink: PortId = path[3];
        for _ in 0..40 {
            let transfer = NewTransfer { bytes: GBYTE, class: 6, weight: 1.0, tag: 0 };
            world.network.start(Time::ZERO, &[downlink], transfer);
        }
        let chosen = world.cheapest_decode(0, GBYTE);
        let (other, _) = world.setup.layout.to_decode(0, chosen);
        assert_ne!(other[3], downlink, "decode rank {chosen}");
    }
}
