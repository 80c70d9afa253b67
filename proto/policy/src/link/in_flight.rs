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

/// Pieces in flight that exceed the window, each by itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Oversized {
    count: u32,
    /// Bytes of the largest one since there was none.
    largest: u64,
}

impl Oversized {
    pub(super) fn add(&mut self, bytes: u64, window: u64) {
        if bytes > window {
            self.count += 1;
            self.largest = self.largest.max(bytes);
        }
    }

    /// Ends a piece of which all bytes complete at once, as those of one work request do. A piece
    /// that completes in parts counts until what is in flight is within the window again.
    pub(super) fn remove(&mut self, bytes: u64, in_flight: u64, window: u64) {
        self.count = self.count.saturating_sub(u32::from(bytes > window));
        if in_flight <= window || self.count == 0 {
            *self = Self::default();
        }
    }

    /// Returns the size of the only such piece. A second may follow it, which hides the time
    /// between the end of one and the begin of the next. With more of them in flight, all would
    /// share the port, and lose the order that they waited for.
    pub(super) fn alone(&self) -> Option<u64> {
        (self.count == 1).then_some(self.largest)
    }
}
