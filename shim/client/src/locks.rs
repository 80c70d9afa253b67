//! Locks for which no thread waits for long.

use std::sync::TryLockError;
use std::time::{Duration, Instant};

/// Longest wait of a submit for a lock. A thread that holds one does not block, so an interrupted
/// holder frees the lock within a few time slices of a busy CPU.
pub(crate) const LOCK_PATIENCE: Duration = Duration::from_millis(50);
/// Longest wait for a lock in a forked child, where the holder may not exist.
pub(crate) const LOCK_PATIENCE_FORKED: Duration = Duration::from_millis(1);

/// Takes a lock, or returns `None` after `patience`, because the holder may be attaching, or not
/// exist in a forked child. It waits for a short use by another thread, since otherwise a flow
/// would be bypassed although there is a daemon.
pub(crate) fn shortly<G>(
    patience: impl Fn() -> Duration,
    mut try_lock: impl FnMut() -> Result<G, TryLockError<G>>,
) -> Option<G> {
    let mut give_up = None;
    loop {
        match try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
        let now = Instant::now();
        if now > *give_up.get_or_insert_with(|| now + patience()) {
            return None;
        }
        std::thread::yield_now();
    }
}
