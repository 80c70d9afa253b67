//! The machine's own round trips between two cores, below which no permit can be:
//!
//! * **P1**: one cache line bounces; each side writes what the other waits for.
//! * **P**: a request line and a reply line, each written by one side only.
//!
//! Two processes over a memfd, neither of them using `pause`: on a core of one's own it only
//! delays the discovery of the new value.

use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::bail;

use crate::clock::Clock;
use crate::peer::{Peer, SharedPage, medium};
use crate::sample::{Percentiles, Recorder};

/// The peer of P1.
pub(crate) const BOUNCE_ROLE: &str = "bounce";
/// The peer of P.
pub(crate) const ANSWER_ROLE: &str = "answer";

const REQUEST: usize = 0;
const REPLY: usize = 2;
/// A request that asks the peer to end.
const STOP: u64 = u64::MAX;
/// About a second of spinning: the peer died or lost its core.
const SPINS_MAX: u64 = 1 << 30;

/// Waits for `value`; false if it does not come.
#[inline(always)]
fn spin_until(word: &AtomicU64, value: u64) -> bool {
    for _ in 0..SPINS_MAX {
        if word.load(Ordering::Acquire) == value {
            return true;
        }
    }
    false
}

/// One repetition of P1: one line, written by both.
pub(crate) fn one_line(
    clock: Clock,
    far: usize,
    round_trips: usize,
) -> anyhow::Result<Percentiles> {
    round_trip(clock, far, round_trips, BOUNCE_ROLE, REQUEST)
}

/// One repetition of P: a line in each direction.
pub(crate) fn two_lines(
    clock: Clock,
    far: usize,
    round_trips: usize,
) -> anyhow::Result<Percentiles> {
    round_trip(clock, far, round_trips, ANSWER_ROLE, REPLY)
}

fn round_trip(
    clock: Clock,
    far: usize,
    round_trips: usize,
    role: &str,
    reply_line: usize,
) -> anyhow::Result<Percentiles> {
    let (page, memory) = SharedPage::create()?;
    let peer = Peer::spawn(role, far, Some(memory), &[])?;
    page.await_peer()?;
    let (request, reply) = (page.word(REQUEST), page.word(reply_line));
    let mut recorder = Recorder::with_room_for(round_trips);
    let warm_up = round_trips / 10;
    for i in 0..warm_up + round_trips {
        // Odd asks, even answers, so that P1's two writers of one word can be told apart.
        let asked = 2 * i as u64 + 1;
        let begin = clock.begin();
        request.store(asked, Ordering::Release);
        let answered = spin_until(reply, asked + 1);
        let end = clock.end();
        if !answered {
            bail!("the {role} peer stopped answering");
        }
        if i >= warm_up {
            recorder.note(begin, end);
        }
    }
    request.store(STOP, Ordering::Release);
    drop(peer);
    Ok(recorder.finish(clock))
}

/// The peer's side of both.
pub(crate) fn serve(role: &str) -> anyhow::Result<()> {
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
