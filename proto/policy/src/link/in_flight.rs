//! The bytes of a port that are permitted and not completed.

use laxity_types::Level;

use crate::time::{Span, Time};

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

/// Maximum number of pieces in flight that exceed the window, each by itself. So many fill a port
/// of which a lone transfer gets a quarter.
const OVERSIZED_MAX: usize = 4;

/// Pieces in flight that exceed the window, each by itself: when each was permitted, and its bytes.
#[derive(Clone, Debug, Default)]
pub(super) struct Oversized(Vec<(Time, u64)>);

impl Oversized {
    pub(super) fn add(&mut self, now: Time, bytes: u64, window: u64) {
        if bytes > window {
            self.0.push((now, bytes));
        }
    }

    /// Ends a piece of which all bytes complete at once, as those of one work request do. A piece
    /// that completes in parts shrinks when more would be in flight otherwise than there is. Returns
    /// when the piece was permitted that completed at once.
    pub(super) fn remove(&mut self, bytes: u64, in_flight: u64, window: u64) -> Option<Time> {
        if self.0.is_empty() {
            return None;
        }
        let ended = self.0.iter().position(|&(_, size)| size == bytes);
        let permitted = ended.map(|at| self.0.remove(at).0);
        let mut excess = self.bytes().saturating_sub(in_flight);
        for (_, size) in &mut self.0 {
            let done = excess.min(*size);
            *size -= done;
            excess -= done;
        }
        self.0.retain(|&(_, size)| size > window);
        permitted
    }

    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().fold(0, |sum, &(_, bytes)| sum.saturating_add(bytes))
    }

    /// Returns when another piece may follow `n` such pieces on a port of this rate, or `None` if
    /// there are none, or as many as there may be.
    ///
    /// A piece that shares the port fairly with `n − 1` others has ended after `n` times its own
    /// time. If one has not, these pieces do not fill the port, or others use it. So one more keeps
    /// it busy. Sooner, more pieces would only share the port, and lose the order that they waited
    /// for.
    pub(super) fn next_at(&self, rate: u64) -> Option<Time> {
        let n = self.0.len();
        let ends =
            |&(begin, bytes): &(Time, u64)| begin + Span::transfer(bytes, rate).times(n as u64);
        if n < OVERSIZED_MAX { self.0.iter().map(ends).min() } else { None }
    }
}
