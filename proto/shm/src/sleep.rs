//! How either side sleeps without ever missing what it sleeps for, and without a cost to the
//! side that is awake.
//!
//! # The shape of both protocols
//! "I store something, then look whether you sleep" against "I say that I sleep, then look
//! whether you stored something": of two such pairs of accesses at least one must see the other's
//! store, and only a full barrier between store and load on *both* sides guarantees that. The
//! barrier of the awake side would cost it 5 → 72 ns per submit, so it is moved to the sleeper:
//! `membarrier(GLOBAL_EXPEDITED)` makes every running thread of every registered process execute
//! one. Each process registers once ([`register`]).
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
//! *No wake-up is lost*: either the client's second look sees the permit, or the daemon's load
//! sees `awaited`; then `wakes` changes, and `futex_wait` returns at once if it comes later.
//! *No flag is cleared by the waker*: a flag that the waker cleared lost wake-ups (10 runs of 36
//! hung), as the clearing of an old sleep can hit the flag of the next. `awaited` is written by
//! the waiter only, and each sleep has its own `turn`, so the daemon can remember the word that it
//! answered and not pay for a second wake-up. A daemon that answers a turn too early (it looked
//! late after an older permit) costs one idle turn: the client looks, finds nothing, and sleeps
//! again under a *new* turn.
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
//! The eventfd counts, so a write between the daemon's last look and its `epoll_wait` is not
//! lost. Every submit while the flag is up writes it; the daemon lowers it when it wakes.
//!
//! ## Where `membarrier` is refused
//! If the *awake* side could not register, it executes the real fence instead (the client is told
//! by [`crate::layout::attention::FENCE`], the daemon knows). If the *sleeper's* call fails, the
//! bound on its sleep makes up for it: clients sleep in slices anyway.

use crate::layout::WaiterLine;
use crate::sync::Ordering;

/// What a sleeping client waits for.
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

    /// Whether a waiter with this word wants to hear of `slot`, or of anything (`None`).
    pub(crate) const fn matches(word: u64, slot: Option<u16>) -> bool {
        let what = word as u16;
        match slot {
            None => what != 0,
            Some(slot) => what == ANY || what == slot + 1,
        }
    }
}

/// A sleep that was announced: look again, then [`WaiterLine::sleep`] or [`WaiterLine::awake`].
#[derive(Clone, Copy, Debug)]
#[must_use = "look at what you wait for once more, then sleep or call `awake`"]
pub struct Announced {
    wakes: u32,
    /// The barrier took effect. If not, bound the sleep more tightly.
    pub ordered: bool,
}

impl WaiterLine {
    /// Client: says what it will sleep for. `turn` must differ from that of the sleep before.
    pub fn announce(&self, what: Awaited, turn: u64) -> Announced {
        // Acquire: stays before the store of `awaited`. A wake-up for *this* turn follows that
        // store, so it is never part of the value that the sleep compares with.
        let wakes = self.wakes.load(Ordering::Acquire);
        self.awaited.store(what.encode(turn), Ordering::Relaxed);
        Announced {
            wakes,
            ordered: crate::sync::heavy_fence(),
        }
    }

    /// Client: no longer sleeps.
    pub fn awake(&self) {
        self.awaited.store(0, Ordering::Relaxed);
    }

    /// Whether a wake-up came since the sleep was announced.
    #[must_use]
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

#[cfg(not(loom))]
impl WaiterLine {
    /// Client: sleeps until woken, but not longer than `limit`. May return early.
    pub fn sleep(&self, announced: Announced, limit: core::time::Duration) {
        futex_wait(&self.wakes, announced.wakes, limit);
    }
}

/// The system calls.
#[cfg(not(loom))]
mod system {
    use core::sync::atomic::AtomicU32;
    use core::time::Duration;
    use std::sync::OnceLock;

    /// Runs one `membarrier` command; whether it succeeded.
    pub fn membarrier(command: libc::c_int) -> bool {
        // SAFETY: membarrier(2) takes three integers and touches no memory of ours.
        unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
    }

    /// Registers this process, once, so that the other side's heavy fence reaches its threads.
    /// `false` where the kernel or a seccomp filter refuses: then this process has to execute real
    /// fences.
    pub fn register() -> bool {
        static REGISTERED: OnceLock<bool> = OnceLock::new();
        *REGISTERED.get_or_init(|| membarrier(libc::MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED))
    }

    /// Sleeps while `*word == expected`, at most `limit`. Not `FUTEX_PRIVATE`: the other process
    /// has another address for it.
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

    /// Wakes all who sleep on `word`.
    pub(super) fn futex_wake_all(word: &AtomicU32) {
        // SAFETY: FUTEX_WAKE uses the address of `word` only as a key.
        unsafe {
            libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
        }
    }

    /// The CPU that this thread runs on right now, if the system says so.
    #[must_use]
    pub fn current_cpu() -> Option<u32> {
        // SAFETY: no arguments; glibc reads it from the thread's rseq area.
        u32::try_from(unsafe { libc::sched_getcpu() }).ok()
    }

    /// CLOCK_MONOTONIC in nanoseconds.
    #[inline]
    #[must_use]
    pub fn now_ns() -> u64 {
        read(libc::CLOCK_MONOTONIC)
    }

    /// [`now_ns`] as of the last tick of the kernel's, up to 10 ms ago: two loads on any machine,
    /// also where reading the clock is a system call.
    #[inline]
    #[must_use]
    pub fn lately_ns() -> u64 {
        read(libc::CLOCK_MONOTONIC_COARSE)
    }

    fn read(clock: libc::clockid_t) -> u64 {
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `time` is a valid timespec to write to; both clocks always exist.
        unsafe { libc::clock_gettime(clock, &raw mut time) };
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    }
}
