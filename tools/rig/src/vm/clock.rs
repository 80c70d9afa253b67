//! Steps of the guest's clock. Only a machine that runs nothing else may have them.

use std::time::Duration;

use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime, clock_settime};

use crate::error::LabError;

/// Steps of the clock: NTP's, an hour of a wrong time zone, and a battery that was empty.
const STEPS_S: [i64; 6] = [1, -1, 3600, -3600, 86_400 * 400, -86_400 * 400];

/// Sets `CLOCK_REALTIME` to another time. Returns the seconds by which it was moved.
pub(crate) fn set(choice: u64) -> Result<i64, LabError> {
    let step_s = STEPS_S[(choice % STEPS_S.len() as u64) as usize];
    advance(step_s).map(|()| step_s)
}

/// Moves `CLOCK_REALTIME` forward or back.
pub(crate) fn advance(step_s: i64) -> Result<(), LabError> {
    let step = Duration::from_secs(step_s.unsigned_abs());
    let step = TimeSpec::from(step);
    clock_gettime(ClockId::CLOCK_REALTIME)
        .map(|now| if step_s < 0 { now - step } else { now + step })
        .and_then(|then| clock_settime(ClockId::CLOCK_REALTIME, then))
        .map_err(LabError::system("setting the clock"))
}
