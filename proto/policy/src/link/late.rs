//! Notes flows that are held up, in the port's state of late KV reuse (`link/late_reuse.rs`) and of
//! P2D below collectives (`link/held_up.rs`).

use laxity_types::{Layer, Level, Stage};

use super::Link;
use super::batch_table::NULL_BATCH;
use super::flows::SlotId;
use crate::rli::needed_soon;
use crate::time::Time;

impl Link {
    /// Reports whether a permit for a flow of `stage` can show that flows are held up.
    #[inline]
    pub(super) fn shows_delay(&self, stage: Stage) -> bool {
        match (stage, self.collective_level) {
            (Stage::KvReuse, Some(_)) => true,
            (Stage::Collective, Some(collective)) => {
                self.by_stage[Stage::P2d.index()].flows > 0
                    || self.in_flight.below(Level(collective.0 + 1)) > 0
            }
            _ => false,
        }
    }

    /// Updates what the port remembers of flows that are held up, before a permit for `bytes` of a
    /// flow of `stage`, which `layer` of `batch` needs.
    pub(super) fn note_delay(
        &mut self,
        now: Time,
        stage: Stage,
        (batch, layer): (SlotId, Layer),
        bytes: u64,
    ) {
        if batch == NULL_BATCH || !self.port.batches.batch(batch).is_announced() {
            return;
        }
        if stage == Stage::Collective {
            let layer_time = self.port.batches.batch(batch).layer_time;
            self.port.held_up.note(now, bytes, self.port.config.rate, layer_time);
        } else {
            self.note_late_reuse(now, batch, layer);
        }
    }

    /// Notes delivered bytes. Those below near KV reuse show that collectives leave room.
    #[inline]
    pub(super) fn note_progress(&mut self, level: Level) {
        let near = |collective: Level| Level(collective.0 + 1);
        if level != Level::SCAVENGER && self.collective_level.is_some_and(|it| level > near(it)) {
            self.port.held_up.clear();
        }
    }

    fn note_late_reuse(&mut self, now: Time, batch: SlotId, layer: Layer) {
        let Some(collective) = self.collective_level else { return };
        if now <= self.drained {
            return;
        }
        let known = self.port.batches.batch(batch);
        let rli = known.rli(layer);
        // Bytes below near KV reuse may be late, because they can wait.
        let held_up = self.in_flight.at_or_above(Level(collective.0 + 1)) > 0;
        if !needed_soon(rli) || !held_up {
            return;
        }
        let layer_time = known.layer_time;
        let left = layer_time.times(u64::from(rli));
        self.port.late_reuse.note(now, now.since(self.drained), left, layer_time);
    }
}
