//! What a virtual daemon is configured with, and what a fault changes of it.

use std::net::Ipv4Addr;

use laxity_daemon::config::{Config, NicConfig, ResidualMode};
use laxity_daemon::domains::TrustScope;
use laxity_policy::PolicyKind;
use laxity_quantity::{Bytes, Nanos, Rate};
use rand::RngExt as _;
use rand::seq::IndexedRandom as _;
use rand_chacha::ChaCha8Rng;

pub(super) const NIC: &str = "virtual";
/// Lanes of a client: those of its queues, one for threads that end, and a few for a leak.
const LANES: u16 = 12;
pub(super) const SLOTS: u16 = 64;
/// The slowest rate of the port, in bytes per second.
const RATE_MIN: u64 = 125_000_000;

pub(super) fn draw(rng: &mut ChaCha8Rng) -> Config {
    let mut config = Config::default();
    config.scheduler.lanes = LANES;
    config.scheduler.slots = SLOTS;
    config.scheduler.spin_us = [0, 5][rng.random_range(0..2)];
    let trust = [TrustScope::Uid, TrustScope::Process, TrustScope::Group, TrustScope::Host];
    config.access.trust = trust[rng.random_range(0..trust.len())];
    config.residual.mode = ResidualMode::Off;
    config.coordinator.order_age_limit = Nanos(100_000_000);
    config.nic = vec![NicConfig {
        name: NIC.to_owned(),
        rate: Rate(RATE_MIN).into(),
        chunk: Some(Bytes(16 << 10)),
        window: Some(Bytes(64 << 10)),
        peer_window: None,
        addresses: vec![Ipv4Addr::LOCALHOST.into()],
        absent: false,
    }];
    change(&mut config, rng.random());
    change_policy(&mut config, rng);
    config
}

/// Changes the window, the chunk, the number of levels and the parameters of policies.
pub(super) fn change(config: &mut Config, choice: u64) {
    config.nic[0].window = Some(Bytes(64 << 10 << (choice % 3)));
    config.nic[0].chunk = Some(Bytes(8 << 10 << (choice / 3 % 3)));
    let levels = 2 + (choice / 9 % 7) as u8;
    config.levels.count = levels;
    config.tuning.overcommit = 1 + (choice / 72 % 2) as u32;
    config.tuning.scavenger_permille = [0, 20, 100][(choice / 144 % 3) as usize];
}

pub(super) fn change_policy(config: &mut Config, rng: &mut ChaCha8Rng) {
    config.policy = *PolicyKind::ALL.choose(rng).unwrap_or(&config.policy);
}

/// Changes the rate of the port, and returns it in bytes per second.
pub(super) fn change_rate(config: &mut Config, choice: u64) -> u64 {
    let rate = RATE_MIN << (choice % 3);
    config.nic[0].rate = Rate(rate).into();
    rate
}
