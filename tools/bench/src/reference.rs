//! P, the machine's round trip between two cores, which is a lower bound for permits: a request
//! line and a reply line, each written by one side only.
//!
//! Two processes share a memfd. Neither uses `pause`, which only delays the detection of a new
//! value when each has its own core.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock::Clock;
use crate::error::{BenchError, Result};
use crate::peer::{self, SharedPage, medium};
use crate::sample::{Percentiles, Recorder};

pub(crate) const ANSWER_ROLE: &str = "answer";
const REQUEST: usize = 0;
const REPLY: usize = 2;
const STOP: u64 = u64::MAX;
/// Maximum number of spins of a wait, about a second. After that the peer died or lost its core.
const SPINS_MAX: u64 = 1 << 30;

/// Waits for `value`. Returns false if it doesn't come.
#[inline(always)]
fn spin_until(word: &AtomicU64, value: u64) -> bool {
    for _ in 0..SPINS_MAX {
        if word.load(Ordering::Acquire) == value {
            return true;
        }
    }
    false
}

pub(crate) fn round_trips(clock: Clock, far: usize, round_trips: usize) -> Result<Percentiles> {
    let (page, memory) = SharedPage::create()?;
    let peer = peer::spawn(ANSWER_ROLE, far, memory)?;
    page.await_peer()?;
    let (request, reply) = (page.word(REQUEST), page.word(REPLY));
    let mut recorder = Recorder::with_room_for(round_trips);
    let warm_up = round_trips / 10;
    for i in 0..warm_up + round_trips {
        let asked = i as u64 + 1;
        let begin = clock.begin();
        request.store(asked, Ordering::Release);
        let answered = spin_until(reply, asked);
        let end = clock.end();
        if !answered {
            return Err(BenchError::Failed("the peer stopped answering".to_owned()));
        }
        if i >= warm_up {
            recorder.note(begin, end);
        }
    }
    request.store(STOP, Ordering::Release);
    drop(peer);
    Ok(recorder.finish(clock))
}

pub(crate) fn serve() -> Result<()> {
    let page = SharedPage::map(&medium()?)?;
    let (request, reply) = (page.word(REQUEST), page.word(REPLY));
    page.announce();
    let mut expected = 1;
    loop {
        match request.load(Ordering::Acquire) {
            STOP => return Ok(()),
            asked if asked == expected => {
                reply.store(asked, Ordering::Release);
                expected += 1;
            }
            _ => {}
        }
    }
}
