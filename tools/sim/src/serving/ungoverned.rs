//! Traffic on the NICs that no daemon sees: transfers that GPUs start by themselves, storage, other
//! tenants.
//!
//! Each port carries bursts at line rate, before all other classes, one in each period. A burst
//! lasts `ungoverned_share` of the period, at a pseudo-random place within it, so that ports are
//! independent of each other and of the policy. Two bursts of a port never overlap.
//!
//! Daemons learn of it only by their counters (see `residual`).

use laxity_policy::Time;

use super::event::Happening;
use super::hosts::Regime;
use super::layout::mix;
use super::world::{Tag, World};
use crate::network::{NewTransfer, PortId};

fn begin(seed: u64, port: u32, period: u64, period_ns: f64, share: f64) -> Time {
    let random = mix(seed ^ mix(u64::from(port) << 40 ^ period));
    let place = (random >> 11) as f64 / (1_u64 << 53) as f64;
    Time(((period as f64 + place * (1.0 - share)) * period_ns) as u64)
}

impl World<'_> {
    fn period_ns(&self) -> f64 {
        self.setup.scenario.network.ungoverned_period_ms * 1e6
    }

    pub(super) fn schedule_bursts(&mut self) {
        let share = self.setup.scenario.network.ungoverned_share;
        if share <= 0.0 || self.setup.regime == Regime::Alone {
            return;
        }
        for port in 0..2 * self.setup.layout.ranks + self.setup.layout.decodes {
            let at = begin(self.setup.scenario.seed, port, 0, self.period_ns(), share);
            self.agenda.push(at, Happening::Burst { port });
        }
    }

    pub(super) fn burst(&mut self, port: u32) {
        let share = self.setup.scenario.network.ungoverned_share;
        let (seed, period_ns, now) = (self.setup.scenario.seed, self.period_ns(), self.now);
        let id = PortId(port);
        self.make_room_for(&[id], None);
        let bytes = self.network.capacity(id) * share * period_ns / 1e9;
        let tag = Tag::Burst(port).pack();
        let carried = NewTransfer { bytes: bytes as u64, class: 0, weight: 1.0, tag };
        self.network.start(now, &[id], carried);
        let next = (now.0 as f64 / period_ns) as u64 + 1;
        let at = begin(seed, port, next, period_ns, share);
        self.agenda.push(at.max(now), Happening::Burst { port });
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{run, small};
    use super::*;

    #[test]
    fn ungoverned_traffic_takes_its_share_and_delays_the_rest() {
        let list: Vec<_> = (0..20).map(|n| (n * 40, 2000, n as u32)).collect();
        let mut scenario = small();
        scenario.cluster.nic_gbps = 25.0;
        let alone = run(&scenario, &list);
        scenario.network.ungoverned_share = 0.4;
        let beside = run(&scenario, &list);
        assert!(beside.port_busy_mean > alone.port_busy_mean * 0.5 + 0.3, "{beside:?}");
        assert!(beside.collective_ms.mean > 1.2 * alone.collective_ms.mean);
        assert_eq!(beside.bytes.p2d, alone.bytes.p2d);
        // Without contention there is no such traffic, either.
        scenario.policy.no_contention = true;
        let bound = run(&scenario, &list);
        scenario.network.ungoverned_share = 0.0;
        assert_eq!(run(&scenario, &list).ttft_ms, bound.ttft_ms);
    }

    #[test]
    fn bursts_of_a_port_follow_each_other_without_overlap() {
        let (period_ns, share) = (1e6, 0.3);
        for port in 0..50 {
            let at: Vec<u64> = (0..100).map(|n| begin(7, port, n, period_ns, share).0).collect();
            for (period, pair) in at.windows(2).enumerate() {
                assert_eq!((pair[0] as f64 / period_ns) as usize, period);
                assert!(pair[1] - pair[0] >= 299_999, "{pair:?}");
            }
        }
        let first = |port| begin(7, port, 0, period_ns, share);
        assert!((1..50).any(|port| first(port) != first(0)), "ports burst together");
    }
}
