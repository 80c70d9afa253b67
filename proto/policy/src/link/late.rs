//! Notices that KV reuse is held up outside this port.
//!
//! Not in the paper, which has no network beyond the ports. A port that reads blocks sees its own
//! flows only. At the unit that stores the blocks they leave beside that unit's collectives, and
//! the fabric serves those first. Between all-to-alls there is room for the blocks. A ring that
//! exchanges KV beside attention leaves none, so blocks below it arrive when the ring pauses.
//!
//! The port has no view of the other end, but it knows how fast it sends. If nothing held the
//! permitted bytes up, all of them would have left by `Link::drained`. What is in flight later is
//! held up elsewhere:
//!
//! ```text
//! late   ⇔   now − drained > RLI · layer time / LATE_SHARE          [ns]
//! ```
//!
//! where the right side is a share of the time that is left until the flow's layer needs it. A
//! message keeps its class for life, so this helps later KV reuse only. The port therefore stays on
//! its guard for [`GUARD_LAYERS`] layer times. docs/notes/never-below.md has the measurements.

use laxity_types::{Layer, Level, Stage};

use super::Link;
use super::batch_table::NULL_BATCH;
use super::flows::SlotId;
use crate::laxity::needed_soon;
use crate::time::{Span, Time};

/// The share of the time until its layer, one over this, from which KV reuse is late.
const LATE_SHARE: u64 = 4;

/// Layer times for which the port remembers that KV reuse was late: a batch or two. Detection takes
/// a few layers, in which blocks arrive late again.
const GUARD_LAYERS: u64 = 64;

impl Link {
    /// Updates [`Port::reuse_late_until`](super::port::Port::reuse_late_until) before a permit for
    /// a flow of `stage`, which `layer` of `batch` needs.
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
        if now.since(self.drained) > Span(left.0 / LATE_SHARE) {
            self.port.reuse_late_until = now + layer_time.times(GUARD_LAYERS);
        }
    }
}
