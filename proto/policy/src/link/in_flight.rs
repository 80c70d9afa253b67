//! The bytes of a port that are permitted and not completed.

use laxity_types::Level;

/// Bytes in flight by their level on the wire.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InFlight {
    pub(super) all: u64,
    by_level: [u64; Level::ROWS],
}

impl InFlight {
    pub(super) fn add(&mut self, level: Level, bytes: u64) {
        self.all = self.all.saturating_add(bytes);
        let row = &mut self.by_level[level.row()];
        *row = row.saturating_add(bytes);
    }

    pub(super) fn remove(&mut self, level: Level, bytes: u64) {
        self.all = self.all.saturating_sub(bytes);
        let row = &mut self.by_level[level.row()];
        *row = row.saturating_sub(bytes);
    }

    /// Returns the bytes that compete with a chunk of `level` in a fabric of strict priorities.
    pub(super) fn at_or_above(&self, level: Level) -> u64 {
        self.by_level[..=level.row()].iter().fold(0, |sum, &bytes| sum.saturating_add(bytes))
    }
}
