//! The thread that posts what was permitted when no thread of the program does: for programs that
//! sleep until a completion event comes, which does not come before the work request is posted.
//!
//! One per lane, started when something has to wait there, or is in flight that the daemon counts,
//! for the first time. It looks after what is in flight now and then, since the program may not
//! poll for it, and is asleep while there is nothing of either. While the program polls for
//! completions itself, the thread stays out of its way: each permit that it slept for would cost
//! the daemon a wake-up.

use std::thread;
use std::time::Duration;

use crate::lanes::Shard;

/// Between two looks while the program pumps.
const ASIDE: Duration = Duration::from_micros(500);
/// Between two looks while the provider's queue is full and no permit is awaited, or the lane is
/// full.
const RETRY: Duration = Duration::from_micros(100);

/// Starts the thread of a lane.
pub(crate) fn start(shard: &'static Shard) {
    // The program's signals are its own: a thread inherits what is blocked where it is made.
    // SAFETY: plain calls on sets that live here; they are filled before they are read.
    unsafe {
        let mut all = core::mem::zeroed::<libc::sigset_t>();
        let mut before = core::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let started = thread::Builder::new()
            .name(String::from("laxity-pump"))
            .stack_size(256 << 10)
            .spawn(move || run(shard));
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, core::ptr::null_mut());
        if let Err(error) = started {
            eprintln!(
                "laxity: cannot start a thread ({error}); work requests that wait are posted when \
                 the \
                 program polls for completions"
            );
        }
    }
}

fn run(shard: &'static Shard) {
    loop {
        shard.attend();
        shard.look();
        if shard.take_polled() {
            thread::sleep(ASIDE);
            continue;
        }
        let went = shard.pump();
        if shard.take_full() {
            thread::sleep(RETRY);
            continue;
        }
        let sleep = shard.lane().prepare_sleep();
        match sleep {
            Some(sleep) => {
                sleep.sleep();
                shard.lane().slept();
            }
            None if went => {}
            None => thread::sleep(RETRY),
        }
    }
}
