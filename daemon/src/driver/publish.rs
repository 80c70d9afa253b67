//! The snapshot that leaves the thread.

use std::sync::Arc;

use laxity_policy::{Span, Time};

use super::{Driver, ports};
use crate::mailbox::{LOOK_EVERY, SnapshotSlot, WAKE_AFTER};
use crate::stats::{ClientCounters, Snapshot};

/// Time between snapshots while something happens.
const PUBLISH_EVERY: Span = Span(LOOK_EVERY.as_nanos() as u64);

/// When to publish, and where.
#[derive(Debug)]
pub(super) struct Publisher {
    slot: Arc<SnapshotSlot>,
    /// Counters of clients that are gone.
    pub(super) gone: ClientCounters,
    /// Something happened since the last snapshot, or somebody asked for one.
    is_changed: bool,
    is_asked: bool,
    published: Time,
}

impl Publisher {
    pub(super) fn new(slot: Arc<SnapshotSlot>) -> Self {
        Self {
            slot,
            gone: ClientCounters::default(),
            is_changed: true,
            is_asked: true,
            published: Time::ZERO,
        }
    }

    /// Something happened.
    pub(super) const fn note_change(&mut self) {
        self.is_changed = true;
    }

    /// Somebody waits for a snapshot.
    pub(super) const fn ask(&mut self) {
        self.is_asked = true;
    }

    /// When to publish.
    pub(super) fn due(&self) -> Time {
        match (self.is_asked, self.is_changed) {
            (true, _) => Time::ZERO,
            (false, true) => self.published + PUBLISH_EVERY,
            (false, false) => Time::NEVER,
        }
    }

    /// Counts a sign of life.
    pub(super) fn progress(&self) {
        self.slot.progress();
    }

    fn publish(&mut self, snapshot: Snapshot) {
        let at = snapshot.at;
        let quiet = at.since(self.published) > Span(WAKE_AFTER.as_nanos() as u64);
        self.slot.publish(snapshot, self.is_asked || quiet);
        self.published = at;
        (self.is_changed, self.is_asked) = (false, false);
    }
}

impl Driver {
    /// Publishes a snapshot.
    pub(super) fn publish(&mut self) {
        let intake = &mut self.intake;
        let deepest = &mut intake.counters.ring_depth_max;
        *deepest = intake.counters.ring_depth.max(*deepest);
        let mut all_clients = self.publisher.gone;
        let mut clients = Vec::new();
        for client in self.clients.iter().flatten() {
            all_clients.add(&client.state.counters);
            clients.push(client.snapshot());
        }
        clients.sort_unstable_by_key(|client| client.id);
        self.publisher.publish(Snapshot {
            at: intake.now,
            mode: self.config.mode,
            policy: self.config.policy,
            bypass: intake.bypass,
            dscp: self.config.dscp_by_row(),
            ports: intake.ports.iter().map(ports::Port::snapshot).collect(),
            clients,
            all_clients,
            scheduler: intake.counters,
            fetches: intake.hints.cluster.fetches.counters(),
            distrusted: intake.trust.distrusted(),
        });
        intake.counters.ring_depth = 0;
    }
}
