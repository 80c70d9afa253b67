//! Notices that collectives leave no room for what goes below them.
//!
//! Not in the paper, whose collectives are all-to-alls: between two of them the port pauses, and
//! P2D leaves. A ring that exchanges KV beside attention fills the port for as long as a batch
//! computes, although it has slack itself. P2D of the batch before waits below it for all that
//! time. Laxity raises its level too late, because a message keeps the level of its first permit,
//! when most of its slack was left.
//!
//! Flows are *held up* if, for longer than a layer time, some P2D waits or is in flight below near
//! KV reuse, no byte of that is delivered, and nearly all that the port sent was collectives:
//!
//! ```text
//! held up  ⇔   now − since > layer time   and   S / B > MOSTLY_PERCENT / 100 · (now − since)
//!              S = bytes of collectives permitted since then, B = the port's rate   [bytes, bytes/ns]
//! ```
//!
//! From then on P2D with a deadline *shares* the level of collectives, until none was held up for
//! [`MEMORY_LAYERS`] layer times. A fabric that shares a level fairly then makes the ring longer by
//! the bytes of P2D, and P2D arrives in time. docs/notes/never-below.md has the measurements.

use crate::time::{Span, Time};

/// Part of the port that collectives have if they leave no room, per cent. With all-to-alls they
/// have less in any layer time in which P2D is pending, because they pause.
const MOSTLY_PERCENT: u64 = 90;

/// Layer times for which the port remembers that collectives left no room: some hundred batches.
const MEMORY_LAYERS: u64 = 16_384;

/// What a port remembers of flows that collectives held up.
#[derive(Debug, Default)]
pub(crate) struct HeldUp {
    /// Since when flows below were pending and none of their bytes was delivered.
    since: Option<Time>,
    /// Bytes of collectives that were permitted since then.
    bytes: u64,
    /// Until when P2D shares the level of collectives.
    until: Time,
}

impl HeldUp {
    /// Reports whether P2D with a deadline has the level of collectives.
    pub(crate) fn shares(&self, now: Time) -> bool {
        now < self.until
    }

    /// Notes that bytes below collectives were delivered, or that none are pending.
    pub(super) fn clear(&mut self) {
        self.since = None;
    }

    /// Notes a permit for `bytes` of a collective while flows below it are pending.
    pub(super) fn note(&mut self, now: Time, bytes: u64, rate: u64, layer_time: Span) {
        let Some(since) = self.since else {
            (self.since, self.bytes) = (Some(now), 0);
            return;
        };
        self.bytes = self.bytes.saturating_add(bytes);
        let held = now.since(since);
        let busy = Span::transfer(self.bytes, rate);
        if held > layer_time && busy > Span(held.0 / 100 * MOSTLY_PERCENT) {
            self.until = self.until.max(now + layer_time.times(MEMORY_LAYERS));
        }
    }
}
