//! The time and the place to publish snapshots.

use std::sync::Arc;

use laxity_policy::{Span, Time};

use crate::jobs::Jobs;
use crate::mailbox::{LOOK_EVERY, SnapshotSlot, WAKE_AFTER};
use crate::stats::Snapshot;

/// The time between snapshots while the scheduler has work.
const PUBLISH_EVERY: Span = Span(LOOK_EVERY.as_nanos() as u64);

#[derive(Debug)]
pub(super) struct Publisher {
    slot: Arc<SnapshotSlot>,
    /// The jobs, with the summed counters of clients that are gone.
    pub(super) jobs: Jobs,
    /// Whether anything has changed since the last snapshot.
    is_changed: bool,
    is_asked: bool,
    published: Time,
}

impl Publisher {
    pub(super) fn new(slot: Arc<SnapshotSlot>) -> Self {
        Self {
            slot,
            jobs: Jobs::default(),
            is_changed: true,
            is_asked: true,
            published: Time::ZERO,
        }
    }

    pub(super) const fn note_change(&mut self) {
        self.is_changed = true;
    }

    /// Records that a task waits for a snapshot.
    pub(super) const fn ask(&mut self) {
        self.is_asked = true;
    }

    pub(super) fn due(&self) -> Time {
        match (self.is_asked, self.is_changed) {
            (true, _) => Time::ZERO,
            (false, true) => self.published + PUBLISH_EVERY,
            (false, false) => Time::NEVER,
        }
    }

    pub(super) fn progress(&self) {
        self.slot.progress();
    }

    pub(super) fn publish(&mut self, snapshot: Snapshot) {
        let at = snapshot.at;
        let quiet = at.since(self.published) > Span(WAKE_AFTER.as_nanos() as u64);
        self.slot.publish(snapshot, self.is_asked || quiet);
        self.published = at;
        (self.is_changed, self.is_asked) = (false, false);
    }
}
