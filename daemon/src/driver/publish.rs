//! The snapshot that leaves the thread.

use std::sync::Arc;

use laxity_policy::Span;

use super::{Driver, ports};
use crate::mailbox::RING_AFTER;
use crate::stats::Snapshot;

impl Driver {
    /// Pins up a snapshot; if the board is being looked at, tries again in the next round.
    pub(super) fn publish(&mut self) {
        let intake = &mut self.intake;
        intake.counters.ring_depth_max = intake
            .counters
            .ring_depth_max
            .max(intake.counters.ring_depth);
        let mut all_clients = self.gone;
        let mut clients = Vec::new();
        for client in self.clients.iter().flatten() {
            all_clients.add(&client.state.counters);
            clients.push(client.snapshot());
        }
        clients.sort_unstable_by_key(|client| client.id);
        let snapshot = Snapshot {
            at: intake.now,
            mode: self.config.mode,
            policy: self.config.policy,
            bypass: intake.bypass,
            dscp: self.config.dscp_by_row(),
            ports: intake.ports.iter().map(ports::Port::snapshot).collect(),
            clients,
            all_clients,
            scheduler: intake.counters,
            fetches: intake.hints.fetch_counters(),
            distrusted: intake.trust.distrusted(),
        };
        let quiet = intake.now.since(self.published) > Span(RING_AFTER.as_nanos() as u64);
        if self
            .slot
            .try_pin(Arc::new(snapshot), self.publish_now || quiet)
        {
            self.published = intake.now;
            self.unpublished = false;
            self.publish_now = false;
            intake.counters.ring_depth = 0;
        }
    }
}
