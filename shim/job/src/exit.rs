//! The function of a library that runs when its process ends.

use core::sync::atomic::{AtomicU64, Ordering};
use std::panic::catch_unwind;
use std::sync::OnceLock;

use crate::fork;

/// The fork epoch plus one in which `at_exit` was last called, or 0. Relaxed, because it changes
/// long before the process ends.
static ASKED: AtomicU64 = AtomicU64::new(0);
static END: OnceLock<fn()> = OnceLock::new();

extern "C" fn run() {
    if ASKED.load(Ordering::Relaxed) == u64::from(fork::epoch()) + 1
        && let Some(end) = END.get()
    {
        // A panic must not reach C, and nobody can handle it.
        let _ = catch_unwind(end);
    }
}

/// Calls `end` when this process ends. A forked child calls it only if the child calls this
/// function, too, since the counters are its parent's. A library has one `end`, the first.
pub fn at_exit(end: fn()) {
    ASKED.store(u64::from(fork::epoch()) + 1, Ordering::Relaxed);
    END.get_or_init(|| {
        // SAFETY: `run` takes nothing and returns nothing.
        unsafe { libc::atexit(run) };
        end
    });
}
