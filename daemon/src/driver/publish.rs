//! Making and publishing a snapshot.

use super::Driver;
use crate::stats::{ClientCounters, ClientSnapshot, Snapshot};
use crate::treatments::unlike_levels;

impl Driver {
    pub(super) fn publish(&mut self) {
        let intake = &mut self.intake;
        let deepest = &mut intake.counters.status.ring_depth_max;
        *deepest = intake.counters.ring_depth.max(*deepest);
        let mut all_clients = ClientCounters::default();
        self.publisher.jobs.iter().for_each(|job| all_clients.add(&job.gone));
        let mut clients = Vec::new();
        for client in self.clients.iter().flatten() {
            all_clients.add(&client.state.counters);
            let state = &client.state;
            let full = intake.ports.iter().any(|port| port.link.is_limited(state.domain));
            let limited = state.waiting > 0 && full;
            clients.push(ClientSnapshot { limited, ..client.snapshot() });
        }
        clients.sort_unstable_by_key(|client| client.id);
        let now = intake.now;
        self.publisher.publish(Snapshot {
            at: intake.now,
            mode: self.config.mode,
            marking: self.config.marking,
            policy: self.config.policy,
            bypass: intake.bypass,
            dscp: self.config.dscp_by_row(),
            sl: self.config.sl_by_row(),
            unlike_levels: unlike_levels(&self.treatments, &self.config.dscp_by_row()),
            ports: intake.ports.iter_mut().map(|port| port.snapshot(now)).collect(),
            clients,
            jobs: self.publisher.jobs.snapshot(),
            all_clients,
            scheduler: intake.counters,
            fetches: intake.hints.cluster.fetches.count(),
            distrusted: intake.trust.distrusted(),
        });
        intake.counters.ring_depth = 0;
    }
}
