//! Bytes that were permitted and never completed, and clients that let it come to that.
//!
//! A port's window is shared: whoever takes permits and reports no completion closes it for all
//! others. A dropped ticket is enough, and so is malice. So what is overdue is written off, its
//! flow leaves the link (else its next chunks would take the same place for another
//! `completion_timeout`), and its client is let out with what remains of it, unscheduled and in
//! the scavenger class.
//!
//! *Distrust.* That alone bounds a flow, not a client, which can submit the next one. A client that
//! has lost more than a quarter of a window lately is not scheduled at all for a while: what it
//! submits goes out at once in the scavenger class. The first time for [`FIRST`] timeouts, then
//! twice as long each time, so the share of time in which one client can hold a port shrinks
//! towards nothing; forgotten after as long a time without a loss. One lost completion of a chunk
//! costs an honest client nothing.

use laxity_policy::{Level, Span, Time};
use laxity_shm::consumer::Wake;
use laxity_shm::producer::SlotRef;

use crate::clients::Client;
use crate::config::Mode;
use crate::driver::Driver;
use crate::driver::intake::Intake;
use crate::flows::{Books, Flow};

/// Length of the first distrust, in timeouts.
const FIRST: u64 = 4;
/// It doubles no more often than this.
const DOUBLINGS: u32 = 8;
/// A client is distrusted that has lost more than a window divided by this.
const WINDOW_SHARE: u64 = 4;

/// What a client has lost lately.
#[derive(Clone, Copy, Debug, Default)]
pub struct Record {
    /// Bytes written off, until they are forgotten.
    lost: u64,
    strikes: u32,
    distrusted: bool,
    /// When the distrust ends, or what was lost is forgotten.
    until: Time,
}

impl Record {
    /// Whether nothing of the client is to be scheduled.
    #[must_use]
    pub const fn is_distrusted(&self) -> bool {
        self.distrusted
    }

    /// `bytes` were written off. True if the client is distrusted from now on.
    fn lose(&mut self, now: Time, bytes: u64, window: u64, timeout: Span) -> bool {
        if self.distrusted {
            return false;
        }
        self.lost = self.lost.saturating_add(bytes);
        self.distrusted = self.lost > window / WINDOW_SHARE;
        if self.distrusted {
            self.strikes = (self.strikes + 1).min(DOUBLINGS);
        }
        self.until = now + self.term(timeout);
        self.distrusted
    }

    fn term(&self, timeout: Span) -> Span {
        timeout.times(FIRST << self.strikes.saturating_sub(1))
    }

    /// Time passes. True if the client is trusted again.
    fn forgive(&mut self, now: Time, timeout: Span) -> bool {
        if self.lost == 0 && self.strikes == 0 || now < self.until {
            return false;
        }
        if self.distrusted {
            self.distrusted = false;
            self.lost = 0;
            self.until = now + self.term(timeout);
            return true;
        }
        *self = Self::default();
        false
    }
}

impl Intake {
    /// Gives up on the bytes of a lane that were permitted a `timeout` ago and not completed.
    pub fn write_off(&mut self, index: u32, client: &mut Client, lane: u16, timeout: Span) {
        let since = self.now - timeout;
        let flows = &client.book.lanes.at(lane).flows;
        let overdue = |flow: &&Flow| flow.outstanding() > 0 && flow.touched < since;
        let seqs: Vec<u64> = flows.iter().filter(overdue).map(|flow| flow.seq).collect();
        let mut distrusted = false;
        for seq in seqs {
            let Some(flow) = client.book.lanes.at(lane).flows.get_mut(seq).copied() else {
                continue;
            };
            let bytes = flow.outstanding();
            client.book.counters.written_off_bytes += bytes;
            if flow.books != Books::Nobody {
                let window = self.ports[usize::from(flow.port)]
                    .link
                    .config()
                    .window_bytes;
                distrusted |= client.book.record.lose(self.now, bytes, window, timeout);
            }
            self.let_out(index, client, lane, seq);
        }
        if distrusted {
            client.set_room();
            self.let_go(index, client);
        }
    }

    /// Trusts a client again whose time has come.
    pub fn forgive(&self, client: &mut Client, timeout: Span) {
        if client.book.record.forgive(self.now, timeout) {
            client.set_room();
        }
    }

    /// Takes a client that is not scheduled any more out of the links: what waits goes out. Flows
    /// that are permitted in full are still awaited, unless the mode is `off`, in which nobody is
    /// scheduled.
    pub fn let_go(&mut self, index: u32, client: &mut Client) {
        for lane in 0..client.book.lanes.count() {
            let off = client.mode == Mode::Off;
            let wanted = |flow: &&Flow| off || flow.waits();
            let flows = &client.book.lanes.at(lane).flows;
            let mut seqs: Vec<u64> = flows.iter().filter(wanted).map(|flow| flow.seq).collect();
            seqs.sort_unstable();
            for seq in seqs {
                self.let_out(index, client, lane, seq);
            }
        }
    }

    /// Ends a flow in the books and in its link. Its client gets leave for what is left.
    fn let_out(&mut self, index: u32, client: &mut Client, lane: u16, seq: u64) {
        let Some(flow) = client.book.lanes.at(lane).flows.get_mut(seq).copied() else {
            return;
        };
        if flow.waits() {
            let at = SlotRef {
                slot: flow.slot,
                tag: flow.seq,
            };
            client.book.counters.bypassed_bytes += flow.bytes - flow.permitted;
            // Not in the class of its earlier permits: what is not scheduled must not overtake
            // what is. A client that withdrew it does not see this.
            let level = Level::SCAVENGER.0;
            if let Some(consumer) = client.served.consumer(lane)
                && let Ok(Wake::Needed) = consumer.permit(at, flow.bytes, level, true)
            {
                self.wakes.push((index, lane));
            }
        }
        self.cancel(index, &mut client.book, lane, seq);
    }
}

/// Places looked at each time.
const WRITE_OFF_PLACES: usize = 4096;

impl Driver {
    /// Looks at the next few thousand places for completions that never came.
    pub(super) fn write_off(&mut self) {
        let timeout = Span(self.config.tuning.completion_timeout.0);
        for client in self.clients.iter_mut().flatten() {
            self.intake.forgive(client, timeout);
        }
        let (mut index, mut lane) = self.sweep_at;
        let mut places = 0;
        // At most once around.
        for _ in 0..=self.clients.len() {
            let client = self
                .clients
                .get_mut(index as usize)
                .and_then(Option::as_mut);
            if let Some(client) = client
                && client.book.flows > 0
            {
                while lane < client.book.lanes.count() && places < WRITE_OFF_PLACES {
                    if let Some(book) = client.book.lanes.get(lane)
                        && !book.flows.is_empty()
                    {
                        places += book.flows.places();
                        self.intake.write_off(index, client, lane, timeout);
                    }
                    lane += 1;
                }
                if places >= WRITE_OFF_PLACES {
                    break;
                }
            }
            lane = 0;
            index = if index as usize + 1 < self.clients.len() {
                index + 1
            } else {
                0
            };
        }
        self.sweep_at = (index, lane);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Span = Span::from_millis(10);

    #[test]
    fn whoever_loses_a_chunk_is_forgiven_and_whoever_loses_windows_is_shut_out_ever_longer() {
        let mut record = Record::default();
        let mut now = Time::ZERO + TIMEOUT;
        assert!(!record.lose(now, 25, 100, TIMEOUT));
        now = now + TIMEOUT.times(FIRST);
        assert!(!record.forgive(now, TIMEOUT));
        assert!(
            !record.lose(now, 25, 100, TIMEOUT),
            "the first was not forgotten"
        );
        let mut terms = Vec::new();
        for _ in 0..4 {
            assert!(record.lose(now, 100, 100, TIMEOUT));
            assert!(!record.lose(now, 100, 100, TIMEOUT), "counted twice");
            let struck = now;
            while !record.forgive(now, TIMEOUT) {
                assert!(record.is_distrusted());
                now = now + TIMEOUT;
            }
            terms.push(now.since(struck).0 / TIMEOUT.0);
        }
        assert_eq!(terms, [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST]);
        now = now + TIMEOUT.times(8 * FIRST);
        record.forgive(now, TIMEOUT);
        assert!(record.lose(now, 100, 100, TIMEOUT));
        assert_eq!(
            record.until,
            now + TIMEOUT.times(FIRST),
            "good conduct was not seen"
        );
    }
}
