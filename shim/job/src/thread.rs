//! Threads of a library in a program that knows nothing of them.

use std::io;
use std::thread::Builder;

/// Starts a thread with all signals blocked. Signals are the program's own, and a thread inherits
/// what is blocked where it is made.
///
/// # Errors
/// What the system says against one more thread.
pub fn spawn(thread: Builder, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // SAFETY: plain data, for which zeroes are a value.
    let (mut all, mut before) = unsafe { core::mem::zeroed::<(libc::sigset_t, libc::sigset_t)>() };
    // SAFETY: plain calls on sets that live here; they are filled before they are read.
    unsafe {
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
    }
    let started = thread.spawn(run);
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, core::ptr::null_mut()) };
    started.map(drop)
}
