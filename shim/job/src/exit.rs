//! What a library does when its process ends.

use core::sync::atomic::{AtomicU64, Ordering};
use std::panic::catch_unwind;
use std::sync::OnceLock;

use crate::fork;

/// One more than the fork epoch of the process that asked last; 0 if none did. Relaxed: changes
/// long before the process ends.
static ASKED: AtomicU64 = AtomicU64::new(0);
static END: OnceLock<fn()> = OnceLock::new();

extern "C" fn run() {
    if ASKED.load(Ordering::Relaxed) == u64::from(fork::epoch()) + 1
        && let Some(end) = END.get()
    {
        // A panic must not reach C, and there is nobody to tell.
        let _ = catch_unwind(end);
    }
}

/// Calls `end` when this process ends. A forked child that doesn't ask again calls nothing, since
/// what was counted is its parent's. A library has one `end`: the first that is given.
pub fn at_exit(end: fn()) {
    ASKED.store(u64::from(fork::epoch()) + 1, Ordering::Relaxed);
    END.get_or_init(|| {
        // SAFETY: a plain call; `run` takes nothing and returns nothing.
        unsafe { libc::atexit(run) };
        end
    });
}
