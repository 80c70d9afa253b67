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
    #[inline]
    pub(super) fn add(&mut self, level: Level, bytes: u64) {
        self.all = self.all.saturating_add(bytes);
        let row = &mut self.by_level[level.row()];
        *row = row.saturating_add(bytes);
    }

    #[inline]
    pub(super) fn remove(&mut self, level: Level, bytes: u64) {
        self.all = self.all.saturating_sub(bytes);
        let row = &mut self.by_level[level.row()];
        *row = row.saturating_sub(bytes);
    }

    /// Returns the bytes at `level` and below that are not scavenged.
    #[inline]
    pub(super) fn from(&self, level: Level) -> u64 {
        let rows = &self.by_level[level.row()..Level::SCAVENGER.row()];
        rows.iter().fold(0, |sum, &bytes| sum.saturating_add(bytes))
    }

    /// Returns the bytes that compete with a chunk of `level` in a fabric of strict priorities.
    pub(super) fn at_or_above(&self, level: Level) -> u64 {
        self.by_level[..=level.row()].iter().fold(0, |sum, &bytes| sum.saturating_add(bytes))
    }
}

/// Maximum number of pieces in flight that exceed the window, each by itself. If one transfer alone
/// reaches a quarter of the port's rate, four of them fill the port.
const OVERSIZED_MAX: usize = 4;

/// A scavenged piece gets its permit only if fewer than this are in flight. In the network, a piece
/// without a mark takes as much of the port as any other, and a flow that can be in time may arrive
/// before it ends. Two fill the port if each alone reaches half of its rate.
const SCAVENGED_MAX: usize = 2;

#[derive(Clone, Copy, Debug)]
struct LargePiece {
    permitted: Time,
    level: Level,
    bytes: u64,
}

/// Pieces in flight that exceed a bound, each by itself: that of the port or of one peer.
#[derive(Clone, Debug, Default)]
pub(super) struct Oversized {
    pieces: Vec<LargePiece>,
    pub(super) bytes: InFlight,
}

impl Oversized {
    #[inline]
    pub(super) fn add(&mut self, now: Time, level: Level, bytes: u64, bound: u64) {
        if bytes > bound {
            self.pieces.push(LargePiece { permitted: now, level, bytes });
            self.bytes.add(level, bytes);
        }
    }

    /// Accounts for `bytes` that completed, after which `in_flight` are left. A piece of exactly
    /// `bytes` completed at once, as a work request does, and is removed. If the pieces together
    /// still have more than `in_flight`, some completed in parts, and the oldest shrink. Returns
    /// when the removed piece was permitted, or `None` if no piece had this size.
    #[inline]
    pub(super) fn remove(&mut self, bytes: u64, in_flight: u64, bound: u64) -> Option<Time> {
        if self.pieces.is_empty() { None } else { self.shrink(bytes, in_flight, bound) }
    }

    #[cold]
    fn shrink(&mut self, bytes: u64, in_flight: u64, bound: u64) -> Option<Time> {
        let ended = self.pieces.iter().position(|piece| piece.bytes == bytes);
        let permitted = ended.map(|at| self.pieces.remove(at).permitted);
        let sum = |pieces: &[LargePiece]| {
            pieces.iter().fold(InFlight::default(), |mut sum, piece| {
                sum.add(piece.level, piece.bytes);
                sum
            })
        };
        let mut excess = sum(&self.pieces).all.saturating_sub(in_flight);
        for piece in &mut self.pieces {
            let done = excess.min(piece.bytes);
            piece.bytes -= done;
            excess -= done;
        }
        self.pieces.retain(|piece| piece.bytes > bound);
        self.bytes = sum(&self.pieces);
        permitted
    }

    /// Returns when another piece, `scavenged` or not, may follow `n` such pieces on a port of this
    /// rate. Returns `None` if there are none, or as many as there may be.
    ///
    /// A piece that shares the port fairly with `n − 1` others ends after `n` times the time that
    /// it takes alone. If a piece has not ended by then, the pieces do not fill the port, or other
    /// traffic uses it, so the next piece may start. If it started earlier, it would only share the
    /// port with the others, and the policy's order would be lost.
    pub(super) fn next_at(&self, rate: u64, scavenged: bool) -> Option<Time> {
        let n = self.pieces.len();
        let max = if scavenged { SCAVENGED_MAX } else { OVERSIZED_MAX };
        let ends = |piece: &LargePiece| {
            piece.permitted + Span::transfer(piece.bytes, rate).times(n as u64)
        };
        if n < max { self.pieces.iter().map(ends).min() } else { None }
    }
}
