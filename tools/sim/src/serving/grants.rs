//! Receivers that grant what is sent to them, as in Homa.
//!
//! Montazeri et al., "Homa", SIGCOMM 2018: a sender transmits the first round trip of a message
//! unscheduled, and each further part when the receiver grants it. The receiver keeps a limited
//! number of messages granted at once (*overcommitment*), one at each of its scheduled levels, in
//! the order of the bytes that are left. So an idle sender costs no bandwidth, and the fabric
//! serves the first message first. Unscheduled parts have the lowest level, as in Aeolus (Hu et
//! al., SIGCOMM 2020), because there is no room promised to them.
//!
//! `least_laxity` grants by `D − S / B` instead: the deadline less the time for the bytes left.
//!
//! Departures:
//! * a grant covers one chunk, and a message has one chunk under way at a time;
//! * a collective is not granted, because its aggregate stands for messages to many receivers. It
//!   is sent at once, at the level of its place by size among the messages of each port. It has no
//!   deadline, so that under `least_laxity` it comes first;
//! * the delay of a grant is not modelled, as that of permits is not.

use std::collections::{BTreeMap, BTreeSet};

use laxity_policy::{Level, Time};

use super::flow::{Flow, To};
use super::world::World;
use crate::network::PortId;
use crate::scenario::Grants;

#[derive(Debug)]
pub(super) struct Receivers {
    messages: Vec<BTreeSet<(u64, u32)>>,
    keys: BTreeMap<u32, u64>,
}

impl Receivers {
    pub(super) fn new(ports: u32) -> Self {
        Self { messages: vec![BTreeSet::new(); ports as usize], keys: BTreeMap::new() }
    }

    /// Puts a message at its place on its ports, or removes it if there is no key.
    fn set(&mut self, ports: [PortId; 2], slot: u32, key: Option<u64>) {
        let old = match key {
            Some(key) => self.keys.insert(slot, key),
            None => self.keys.remove(&slot),
        };
        for port in ports {
            let messages = &mut self.messages[port.0 as usize];
            if let Some(old) = old {
                messages.remove(&(old, slot));
            }
            if let Some(key) = key {
                messages.insert((key, slot));
            }
        }
    }

    fn first(&self, port: PortId, most: usize) -> Vec<u32> {
        self.messages[port.0 as usize].iter().take(most).map(|&(_, slot)| slot).collect()
    }

    fn before(&self, port: PortId, key: u64, most: usize) -> usize {
        self.messages[port.0 as usize].range(..(key, 0)).take(most).count()
    }
}

impl World<'_> {
    fn ends_of(&self, flow: &Flow) -> [PortId; 2] {
        let layout = &self.setup.layout;
        let to = match flow.to {
            To::Rank(rank) => layout.ingress(rank),
            To::Decode(decode) => layout.decode_ingress(decode),
        };
        [layout.egress(flow.from), to]
    }

    fn grant_key(&self, due: Time, left: u64) -> u64 {
        match self.setup.scenario.policy.grants {
            Grants::LeastLaxity if due == Time::NEVER => u64::MAX,
            Grants::LeastLaxity => {
                let takes = left as f64 / self.setup.layout.rank_rate * 1e9;
                due.0.saturating_sub(takes as u64)
            }
            _ => left,
        }
    }

    /// Returns the number of messages that a receiver grants at once, one at each level.
    fn overcommitted(&self) -> usize {
        usize::from(self.setup.scenario.policy.levels).saturating_sub(1).max(1)
    }

    /// Starts a flow: its first round trip is unscheduled, and its receiver knows it from then on.
    pub(super) fn open(&mut self, slot: u32) {
        let round_trip = 2.0 * self.setup.latency.0 as f64 / 1e9 * self.setup.layout.rank_rate;
        let flow = self.flows.get_mut(slot);
        flow.unsent = flow.left.min(round_trip.max(1.0) as u64);
        flow.level = Level::SCAVENGER;
        let flow = *flow;
        let key = self.grant_key(self.due(&flow), flow.left);
        let ends = self.ends_of(&flow);
        self.receivers.set(ends, slot, Some(key));
        self.send(slot);
    }

    pub(super) fn granted_arrived(&mut self, slot: u32) {
        let flow = *self.flows.get_mut(slot);
        let ends = self.ends_of(&flow);
        let key = self.grant_key(self.due(&flow), flow.left);
        self.receivers.set(ends, slot, (flow.left > 0).then_some(key));
        self.grant(ends[1]);
    }

    fn grant(&mut self, receiver: PortId) {
        let most = self.overcommitted();
        for (place, slot) in (1..).zip(self.receivers.first(receiver, most)) {
            let chunk = self.setup.scenario.network.chunk_bytes;
            let flow = self.flows.get_mut(slot);
            if flow.sending > 0 {
                continue;
            }
            flow.unsent = flow.left.min(chunk);
            flow.level = Level(place);
            self.send(slot);
        }
    }

    pub(super) fn granted_level(&self, port: PortId, bytes: u64) -> Level {
        let key = match self.setup.scenario.policy.grants {
            Grants::LeastLaxity => 0,
            _ => bytes,
        };
        let most = self.overcommitted();
        let place = self.receivers.before(port, key, most - 1);
        Level(place as u8 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::{Scenario, Source};
    use crate::serving::simulate;

    #[test]
    fn a_port_keeps_each_message_once_and_in_order() {
        let mut receivers = Receivers::new(3);
        let ports = [PortId(0), PortId(2)];
        for (slot, key) in [(7, 50), (8, 20), (9, 50), (7, 10)] {
            receivers.set(ports, slot, Some(key));
        }
        assert_eq!(receivers.first(PortId(2), 9), [7, 8, 9]);
        assert_eq!(receivers.first(PortId(0), 2), [7, 8]);
        assert_eq!(receivers.first(PortId(1), 9), [0_u32; 0]);
        assert_eq!(
            (receivers.before(PortId(0), 50, 9), receivers.before(PortId(0), 50, 1)),
            (2, 1)
        );
        receivers.set(ports, 7, None);
        assert_eq!(receivers.first(PortId(2), 9), [8, 9]);
        assert_eq!(receivers.keys.len(), 2);
    }

    fn scenario(grants: Grants) -> Scenario {
        let mut scenario = Scenario::default();
        scenario.cluster.servers = 8;
        scenario.cluster.nic_gbps = 50.0;
        scenario.model.ep = 8;
        scenario.workload.source = Source::Agent;
        scenario.workload.seconds = 4.0;
        scenario.workload.rate_per_gpu = 1.2;
        scenario.policy.kind = laxity_policy::PolicyKind::Fair;
        scenario.policy.grants = grants;
        scenario
    }

    #[test]
    fn all_that_is_sent_is_granted_and_arrives_once() {
        let fair = simulate(&scenario(Grants::Off)).expect("it makes sense");
        for grants in [Grants::Shortest, Grants::LeastLaxity] {
            // A debug build also checks that each port carried the bytes that were to be sent.
            let granted = simulate(&scenario(grants)).expect("it makes sense");
            assert_eq!(granted.requests_in_all, fair.requests_in_all);
            assert_eq!(granted.bytes.p2d, fair.bytes.p2d);
            assert_ne!(granted.ttft_ms.mean, fair.ttft_ms.mean);
        }
    }
}
