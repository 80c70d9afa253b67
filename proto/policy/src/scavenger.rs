//! The class below all levels: its flows, and its guaranteed share of the port.
//!
//! Implements MFS App. B step 3 (soft enforcement: pruned work is demoted, never dropped, and
//! served when the port is idle) and architecture §4.3.
//!
//! Departure: the paper serves the scavenger "only when the network is detected to be idle", so a
//! port that is never idle would starve it for ever. Here the scavenger has a small guaranteed
//! share `p` of the port. While it waits, every byte of the levels earns it `p` credits and every
//! byte of its own costs `1 − p`, so its long-run share is exactly `p`. Small pieces of other flows
//! can fill the window after each completion, so that a due chunk never fits. After
//! [`INSISTS_CHUNKS`] chunks of others the due chunk is sent anyway, beyond the window.

use laxity_types::{Deadline, Stage};

use crate::event::FlowSpec;
use crate::link::flows::{NONE, SlotId};
use crate::link::port::Port;

/// Reports whether a flow belongs in the scavenger regardless of its urgency. These flows do:
///
/// * flows that no request waits for, such as weights and background;
/// * the last stage of a pruned or lost request;
/// * KV reuse of a pruned request whose batch has not started. In a running batch it stays, because
///   the whole batch waits for it.
pub(crate) fn claims(port: &Port, spec: &FlowSpec, batch: SlotId, request: SlotId) -> bool {
    match spec.stage {
        Stage::KvReuse => port.is_pruned(spec.request) && !port.batches.batch(batch).may_run(),
        stage => match stage.deadline() {
            Deadline::Implicit => false,
            Deadline::Explicit => {
                let lost = request != NONE && port.batches.request(request).lost;
                lost || port.is_pruned(spec.request)
            }
            Deadline::None => true,
        },
    }
}

/// Chunks of others during which a due piece does not fit, before it may exceed the window.
const INSISTS_CHUNKS: u64 = 4;

/// Credit of the scavenger, or of starved flows, in thousandths of bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guarantee {
    permille: u64,
    credit: u64,
    credit_max: u64,
    /// The cost of a piece larger than a chunk beyond the available credit. It must be earned
    /// before any credit is.
    debt: u64,
    /// Credit that was earned above `credit_max` since the last piece.
    missed: u64,
}

impl Guarantee {
    pub(crate) fn new(permille: u16, chunk_bytes: u64) -> Self {
        Self {
            permille: u64::from(permille),
            credit: 0,
            // Enough for one chunk: the guarantee is a rate, not a right to a burst later.
            credit_max: chunk_bytes.saturating_mul(1000),
            debt: 0,
            missed: 0,
        }
    }

    /// Earns credit for `bytes` that the levels sent while guaranteed work waited.
    pub(crate) fn earn(&mut self, bytes: u64) {
        let earned = bytes.saturating_mul(self.permille);
        let paid = earned.min(self.debt);
        self.debt -= paid;
        let credit = self.credit.saturating_add(earned - paid);
        self.credit = credit.min(self.credit_max);
        self.missed = self.missed.saturating_add(credit - self.credit);
    }

    /// Spends credit for `bytes` of guaranteed work, sent by its share or on an idle port.
    pub(crate) fn spend(&mut self, bytes: u64) {
        let price = self.price(bytes);
        if self.covers(bytes) {
            self.debt = price.saturating_sub(self.credit);
        }
        self.credit = self.credit.saturating_sub(price);
        self.missed = 0;
    }

    /// Reports whether guaranteed work was due for so long that it may exceed the window.
    pub(crate) fn insists(&self) -> bool {
        let earned = self.chunk_bytes().saturating_mul(self.permille);
        self.permille > 0 && self.missed >= earned.saturating_mul(INSISTS_CHUNKS)
    }

    /// Reports whether guaranteed work may send `bytes` before the levels. A piece larger than a
    /// chunk needs credit for one chunk, and the remaining cost becomes debt.
    pub(crate) fn covers(&self, bytes: u64) -> bool {
        let price = self.price(bytes).min(self.price(self.chunk_bytes()));
        self.permille > 0 && self.debt == 0 && self.credit >= price
    }

    fn chunk_bytes(&self) -> u64 {
        self.credit_max / 1000
    }

    fn price(&self, bytes: u64) -> u64 {
        bytes.saturating_mul(1000 - self.permille)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the scavenger's share of a port on which both sides always have work.
    fn share(permille: u16, piece: u64) -> f64 {
        let mut guarantee = Guarantee::new(permille, 100);
        let (mut levels, mut scavenged) = (0u64, 0u64);
        for _ in 0..100_000 {
            if guarantee.covers(piece) {
                guarantee.spend(piece);
                scavenged += piece;
            } else {
                guarantee.earn(100);
                levels += 100;
            }
        }
        scavenged as f64 / (scavenged + levels) as f64
    }

    #[test]
    fn the_share_under_permanent_load_is_what_was_configured() {
        for permille in [0, 1, 10, 250, 500, 900, 1000] {
            // A piece as large as a chunk, and a larger one that cannot be cut.
            for piece in [100, 1_700] {
                let got = share(permille, piece);
                assert!(
                    (got - f64::from(permille) / 1000.0).abs() < 0.001,
                    "{permille} {piece}: {got}"
                );
            }
        }
    }
}
