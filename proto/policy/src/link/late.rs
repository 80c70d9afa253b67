//! Notes KV reuse that is held up, in the port's state of late KV reuse (`link/late_reuse.rs`).

use laxity_types::{Layer, Level, Stage};

use super::Link;
use super::batch_table::NULL_BATCH;
use super::flows::SlotId;
use crate::rli::needed_soon;
use crate::time::Time;

impl Link {
    /// Updates [`Port::late_reuse`](super::port::Port::late_reuse) before a permit for a flow of
    /// `stage`, which `layer` of `batch` needs.
    pub(super) fn note_late_reuse(&mut self, now: Time, stage: Stage, batch: SlotId, layer: Layer) {
        let Some(collective) = self.collective_level else { return };
        if stage != Stage::KvReuse || batch == NULL_BATCH || now <= self.drained {
            return;
        }
        let known = self.port.batches.batch(batch);
        let rli = known.rli(layer);
        // Bytes below near KV reuse may be late, because they can wait.
        let held_up = self.in_flight.at_or_above(Level(collective.0 + 1)) > 0;
        if !known.is_announced() || !needed_soon(rli) || !held_up {
            return;
        }
        let layer_time = known.layer_time;
        let left = layer_time.times(u64::from(rli));
        self.port.late_reuse.note(now, now.since(self.drained), left, layer_time);
    }
}
