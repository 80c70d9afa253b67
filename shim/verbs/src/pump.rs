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
    let builder = thread::Builder::new()
        .name(String::from("laxity-pump"))
        .stack_size(256 << 10);
    if let Err(error) = laxity_job::thread::spawn(builder, move || run(shard)) {
        eprintln!(
            "laxity: cannot start a thread ({error}); work requests that wait are posted when the \
             program polls for completions"
        );
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
