//! The state of a port for reports.

use laxity_types::{Level, Stage};

use super::queue::Tally;

/// The state of a port at one instant, for reports.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LinkSnapshot {
    /// Waiting flows in the row [`Level::row`] of their level. The last row is the scavenger.
    pub waiting_by_level: [Tally; Level::ROWS],
    /// Waiting flows by [`Stage::index`].
    pub waiting_by_stage: [Tally; Stage::ALL.len()],
    /// Held flows ([`Event::FlowHeld`]), which do not count as waiting.
    pub held: Tally,
    /// Bytes permitted and not yet completed.
    pub in_flight_bytes: u64,
    /// `ρ`: recent share of the port's rate that early stages used, from 0 to 1.
    pub rho: f64,
    /// Moves of waiting flows to a higher level, since the link was created.
    pub promotions: u64,
    /// Moves of waiting flows to the scavenger, since the link was created.
    pub demotions: u64,
    /// Number of known batches.
    pub batches: usize,
    /// Number of known requests.
    pub requests: usize,
}

impl LinkSnapshot {
    /// Adds the state of another link of the same port.
    pub fn add(&mut self, other: &Self) {
        let tallies = self.waiting_by_level.iter_mut().chain(&mut self.waiting_by_stage);
        let others = other.waiting_by_level.iter().chain(&other.waiting_by_stage);
        for (own, other) in tallies.chain([&mut self.held]).zip(others.chain([&other.held])) {
            own.flows += other.flows;
            own.bytes = own.bytes.saturating_add(other.bytes);
        }
        self.in_flight_bytes = self.in_flight_bytes.saturating_add(other.in_flight_bytes);
        self.rho += other.rho;
        self.promotions += other.promotions;
        self.demotions += other.demotions;
        self.batches += other.batches;
        self.requests += other.requests;
    }
}
