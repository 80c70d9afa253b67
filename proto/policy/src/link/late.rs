//! Notes flows that are held up, in the port's state of late KV reuse (`link/late_reuse.rs`) and of
//! flows that collectives hold up (`link/held_up.rs`).

use laxity_types::{Layer, Level, Stage};

use super::Link;
use super::batch_table::NULL_BATCH;
use super::flows::SlotId;
use crate::rli::needed_soon;
use crate::time::Time;

impl Link {
    /// Updates [`Port::held_up`](super::port::Port::held_up) for a permit, and for credit.
    #[inline]
    pub(super) fn note_collective(&mut self, now: Time, stage: Stage) {
        let Some(highest) = self.port.held_up.highest() else { return };
        if stage != Stage::Collective {
            return;
        }
        let scavenged = self.by_level[Level::SCAVENGER.row()].flows;
        if self.by_stage[Stage::P2d.index()].flows > scavenged
            || self.port.in_flight.from(highest) > 0
        {
            let config = &self.port.config;
            self.port.held_up.measure(now, config.rate, config.window_bytes);
        } else {
            self.port.held_up.clear();
        }
    }

    /// Updates [`Port::held_up`](super::port::Port::held_up) for delivered bytes. Delivered bytes
    /// of flows that go by slack show that such flows have room.
    #[inline]
    pub(super) fn note_progress(&mut self, level: Level, bytes: u64) {
        let Some(highest) = self.port.held_up.highest() else { return };
        if self.collective_level.is_some_and(|collective| level <= collective) {
            self.port.held_up.delivered(bytes);
        } else if bytes > 0 && level >= highest && level != Level::SCAVENGER {
            self.port.held_up.clear();
        }
    }

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
        let held_up = self.port.in_flight.at_or_above(Level(collective.0 + 1)) > 0;
        if !known.is_announced() || !needed_soon(rli) || !held_up {
            return;
        }
        let layer_time = known.layer_time;
        let left = layer_time.times(u64::from(rli));
        self.port.late_reuse.note(now, now.since(self.drained), left, layer_time);
    }
}
