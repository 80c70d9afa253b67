//! The time of a virtual world, which the thread of the world sets.

use std::cell::Cell;

use laxity_daemon::driver::SchedulerClock;
use laxity_policy::Time;
use laxity_shm::sleep::Clock;

/// The time at which each world begins, in nanoseconds.
const BEGIN_NS: u64 = 1 << 40;
/// How far the clock of a process in another time namespace is ahead.
const AHEAD_NS: u64 = 1_000_000_000_000;
/// What a decision about batches takes, by the processor time of the scheduler.
const DECISION_NS: u64 = 20_000;

thread_local! {
    static NOW_NS: Cell<u64> = const { Cell::new(BEGIN_NS) };
    static USED_NS: Cell<u64> = const { Cell::new(0) };
}

/// Sets the time back to the beginning of a world.
pub(super) fn begin() -> u64 {
    USED_NS.set(0);
    set(BEGIN_NS);
    BEGIN_NS
}

pub(super) fn set(now_ns: u64) {
    NOW_NS.set(now_ns);
}

fn now_ns() -> u64 {
    NOW_NS.get()
}

fn ahead_ns() -> u64 {
    now_ns() + AHEAD_NS
}

fn processor_time() -> Time {
    USED_NS.set(USED_NS.get() + DECISION_NS);
    Time(USED_NS.get())
}

/// The clocks of processes: that of the host, and that of another time namespace.
pub(super) const OF_PROCESSES: [Clock; 2] =
    [Clock { now_ns, lately_ns: now_ns }, Clock { now_ns: ahead_ns, lately_ns: ahead_ns }];

pub(super) const OF_SCHEDULER: SchedulerClock = SchedulerClock { now_ns, processor_time };
