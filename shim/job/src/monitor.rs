//! A value behind a lock, and threads that wait for it to change.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A value behind a lock, for whose change a thread of the library waits.
///
/// It uses std's lock, which is one word and has no list of its waiters. `parking_lot` has such a
/// list for the whole process. A forked child would keep the entries of threads that waited at the
/// fork and that the child does not have. Its own threads could then miss a wake-up, or the list
/// could break.
#[derive(Debug, Default)]
pub struct Monitor<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Monitor<T> {
    /// Returns a monitor of `value`.
    pub const fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Condvar::new() }
    }

    /// Locks the value. A panic of another holder is ignored.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes a thread that waits.
    #[inline]
    pub fn notify(&self) {
        self.changed.notify_one();
    }

    /// Waits for [`Monitor::notify`]. May return without it.
    pub fn wait<'a>(&'a self, value: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.changed.wait(value).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits as [`Monitor::wait`] does, for `limit` at most, and unlocks the value.
    pub fn wait_for(&self, value: MutexGuard<'_, T>, limit: Duration) {
        drop(self.changed.wait_timeout(value, limit));
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn leaked() -> &'static Monitor<bool> {
        Box::leak(Box::default())
    }

    fn wait_for_true(monitor: &Monitor<bool>) {
        let mut value = monitor.lock();
        while !*value {
            value = monitor.wait(value);
        }
    }

    /// Waits in a thread for each of some monitors, and wakes all.
    fn wait_and_wake() {
        let monitors = [(); 32].map(|()| leaked());
        let waiters = monitors.map(|monitor| thread::spawn(|| wait_for_true(monitor)));
        thread::sleep(Duration::from_millis(5));
        for monitor in monitors {
            *monitor.lock() = true;
            monitor.notify();
        }
        for waiter in waiters {
            waiter.join().expect("no panic");
        }
    }

    #[test]
    fn threads_of_a_child_wait_as_if_none_had_waited_in_its_parent() {
        for _ in 0..16 {
            let monitor = leaked();
            thread::spawn(|| wait_for_true(monitor));
        }
        thread::sleep(Duration::from_millis(20));
        for fork in 0..16 {
            // SAFETY: the child ends by _exit. glibc handles the locks of malloc.
            let pid = unsafe { libc::fork() };
            assert!(pid >= 0, "fork");
            if pid == 0 {
                // SAFETY: a signal ends a child that hangs.
                unsafe { libc::alarm(10) };
                wait_and_wake();
                // SAFETY: the call ends the child without the parent's exit handlers.
                unsafe { libc::_exit(0) };
            }
            let mut status = 0;
            // SAFETY: the call waits for this process's own child.
            unsafe { libc::waitpid(pid, &raw mut status, 0) };
            assert_eq!(status, 0, "fork {fork}");
        }
    }
}
