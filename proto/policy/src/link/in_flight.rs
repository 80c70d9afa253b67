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

/// The most pieces in flight that exceed the window, each by itself. The second hides the time
/// between the end of one and the begin of the next. With more, all of them would share the port,
/// and lose the order that they waited for.
const OVERSIZED_MAX: u32 = 2;

/// Pieces in flight that exceed the window, each by itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Oversized {
    count: u32,
    bytes: u64,
}

impl Oversized {
    pub(super) fn add(&mut self, bytes: u64, window: u64) {
        if bytes > window {
            self.count += 1;
            self.bytes = self.bytes.saturating_add(bytes);
        }
    }

    /// Ends a piece of which all bytes complete at once, as those of one work request do. A piece
    /// that completes in parts counts until what is in flight is within the window again.
    pub(super) fn remove(&mut self, bytes: u64, in_flight: u64, window: u64) {
        if bytes > window {
            self.count = self.count.saturating_sub(1);
            self.bytes = self.bytes.saturating_sub(bytes);
        }
        if in_flight <= window || self.count == 0 {
            *self = Self::default();
        }
    }

    /// Returns the bytes of these pieces, if one more may follow them.
    pub(super) fn followed(&self) -> Option<u64> {
        (1..OVERSIZED_MAX).contains(&self.count).then_some(self.bytes)
    }
}
