//! The clock: CLOCK_MONOTONIC, as laxityd's deadlines have it.

use laxity_requests::Time;

/// Now.
#[must_use]
pub fn now() -> Time {
    // It exists on every system that this runs on; without it no deadline would mean anything.
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
        .expect("CLOCK_MONOTONIC exists");
    Time(time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}
