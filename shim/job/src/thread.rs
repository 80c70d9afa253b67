//! Threads that a library starts in a program that doesn't expect them.

use std::io;
use std::thread::Builder;

/// Starts a thread with all signals blocked. Signals belong to the program, and a thread inherits
/// the mask of the thread that starts it.
pub fn spawn(thread: Builder, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // SAFETY: plain data, for which zeroes are a value.
    let (mut all, mut before) = unsafe { core::mem::zeroed::<(libc::sigset_t, libc::sigset_t)>() };
    // SAFETY: the sets live in this function, and are filled before they are read.
    unsafe {
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
    }
    let started = thread.spawn(run);
    // SAFETY: the set lives in this function and was filled.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, core::ptr::null_mut()) };
    started.map(drop)
}
