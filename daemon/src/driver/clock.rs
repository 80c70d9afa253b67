//! Where the scheduler reads time. A test may give it virtual time.

use std::time::Duration;

use laxity_policy::Time;
use laxity_shm::sleep::now_ns;

/// The clocks of a scheduler. It reads them once or a few times in a turn.
#[derive(Clone, Copy, Debug)]
pub struct SchedulerClock {
    /// Returns the time in nanoseconds, which never goes back.
    pub now_ns: fn() -> u64,
    /// Returns the processor time of the scheduler's thread.
    pub processor_time: fn() -> Time,
}

impl SchedulerClock {
    /// CLOCK_MONOTONIC, and the processor time of the calling thread.
    pub const SYSTEM: Self = Self { now_ns, processor_time };

    #[inline]
    pub(super) fn now(self) -> Time {
        Time((self.now_ns)())
    }
}

/// Returns the processor time of this thread. Time while it was preempted does not count.
fn processor_time() -> Time {
    let clock = nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID;
    let used = nix::time::clock_gettime(clock).map_or(Duration::ZERO, Duration::from);
    Time(used.as_nanos() as u64)
}
