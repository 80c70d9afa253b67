//! The clock of the engine. It is CLOCK_MONOTONIC because laxityd's deadlines use that clock.

use laxity_requests::Time;

pub fn now() -> Time {
    // CLOCK_MONOTONIC exists on every system that Laxity supports. Deadlines need it.
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
        .expect("CLOCK_MONOTONIC exists");
    Time(time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}
