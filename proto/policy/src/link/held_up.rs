//! Notices that collectives leave no room for what goes below them.
//!
//! Not in the paper, whose collectives are all-to-alls: between two of them the port pauses, and
//! P2D leaves. A ring that exchanges KV beside attention fills the port for as long as a batch
//! computes, although it has slack itself. P2D of the batch before waits below it for all that
//! time. Laxity raises its level too late, because a message keeps the level of its first permit,
//! when most of its slack was left.
//!
//! So the port measures how much of it collectives get while flows that go by slack are pending:
//! some P2D waits, or bytes of such a level are in flight. A measurement takes a layer time, or the
//! time of [`WINDOWS`] windows if that is longer. It begins anew when bytes of such a level are
//! delivered. If it comes to its end,
//!
//! ```text
//! held up  ⇔  S / B > MOSTLY_PERCENT / 100 · (now − since)        [ns]
//!             S = bytes at the level of collectives or above that were delivered since then
//!             B = the port's rate
//! ```
//!
//! Permitted bytes would not do: a window of them can be permitted at once and leave later, in the
//! time of many layers on a slow port. Completions can be reported late, by a window at most.
//!
//! P2D with a deadline then *shares* the level of collectives for [`MEMORY_LAYERS`] layer times. A
//! fabric that shares a level fairly makes the ring longer by the bytes of P2D, and P2D arrives in
//! time. docs/notes/never-below.md has the measurements.

use laxity_types::Level;

use crate::time::{Span, Time};

/// Part of the port that collectives have if they leave no room, per cent. All-to-alls have less in
/// any layer time, because they pause.
const MOSTLY_PERCENT: u64 = 90;

/// Windows that a measurement takes at least. So completions that were reported late can make a
/// quarter of it at most.
const WINDOWS: u64 = 4;

/// Layer times for which the port remembers that collectives left no room: some hundred batches.
const MEMORY_LAYERS: u64 = 16_384;

/// Bound on that memory, whatever layer time a hint names.
const MEMORY_MAX: Span = Span::from_millis(60_000);

/// What a port remembers of flows that collectives held up.
#[derive(Debug, Default)]
pub(crate) struct HeldUp {
    /// The highest level of flows that go by slack, or `None` if the policy does not use this.
    highest: Option<Level>,
    /// The layer time of the batch whose layer began last, zero if no batch is known.
    layer_time: Span,
    /// When the present measurement began, and the bytes of collectives delivered since then.
    measured: Option<(Time, u64)>,
    /// Until when P2D shares the level of collectives.
    until: Time,
}

impl HeldUp {
    pub(super) fn new(highest: Option<Level>) -> Self {
        Self { highest, ..Self::default() }
    }

    /// Returns the highest level of flows that go by slack, if these can be held up.
    pub(super) fn highest(&self) -> Option<Level> {
        self.highest
    }

    /// Reports whether P2D with a deadline has the level of collectives.
    pub(crate) fn shares(&self, now: Time) -> bool {
        now < self.until
    }

    pub(super) fn layer_began(&mut self, layer_time: Span) {
        self.layer_time = layer_time;
    }

    /// Ends the measurement, because flows that go by slack have room, or none is pending.
    pub(super) fn clear(&mut self) {
        self.measured = None;
    }

    /// Notes delivered bytes of a collective.
    pub(super) fn delivered(&mut self, bytes: u64) {
        if let Some((_, sent)) = &mut self.measured {
            *sent = sent.saturating_add(bytes);
        }
    }

    /// Begins or ends a measurement when a collective gets a permit while flows that go by slack
    /// are pending, on a port of `rate` bytes/s and this window.
    pub(super) fn measure(&mut self, now: Time, rate: u64, window_bytes: u64) {
        if let Some((since, sent)) = self.measured {
            let held = now.since(since);
            if held <= self.layer_time.max(Span::transfer(window_bytes, rate).times(WINDOWS)) {
                return;
            }
            let mostly = Span(held.0 / 100 * MOSTLY_PERCENT);
            if self.layer_time > Span::ZERO && Span::transfer(sent, rate) > mostly {
                let memory = self.layer_time.times(MEMORY_LAYERS).min(MEMORY_MAX);
                self.until = self.until.max(now + memory);
            }
        }
        self.measured = Some((now, 0));
    }
}
