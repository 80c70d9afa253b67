//! The function of a library that runs when its process ends.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::panic::catch_unwind;

use crate::fork::{self, Leaked};

/// The fork epoch plus one in which `at_exit` was last called, or 0. Relaxed, because it changes
/// long before the process ends.
static ASKED: AtomicU64 = AtomicU64::new(0);
static END: Leaked<fn()> = Leaked::none();
/// Whether `END` was called. Two threads may register it at the same time.
static IS_OVER: AtomicBool = AtomicBool::new(false);

extern "C" fn run() {
    if ASKED.load(Ordering::Relaxed) == u64::from(fork::epoch()) + 1
        && let Some(end) = END.get()
        && !IS_OVER.swap(true, Ordering::Relaxed)
    {
        // A panic must not reach C, and nobody can handle it.
        let _ = catch_unwind(end);
    }
}

/// Calls `end` when this process ends. A library has one `end`, the first. A forked child calls it
/// only if the child calls this function, too.
///
/// Returns true at the first call in a forked child. The library's counters are still the parent's
/// then, which reports them itself. What other threads of the child count before the caller sets
/// them to 0 is lost.
#[must_use]
pub fn at_exit(end: fn()) -> bool {
    let own = u64::from(fork::epoch()) + 1;
    let is_first = ASKED.swap(own, Ordering::Relaxed) != own;
    END.get_or_make(|| {
        // SAFETY: `run` takes nothing and returns nothing.
        unsafe { libc::atexit(run) };
        end
    });
    is_first && own > 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_call_in_a_child_says_that_the_counters_are_its_parents() {
        fork::watch();
        assert!(!at_exit(|| {}), "the counters are this process's own");
        // SAFETY: the child only calls the function and ends by _exit.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork");
        if pid == 0 {
            let said = [at_exit(|| {}), at_exit(|| {})] == [true, false];
            // SAFETY: the call ends the child without the parent's exit handlers.
            unsafe { libc::_exit(i32::from(said)) };
        }
        let mut status = 0;
        // SAFETY: the call waits for this process's own child.
        unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!(libc::WEXITSTATUS(status), 1);
    }
}
