//! The times of the checks for silent clients and overdue flows.

use laxity_policy::{Span, Time};

use super::on_wire::LOOK_EVERY;

/// The time between checks for overdue flows.
const WRITE_OFF_EVERY: Span = Span::from_millis(10);

/// The times of the last check for silent clients and of the last warning about one.
#[derive(Debug)]
pub(super) struct SilenceWatch {
    pub(super) looked: Time,
    pub(super) warned: Time,
}

impl SilenceWatch {
    /// Returns when the next check is due, if anything waits.
    pub(super) fn due(&self) -> Time {
        self.looked + LOOK_EVERY
    }
}

/// The time and the place of the next check for overdue flows.
#[derive(Debug)]
pub(super) struct OverdueWatch {
    looked: Time,
    pub(super) at: (u32, u16),
}

impl OverdueWatch {
    pub(super) const fn new(now: Time) -> Self {
        Self { looked: now, at: (0, 0) }
    }

    /// Reports whether a check is due, and if so, schedules the next one.
    pub(super) fn take_due(&mut self, now: Time) -> bool {
        let is_due = now.since(self.looked) >= WRITE_OFF_EVERY;
        if is_due {
            self.looked = now;
        }
        is_due
    }
}
