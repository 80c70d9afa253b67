//! Notices that KV reuse is held up outside this port.
//!
//! Not in the paper, which has no network beyond the ports. A port that reads blocks sees its own
//! flows only. At the unit that stores the blocks they leave beside that unit's collectives, and
//! the fabric serves those first. Between all-to-alls there is room for the blocks. A ring that
//! exchanges KV beside attention leaves none, so blocks below it arrive when the ring pauses.
//!
//! The port has no view of the other end, but it knows how fast it sends. If nothing held the
//! permitted bytes up, all of them would have left by the instant `Link::drained`. What is in
//! flight later is held up elsewhere:
//!
//! ```text
//! late        ⇔   now − drained > RLI · layer time / LATE_SHARE          [ns]
//! very late   ⇔   now − drained > RLI · layer time / VERY_LATE_SHARE
//! ```
//!
//! where the right side is a share of the time that is left until the flow's layer needs it. A
//! message keeps its class for life, so a higher level helps later KV reuse only. There are two
//! steps:
//!
//! 1. from the first late message, KV reuse *shares* the level of collectives, until none was late
//!    for [`GUARD_LAYERS`] layer times;
//! 2. if KV reuse is very late although it has shared that level for [`NEAR_LAYERS`] layer times,
//!    it *leads*: it goes above collectives, until none was very late for [`LEAD_LAYERS`] layer
//!    times. After `NEAR_LAYERS` all that is needed soon was permitted at the shared level, so
//!    sharing is not enough. Beside the 31 flows of an all-to-all a block gets a 32nd of the port,
//!    and all ranks of its unit wait for it.
//!
//! docs/notes/never-below.md has the measurements.

use crate::rli::NEAR_LAYERS;
use crate::time::{Span, Time};

/// KV reuse is late after 1/`LATE_SHARE` of the time until its layer.
const LATE_SHARE: u64 = 4;

/// KV reuse is very late after 1/`VERY_LATE_SHARE` of the time until its layer. With a quarter,
/// readers of one busy unit, which delay each other, would delay its collectives.
const VERY_LATE_SHARE: u64 = 2;

/// Layer times for which the port remembers that KV reuse was late: a batch or two. Detection takes
/// a few layers, in which blocks arrive late again.
const GUARD_LAYERS: u64 = 64;

/// Layer times for which the port remembers that sharing a level was not enough: about a hundred
/// batches. When this is forgotten, a queue builds up before it is noticed again.
const LEAD_LAYERS: u64 = 4096;

/// What a port remembers of late KV reuse.
#[derive(Debug, Default)]
pub(crate) struct LateReuse {
    /// When KV reuse began to share the level of collectives.
    since: Time,
    /// Until when KV reuse shares the level of collectives.
    until: Time,
    /// Until when KV reuse is above collectives.
    leads_until: Time,
}

impl LateReuse {
    /// Reports whether KV reuse that is needed soon has the level of collectives.
    pub(crate) fn shares(&self, now: Time) -> bool {
        now < self.until
    }

    /// Reports whether KV reuse that is needed soon goes above collectives.
    pub(crate) fn leads(&self, now: Time) -> bool {
        now < self.leads_until
    }

    /// Updates the state for bytes that should have left `delay` ago, when their layer was `left`
    /// away.
    pub(super) fn note(&mut self, now: Time, delay: Span, left: Span, layer_time: Span) {
        if delay <= Span(left.0 / LATE_SHARE) {
            return;
        }
        if !self.shares(now) {
            self.since = now;
        }
        self.until = self.until.max(now + layer_time.times(GUARD_LAYERS));
        let has_shared = now.since(self.since) >= layer_time.times(u64::from(NEAR_LAYERS));
        if (has_shared || self.leads(now)) && delay > Span(left.0 / VERY_LATE_SHARE) {
            self.leads_until = self.leads_until.max(now + layer_time.times(LEAD_LAYERS));
        }
    }
}
