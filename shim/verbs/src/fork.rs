//! What a forked child does: as if this library weren't there.
//!
//! A child may not use the parent's queue pairs (its registered memory isn't the parent's), and the
//! locks that other threads held at the fork stay locked in it for ever. So each fork begins a new
//! epoch: contexts hooked in an older one pass everything through without taking a lock, and what
//! the child opens for itself gets lanes, lists and a client of its own.

use core::sync::atomic::{AtomicU32, Ordering};
use std::sync::Once;

/// Counts the forks between this process and the one that loaded the library. Relaxed: changes only
/// in a process that has one thread at that moment.
static EPOCH: AtomicU32 = AtomicU32::new(0);

pub(crate) fn epoch() -> u32 {
    EPOCH.load(Ordering::Relaxed)
}

extern "C" fn in_child() {
    EPOCH.fetch_add(1, Ordering::Relaxed);
    laxity_client::memory::abandon();
    crate::lanes::abandon();
    crate::table::abandon();
    crate::report::abandon();
    crate::poll_ex::abandon();
    crate::classify::abandon();
}

/// Has the handler called in children from here on.
pub(crate) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler stores to atomics, nothing else, which is safe in any child.
        let refused = unsafe { libc::pthread_atfork(None, None, Some(in_child)) } != 0;
        if refused {
            eprintln!(
                "laxity: pthread_atfork is refused; a process that forks may hang in its child"
            );
        }
    });
}
