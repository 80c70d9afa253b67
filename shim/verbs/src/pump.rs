//! The thread that posts permitted work requests when no thread of the program does. Some programs
//! sleep until a completion event, which comes only after the work request is posted.
//!
//! Each lane has one thread. It starts when a work request first has to wait, a flow that the
//! daemon counts is first in flight, or a record can't be sent at once. It also checks work
//! requests in flight from time to time, since the program may not poll for them. Otherwise it
//! sleeps. While the program polls for completions itself, the thread doesn't wait for permits,
//! which would cost the daemon wake-ups.

use std::thread;
use std::time::Duration;

use crate::lanes::LaneShard;

/// Pause between two checks while the program pumps.
const ASIDE: Duration = Duration::from_micros(500);
/// Pause between two attempts while the provider's queue is full without outstanding permits, or
/// the lane is full.
const RETRY: Duration = Duration::from_micros(100);

pub(crate) fn start(shard: &'static LaneShard) {
    let builder = thread::Builder::new().name(String::from("laxity-pump")).stack_size(256 << 10);
    if let Err(error) = laxity_job::thread::spawn(builder, move || run(shard)) {
        eprintln!(
            "laxity: cannot start a thread ({error}); work requests that wait are posted when the \
             program polls for completions"
        );
    }
}

fn run(shard: &'static LaneShard) {
    loop {
        shard.attend();
        shard.check_in_flight();
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
