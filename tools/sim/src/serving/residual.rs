//! The rates in force of the simulated ports (architecture §4.6), if `network.residual_mode` is
//! `follow`.
//!
//! Each server reads the counters of its ports, as `laxityd` does: every 20 ms, or every 100 ms
//! while they are quiet. [`laxity_policy::residual`] compares them with what the server's links
//! permitted. A rate is in force from the next reading on.
//!
//! As on real hosts, a server does not know what other servers send to it or read from it. So at an
//! ingress collectives and P2D are foreign, and at the egress of a holder its blocks are.
//!
//! Departure: counters have no headers and no signals of congestion.

use core::ops::Range;

use laxity_policy::Span;
use laxity_policy::residual::{self, Capacity, PortRate, Reading, Residual};

use super::event::Happening;
use super::hosts::Regime;
use super::layout::mix;
use super::world::World;
use crate::network::PortId;
use crate::scenario::ResidualChoice;

/// The state of a port, by its number in the network.
#[derive(Debug, Default)]
pub(super) struct WatchedPort {
    state: Residual,
    capacity: Option<Capacity>,
    /// The bytes that had passed the port at the last reading.
    passed_bytes: u64,
    /// The rate that is in force, once one is.
    told: Option<u64>,
}

impl World<'_> {
    pub(super) fn schedule_readings(&mut self) {
        let follows = self.setup.scenario.network.residual_mode == ResidualChoice::Follow;
        if !follows || self.setup.regime != Regime::Daemons {
            return;
        }
        let servers = self.setup.layout.servers();
        self.watched.resize_with(self.ports_of(servers - 1).end as usize, WatchedPort::default);
        for server in 0..servers {
            // Daemons don't read at the same time.
            let after = mix(self.setup.scenario.seed ^ u64::from(server)) % residual::READ_EVERY.0;
            self.agenda.push(self.now + Span(after), Happening::Reading { server });
        }
    }

    fn ports_of(&self, server: u32) -> Range<u32> {
        self.setup.layout.ports_of_server(server)
    }

    fn configured(&self, port: u32) -> PortRate {
        PortRate {
            rate: self.network.capacity(PortId(port)) as u64,
            assured_permille: self.setup.scenario.network.residual_assured_permille,
        }
    }

    /// Returns the bytes that have passed a port, and those of them that the network did not carry.
    fn passed_bytes(&self, port: u32) -> (u64, u64) {
        let counted = self.counted_bytes(PortId(port));
        let carried = self.network.carried(PortId(port), self.now) as u64;
        // Rounding must not move a counter back.
        (self.watched[port as usize].passed_bytes.max(carried + counted), counted)
    }

    /// Handles a reading of all counters of a server.
    pub(super) fn read_counters(&mut self, server: u32) {
        let is_quiet = |port: u32| {
            let watched = &self.watched[port as usize];
            let passed = self.passed_bytes(port).0 - watched.passed_bytes;
            watched.capacity.is_some_and(|capacity| {
                watched.told == Some(capacity.rate)
                    && capacity.is_quiet(self.configured(port).rate, passed)
            })
        };
        let pause = match self.ports_of(server).all(is_quiet) {
            true => residual::IDLE_EVERY,
            false => {
                for port in self.ports_of(server) {
                    self.follow(port);
                    self.read_port(port);
                }
                residual::READ_EVERY
            }
        };
        self.agenda.push(self.now + pause, Happening::Reading { server });
    }

    fn read_port(&mut self, port: u32) {
        let (passed, counted) = self.passed_bytes(port);
        let (permitted, in_flight) = match port < 2 * self.setup.layout.ranks {
            true => self.hosts.usage(port),
            false => (0, 0),
        };
        // The link does not know of collectives that the network did not carry. A rank's egress
        // sends them on credit.
        let own = if self.setup.layout.is_egress(PortId(port)) { counted } else { 0 };
        let reading = Reading {
            at: self.now,
            port_bytes: passed,
            permitted_bytes: permitted + own,
            in_flight_bytes: in_flight,
            signals: 0,
            yielding_bytes: 0,
        };
        let configured = self.configured(port);
        let watched = &mut self.watched[port as usize];
        watched.capacity = Some(watched.state.read(configured, reading));
        watched.passed_bytes = passed;
    }

    /// Puts the rate of the last reading in force.
    fn follow(&mut self, port: u32) {
        let configured = self.configured(port).rate;
        let watched = &mut self.watched[port as usize];
        let Some(Capacity { rate, .. }) = watched.capacity else { return };
        if watched.told.replace(rate).unwrap_or(configured) == rate {
            return;
        }
        if port < 2 * self.setup.layout.ranks {
            let network = &self.setup.scenario.network;
            let configured = (configured, network.window_bytes);
            let window = residual::window_bytes(configured, network.chunk_bytes, rate);
            self.hosts.set_capacity(port, rate, window);
            self.poll(port);
        }
    }
}

#[cfg(test)]
mod tests {
    use laxity_policy::{PolicyKind, Time};

    use super::super::tests::{inputs, run, small_of, world};
    use super::*;
    use crate::scenario::Scenario;

    /// Prompts whose KV cache fills three quarters of the egress ports for 3 s. None is reused.
    fn prompts() -> Vec<(u64, u32, u32)> {
        (0..90).map(|n| (n * 33, 1500 + 50 * (n as u32 % 20), n as u32)).collect()
    }

    fn scenario(kind: PolicyKind, share: f64, period_ms: f64) -> Scenario {
        let mut scenario = small_of("llama-3-8b", 4, 1, 1);
        scenario.serving.decode_tp = 4;
        scenario.cluster.nic_gbps = 2.5;
        scenario.policy.kind = kind;
        let network = &mut scenario.network;
        (network.chunk_bytes, network.overcommit) = (1 << 20, 1);
        network.residual_mode = ResidualChoice::Follow;
        (network.ungoverned_share, network.ungoverned_period_ms) = (share, period_ms);
        scenario
    }

    /// Runs a scenario, and returns the changes of the rate of each rank's egress: when, and the
    /// share of the configured rate.
    fn rates(scenario: &Scenario) -> Vec<Vec<(Time, f64)>> {
        let inputs = inputs(scenario, &prompts());
        let mut world = world(scenario, &inputs);
        let configured = world.setup.layout.rank_rate;
        let mut seen = vec![vec![(Time::ZERO, 1.0)]; world.setup.layout.ranks as usize];
        world.run_observed(|world| {
            for (rank, seen) in seen.iter_mut().enumerate() {
                let share = world.hosts.rate(2 * rank as u32) as f64 / configured;
                if seen.last().is_some_and(|last| last.1 != share) {
                    seen.push((world.now, share));
                }
            }
        });
        seen
    }

    #[test]
    fn without_foreign_traffic_and_reuse_following_changes_nothing() {
        for kind in [PolicyKind::Sjf, PolicyKind::Mfs, PolicyKind::Laxity] {
            let mut scenario = scenario(kind, 0.0, 5.0);
            let follows = run(&scenario, &prompts());
            scenario.network.residual_mode = ResidualChoice::Off;
            let ignores = run(&scenario, &prompts());
            let text = |outcome| serde_json::to_string(outcome).expect("an outcome is JSON");
            assert_eq!(text(&follows), text(&ignores), "{kind}");
            if kind == PolicyKind::Laxity {
                scenario.network.ungoverned_share = 0.4;
                let ignores = run(&scenario, &prompts());
                scenario.network.residual_mode = ResidualChoice::Follow;
                assert_ne!(run(&scenario, &prompts()), ignores, "it is followed");
            }
        }
    }

    #[test]
    fn a_steady_share_is_taken_from_the_rate_without_oscillation_and_never_more_than_assured() {
        for share in [0.3, 0.6, 0.95] {
            let assured = 0.25;
            for changes in rates(&scenario(PolicyKind::Laxity, share, 1.0)) {
                let settled = Time::ZERO + Span::from_millis(2_000);
                let least = changes.iter().map(|change| change.1).fold(1.0, f64::min);
                assert!(least >= assured - 1e-6, "{least} of the rate beside {share}");
                let last = changes.last().expect("the first rate").1;
                let left = (1.0_f64 - share).max(assured);
                assert!((last - left).abs() < 0.12, "{last} is left of {left}");
                let late = changes.iter().filter(|change| change.0 > settled).count();
                assert!(late <= 4, "{changes:?}");
            }
        }
    }

    #[test]
    fn bursts_of_seconds_move_the_rate_twice_a_second_at_most() {
        for changes in rates(&scenario(PolicyKind::Laxity, 0.5, 2_000.0)) {
            let least = changes.iter().map(|change| change.1).fold(1.0, f64::min);
            assert!((0.25 - 1e-6..0.5).contains(&least), "{least}");
            let rises = |pair: &[(Time, f64)]| pair[1].1 > pair[0].1;
            let moves: Vec<_> = changes.windows(2).map(rises).collect();
            let turns = moves.windows(2).filter(|pair| pair[0] != pair[1]).count();
            let seconds = changes.last().expect("the first rate").0.0 as f64 / 1e9;
            assert!(turns as f64 <= 2.0 * seconds + 1.0, "{turns} turns in {seconds} s");
        }
    }
}
