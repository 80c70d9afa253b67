//! When the scheduler looks for silent clients, and for overdue flows.

use laxity_policy::{Span, Time};

use super::on_wire::LOOK_EVERY;

/// Time between looks for completions that never came.
const WRITE_OFF_EVERY: Span = Span::from_millis(10);

/// When silent clients were looked for last, and when one was warned of.
#[derive(Debug)]
pub(super) struct SilenceWatch {
    pub(super) looked: Time,
    pub(super) warned: Time,
}

impl SilenceWatch {
    pub(super) const fn new(now: Time) -> Self {
        Self {
            looked: now,
            warned: Time::ZERO,
        }
    }

    /// When to look next, if anything waits.
    pub(super) fn due(&self) -> Time {
        self.looked + LOOK_EVERY
    }
}

/// When and where the next look for overdue flows begins.
#[derive(Debug)]
pub(super) struct OverdueWatch {
    looked: Time,
    /// Client and lane.
    pub(super) at: (u32, u16),
}

impl OverdueWatch {
    pub(super) const fn new(now: Time) -> Self {
        Self {
            looked: now,
            at: (0, 0),
        }
    }

    /// Whether a look is due; then the next one is due later.
    pub(super) fn take_due(&mut self, now: Time) -> bool {
        let is_due = now.since(self.looked) >= WRITE_OFF_EVERY;
        if is_due {
            self.looked = now;
        }
        is_due
    }
}
