//! The machine's round trips between two cores, which are a lower bound for permits:
//!
//! * **P1**: one cache line bounces, and each side writes what the other waits for.
//! * **P**: a request line and a reply line, each written by one side only.
//!
//! Two processes share a memfd. Neither uses `pause`, which only delays the detection of a new
//! value when each has its own core.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock::Clock;
use crate::error::BenchError;
use crate::peer::{Peer, SharedPage, medium};
use crate::sample::{Percentiles, Recorder};

pub(crate) const BOUNCE_ROLE: &str = "bounce";
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

pub(crate) fn one_line(
    clock: Clock,
    far: usize,
    round_trips: usize,
) -> Result<Percentiles, BenchError> {
    round_trip(clock, far, round_trips, BOUNCE_ROLE, REQUEST)
}

pub(crate) fn two_lines(
    clock: Clock,
    far: usize,
    round_trips: usize,
) -> Result<Percentiles, BenchError> {
    round_trip(clock, far, round_trips, ANSWER_ROLE, REPLY)
}

fn round_trip(
    clock: Clock,
    far: usize,
    round_trips: usize,
    role: &str,
    reply_line: usize,
) -> Result<Percentiles, BenchError> {
    let (page, memory) = SharedPage::create()?;
    let peer = Peer::spawn(role, far, Some(memory), &[])?;
    page.await_peer()?;
    let (request, reply) = (page.word(REQUEST), page.word(reply_line));
    let mut recorder = Recorder::with_room_for(round_trips);
    let warm_up = round_trips / 10;
    for i in 0..warm_up + round_trips {
        // Requests are odd and replies even, because P1 has two writers of one word.
        let asked = 2 * i as u64 + 1;
        let begin = clock.begin();
        request.store(asked, Ordering::Release);
        let answered = spin_until(reply, asked + 1);
        let end = clock.end();
        if !answered {
            return Err(BenchError::Process(format!("the {role} peer stopped answering")));
        }
        if i >= warm_up {
            recorder.note(begin, end);
        }
    }
    request.store(STOP, Ordering::Release);
    drop(peer);
    Ok(recorder.finish(clock))
}

pub(crate) fn serve(role: &str) -> Result<(), BenchError> {
    let page = SharedPage::map(&medium()?)?;
    let request = page.word(REQUEST);
    let reply = page.word(if role == BOUNCE_ROLE { REQUEST } else { REPLY });
    page.announce();
    let mut expected = 1;
    loop {
        match request.load(Ordering::Acquire) {
            STOP => return Ok(()),
            asked if asked == expected => {
                reply.store(asked + 1, Ordering::Release);
                expected += 2;
            }
            _ => {}
        }
    }
}
