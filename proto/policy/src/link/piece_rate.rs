//! The rate that pieces larger than the window reach, from their permits to their ends.
//!
//! Not in the paper, whose flows can be cut. Such a piece does not get the port's rate: it begins
//! some time after its permit, busy processors or small socket buffers can bound it, and others
//! share the port. A deadline that is feasible at the port's rate is then missed, and the piece
//! takes the port from one that could have been in time. The port has no view of the reasons, but
//! it sees each piece end:
//!
//! ```text
//! r ← r + (S / (end − permit) − r) / 8        [bytes/s], r = B at first, B = the port's rate
//! ```
//!
//! It is a mean and no maximum. A maximum approaches what a *lone* piece reaches, and pieces are
//! seldom alone where deadlines matter. docs/notes/whole-transfers.md has both.

use laxity_types::Level;

use crate::time::Span;

/// The weight of one piece in the mean is `1 / WEIGHT`.
const WEIGHT: u64 = 8;

/// Mean rate of the pieces that exceeded the window.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PieceRate(Option<u64>);

impl PieceRate {
    /// Returns the mean in bytes per second, at most the port's rate. Without any piece it is the
    /// port's rate.
    pub(crate) fn on(self, port_rate: u64) -> u64 {
        self.0.map_or(port_rate, |mean| mean.min(port_rate))
    }

    /// Adds a piece that was delivered at this level.
    ///
    /// A scavenged piece may be slow because of its traffic class, so it counts only if it was
    /// faster than the mean. It must not be left out: if all pieces are scavenged because the mean
    /// is too low, nothing else corrects the mean.
    pub(super) fn add(&mut self, level: Level, bytes: u64, took: Span, port_rate: u64) {
        let per_second = u128::from(bytes) * 1_000_000_000 / u128::from(took.0.max(1));
        let rate = u64::try_from(per_second).map_or(port_rate, |rate| rate.clamp(1, port_rate));
        let mean = self.on(port_rate);
        if level != Level::SCAVENGER || rate > mean {
            self.0 = Some(mean - mean / WEIGHT + rate / WEIGHT);
        }
    }
}
