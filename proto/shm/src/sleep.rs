//! How either side sleeps without missing a wake-up, and without a cost to the side that is awake.
//!
//! # The shape of both protocols
//! The awake side stores something and then loads whether the other side sleeps. The sleeping side
//! stores that it sleeps and then loads whether something was stored. At least one side must see
//! the other's store, and only a full barrier between store and load on *both* sides guarantees
//! that. A barrier on the awake side would raise the cost of a submit from 5 to 72 ns, so it is
//! moved to the sleeper: `membarrier(GLOBAL_EXPEDITED)` makes every running thread of every
//! registered process execute one. Each process registers once ([`register`]).
//!
//! ## A client sleeps on a permit
//! ```text
//! client                                     daemon
//! w = wakes                      (Acquire)   slot.state = permit          (Release)
//! awaited = (turn, slot or any)  (Relaxed)   light fence
//! heavy fence                                a = awaited                  (Relaxed)
//! look at the slot again: permit? no         if a matches and a ≠ last one woken:
//! futex_wait(wakes, w, slice)                    wakes += 1 (Release); futex_wake
//! awaited = 0
//! ```
//! *No wake-up is lost*: either the client's second look sees the permit, or the daemon's load sees
//! `awaited`. Then `wakes` changes, and a later `futex_wait` returns at once. *The waker clears no
//! flag*: a flag that the waker cleared lost wake-ups (10 runs of 36 hung), because clearing the
//! flag of an old sleep can hit that of the next. Only the waiter writes `awaited`, and each sleep
//! has its own `turn`. So the daemon can store the word that it answered and skip a second wake-up.
//! A wake-up for an older permit can reach a new turn too early. That costs one idle turn: the
//! client finds no permit and sleeps again under a *new* turn.
//!
//! ## The daemon sleeps on records
//! ```text
//! client                                     daemon
//! slot.state = published(seq)   (Release)    attention |= SLEEPING in every region
//! light fence                                heavy fence, once
//! a = attention                 (Relaxed)    poll every lane again: record? no
//! if a has SLEEPING: write the eventfd       epoll_wait(eventfds, ...)
//!                                            attention &= !SLEEPING
//! ```
//! The eventfd counts, so a write between the daemon's last look and its `epoll_wait` is not lost.
//! Every submit writes the eventfd while the flag is set. The daemon clears the flag when it wakes.
//!
//! ## Where `membarrier` is refused
//! If the *awake* side could not register, it executes a real fence instead (a client does so when
//! [`crate::layout::attention::FENCE`] is set). If the *sleeper's* call fails, the limit of its
//! sleep bounds the delay: clients sleep in slices anyway.

use crate::layout::WaiterLine;
use crate::sync::Ordering;

/// The event that a sleeping client waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// A permit in this slot.
    Slot(u16),
    /// A permit in any slot of the lane.
    Any,
}

/// `awaited` is `turn (48) | slot + 1, or 0xffff for any (16)`; 0 while awake.
const ANY: u16 = u16::MAX;

impl Awaited {
    const fn encode(self, turn: u64) -> u64 {
        let what = match self {
            Self::Slot(slot) => slot + 1,
            Self::Any => ANY,
        };
        (turn << 16) | what as u64
    }

    /// Reports whether a waiter with this word waits for `slot`, or for any slot if it is `None`.
    pub(crate) const fn matches(word: u64, slot: Option<u16>) -> bool {
        let what = word as u16;
        match slot {
            None => what != 0,
            Some(slot) => what == ANY || what == slot + 1,
        }
    }
}

/// An announced sleep. Check again, then call [`WaiterLine::sleep`] or [`WaiterLine::awake`].
#[derive(Clone, Copy, Debug)]
#[must_use = "look at what you wait for once more, then sleep or call `awake`"]
pub struct Announced {
    wakes: u32,
    /// Whether the barrier took effect. If not, limit the sleep more tightly.
    pub ordered: bool,
}

impl WaiterLine {
    /// Client: announces the event of its sleep. `turn` must differ from that of the last sleep.
    pub fn announce(&self, what: Awaited, turn: u64) -> Announced {
        // Acquire: keeps this load before the store of `awaited`. A wake-up for *this* turn follows
        // that store, so it is never part of the value that the sleep compares with.
        let wakes = self.wakes.load(Ordering::Acquire);
        self.awaited.store(what.encode(turn), Ordering::Relaxed);
        Announced { wakes, ordered: crate::sync::heavy_fence() }
    }

    /// Client: announces that it is awake.
    pub fn awake(&self) {
        self.awaited.store(0, Ordering::Relaxed);
    }

    /// Reports whether a wake-up came since the sleep was announced.
    pub fn woken_since(&self, announced: Announced) -> bool {
        // Acquire: pairs with the Release increment in `wake`; the permit is visible after it.
        self.wakes.load(Ordering::Acquire) != announced.wakes
    }

    /// Daemon: counts a wake-up and delivers it.
    pub(crate) fn wake(&self) {
        // Release: pairs with the Acquire load in `woken_since`.
        self.wakes.fetch_add(1, Ordering::Release);
        #[cfg(not(loom))]
        futex_wake_all(&self.wakes);
    }
}

#[cfg(not(loom))]
pub use system::{current_cpu, lately_ns, membarrier, now_ns, register};

#[cfg(not(loom))]
use system::{futex_wait, futex_wake_all};

/// The clock of a client or of a scheduler, in nanoseconds. A test may give a virtual one.
#[cfg(not(loom))]
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Returns the time, which never goes back.
    pub now_ns: fn() -> u64,
    /// Returns a time up to 10 ms before `now_ns`, at a lower cost.
    pub lately_ns: fn() -> u64,
}

#[cfg(not(loom))]
impl Clock {
    /// The system's clock: [`now_ns`] and [`lately_ns`].
    pub const SYSTEM: Self = Self { now_ns, lately_ns };

    /// Returns the time in nanoseconds, which never goes back.
    #[inline]
    pub fn now_ns(self) -> u64 {
        (self.now_ns)()
    }

    /// Returns a time up to 10 ms ago.
    #[inline]
    pub fn lately_ns(self) -> u64 {
        (self.lately_ns)()
    }
}

#[cfg(not(loom))]
impl WaiterLine {
    /// Client: sleeps until woken, but not longer than `limit`. May return early.
    pub fn sleep(&self, announced: Announced, limit: core::time::Duration) {
        futex_wait(&self.wakes, announced.wakes, limit);
    }
}

#[cfg(not(loom))]
mod system {
    use core::sync::atomic::{AtomicU8, AtomicU32, Ordering};
    use core::time::Duration;

    /// Runs one `membarrier` command and returns whether it succeeded.
    pub fn membarrier(command: libc::c_int) -> bool {
        // SAFETY: membarrier(2) takes three integers and touches no memory of ours.
        unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
    }

    /// Registers this process, once, so that the other side's heavy fence reaches its threads.
    /// Returns `false` if the kernel or a seccomp filter refuses. This process then has to execute
    /// real fences.
    pub fn register() -> bool {
        // Not `OnceLock`: the call takes milliseconds in a process with threads. A child that is
        // forked meanwhile would wait for ever. To register twice is harmless.
        static REGISTERED: AtomicU8 = AtomicU8::new(UNKNOWN);
        const UNKNOWN: u8 = 2;
        let known = REGISTERED.load(Ordering::Relaxed);
        if known != UNKNOWN {
            return known != 0;
        }
        let registered = membarrier(libc::MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED);
        REGISTERED.store(registered.into(), Ordering::Relaxed);
        registered
    }

    /// Sleeps while `*word == expected`, at most `limit`. The futex is not `FUTEX_PRIVATE`, because
    /// the two processes map it at different addresses.
    pub(super) fn futex_wait(word: &AtomicU32, expected: u32, limit: Duration) {
        let timeout = libc::timespec {
            tv_sec: libc::time_t::try_from(limit.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: libc::c_long::from(limit.subsec_nanos() as i32),
        };
        // SAFETY: `word` is a live, aligned u32 and `timeout` a valid timespec for the duration
        // of the call; FUTEX_WAIT only reads both.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                word.as_ptr(),
                libc::FUTEX_WAIT,
                expected,
                &raw const timeout,
            );
        }
    }

    /// Wakes all threads that sleep on `word`.
    pub(super) fn futex_wake_all(word: &AtomicU32) {
        // SAFETY: FUTEX_WAKE uses the address of `word` only as a key.
        unsafe {
            libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
        }
    }

    /// Returns the CPU that this thread runs on, if the system reports it.
    pub fn current_cpu() -> Option<u32> {
        // SAFETY: no arguments; glibc reads it from the thread's rseq area.
        u32::try_from(unsafe { libc::sched_getcpu() }).ok()
    }

    /// Returns CLOCK_MONOTONIC in nanoseconds.
    #[inline]
    pub fn now_ns() -> u64 {
        read(libc::CLOCK_MONOTONIC)
    }

    /// Returns [`now_ns`] as of the kernel's last tick, up to 10 ms ago. It takes two loads on any
    /// machine, also where reading the clock is a system call.
    #[inline]
    pub fn lately_ns() -> u64 {
        read(libc::CLOCK_MONOTONIC_COARSE)
    }

    fn read(clock: libc::clockid_t) -> u64 {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is a valid timespec to write to; both clocks always exist.
        unsafe { libc::clock_gettime(clock, &raw mut time) };
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    }
}
