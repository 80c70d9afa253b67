//! Clients that hold a port's window and complete nothing, while others wait for it.
//!
//! A port's window is shared, so bytes that were permitted and whose completion is not told keep
//! everybody else from the port: of a process that was stopped, that polls late, or that means
//! harm. The daemon cannot tell these from bytes that the fabric holds up, so the answer must cost
//! an honest client nothing but what it owes:
//!
//! * While others wait, a client has [`PATIENCE`] and twice the time that its bytes take on the
//!   port to complete a sixteenth of them. Then it is *silent*: those bytes do not count in the
//!   window any more, and the client *owes* them.
//! * A client that owes more than a quarter of a window gets no further permits on that port
//!   until it completes what it owes: its flows are held, the others' are not. Bytes of
//!   collectives hold up all of it, bytes of other stages all but its collectives, as strict
//!   priorities in the fabric do.
//! * What is still owed after `completion_timeout` is written off ([`super::overdue`]).
//!
//! So a silent client costs the others its share of the window for [`PATIENCE`] once, and the sum
//! of a client's bytes that are permitted and not completed stays below a window and a quarter,
//! and what it had on credit.

use laxity_policy::{Event, Span, Stage, Time};
use tracing::{debug, warn};

use super::Driver;
use super::intake::{Intake, TRICKLE_SHIFT};
use super::ports::Port;
use super::trust::WINDOW_SHARE;
use crate::clients::{Book, Client};
use crate::flows::{Books, Flow, name};

/// Time in which a client that keeps others waiting has to complete something, besides what its
/// bytes take on the port. Longer than an honest process is without a core on a busy machine.
pub(super) const PATIENCE: Span = Span::from_millis(10);
/// Time between looks for silent clients, while anything waits.
pub(super) const LOOK_EVERY: Span = Span::from_millis(5);
/// Warnings about silent clients: one per this time, the others are counted.
const WARN_EVERY: Span = Span::from_millis(1000);

/// What one client has on the wire of one port, as far as the daemon was told.
#[derive(Clone, Copy, Debug, Default)]
pub struct OnWire {
    /// Bytes permitted, not completed, and counted in the port's window.
    pub outstanding: u64,
    /// Bytes completed since `since`.
    pub completed: u64,
    /// Bytes outstanding at `since`: a sixteenth of them is to be completed in time.
    asked: u64,
    /// When the client began to keep others waiting, or was last found to make progress.
    since: Time,
    /// When it was looked at last. A look after a pause says nothing about progress.
    looked: Time,
    /// Bytes owed, by [`Class`].
    owed: [u64; 2],
    /// Whether flows of a class are held.
    held: [bool; 2],
}

/// Flows by what holds them up: a fabric of strict priorities carries collectives past all else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Collective,
    Other,
}

impl Class {
    const ALL: [Self; 2] = [Self::Collective, Self::Other];

    const fn of(stage: Stage) -> Self {
        match stage {
            Stage::Collective => Self::Collective,
            _ => Self::Other,
        }
    }
}

impl OnWire {
    /// Bytes owed on this port.
    #[must_use]
    pub const fn owed(&self) -> u64 {
        self.owed[0].saturating_add(self.owed[1])
    }

    /// Whether flows of `stage` are held.
    #[inline]
    #[must_use]
    pub const fn holds(&self, stage: Stage) -> bool {
        self.held[Class::of(stage) as usize]
    }

    /// Whether flows of any stage are held.
    #[must_use]
    pub const fn is_held(&self) -> bool {
        self.held[0] || self.held[1]
    }

    /// Bytes were permitted, or sent on credit.
    #[inline]
    pub const fn sent(&mut self, bytes: u64) {
        self.outstanding = self.outstanding.saturating_add(bytes);
    }

    /// Bytes that count in the window were completed.
    #[inline]
    pub const fn done(&mut self, bytes: u64) {
        self.outstanding = self.outstanding.saturating_sub(bytes);
        self.completed = self.completed.saturating_add(bytes);
    }

    /// Bytes that count in the window never will be completed.
    #[inline]
    pub const fn dropped(&mut self, bytes: u64) {
        self.outstanding = self.outstanding.saturating_sub(bytes);
    }

    /// Bytes that were owed were completed, or are given up.
    pub const fn paid(&mut self, stage: Stage, bytes: u64) {
        let owed = &mut self.owed[Class::of(stage) as usize];
        *owed = owed.saturating_sub(bytes);
    }

    const fn owes(&mut self, stage: Stage, bytes: u64) {
        let owed = &mut self.owed[Class::of(stage) as usize];
        *owed = owed.saturating_add(bytes);
        self.dropped(bytes);
    }

    /// Whether the client is silent at a look, when bytes of it keep others waiting. `patience` is
    /// for the bytes that it was asked for.
    fn is_silent(&mut self, now: Time, patience: impl Fn(u64) -> Span) -> bool {
        let paused = !self.kept_others(now);
        self.looked = now;
        if paused || self.completed > self.asked >> TRICKLE_SHIFT {
            self.ask(now);
            return false;
        }
        now.since(self.since) >= patience(self.asked)
    }

    /// Whether the client was found to keep others waiting a moment ago.
    pub(super) fn kept_others(&self, now: Time) -> bool {
        self.looked != Time::ZERO && now.since(self.looked) <= LOOK_EVERY.times(4)
    }

    fn ask(&mut self, now: Time) {
        (self.asked, self.completed, self.since) = (self.outstanding, 0, now);
    }

    /// Classes that are to be held though they are not, or are held and need not be.
    fn changes(&self, window: u64) -> impl Iterator<Item = (Class, bool)> {
        let [collective, other] = self.owed;
        let owed = [collective, collective.saturating_add(other)];
        let held = self.held;
        Class::ALL.into_iter().filter_map(move |class| {
            let (owed, held) = (owed[class as usize], held[class as usize]);
            // Released at half of what it was held for, so that one byte does not flip it.
            let limit = window / WINDOW_SHARE / if held { 2 } else { 1 };
            let hold = owed > limit;
            (hold != held).then_some((class, hold))
        })
    }
}

impl Intake {
    /// Takes the bytes of a silent client out of a port's window. Gives how many.
    fn set_aside(&mut self, index: u32, book: &mut Book, port: u16) -> u64 {
        let since = book.ports[usize::from(port)].since;
        let mut all = 0;
        for lane in 0..book.lanes.count() {
            let wanted = |flow: &&Flow| {
                flow.port == port
                    && flow.outstanding() > 0
                    && matches!(flow.books, Books::Link | Books::Driver)
                    && flow.touched <= since
            };
            let Some(flows) = book.lanes.get(lane).map(|lane| &lane.flows) else {
                continue;
            };
            let seqs: Vec<u64> = flows.iter().filter(wanted).map(|flow| flow.seq).collect();
            for seq in seqs {
                let Some(flow) = book.lanes.at(lane).flows.get_mut(seq) else {
                    continue;
                };
                let (bytes, stage) = (flow.outstanding(), flow.stage);
                flow.books =
                    self.ports[usize::from(port)].set_aside(self.now, flow, name(index, lane, seq));
                book.ports[usize::from(port)].owes(stage, bytes);
                all += bytes;
            }
        }
        book.counters.set_aside_bytes += all;
        self.ports[usize::from(port)].dirty = true;
        book.ports[usize::from(port)].ask(self.now);
        all
    }

    /// Holds or releases the flows of a client whose debts have changed.
    fn settle(&mut self, index: u32, book: &mut Book, port: u16) {
        let window = self.ports[usize::from(port)].window_bytes();
        let changes: Vec<_> = book.ports[usize::from(port)].changes(window).collect();
        for (class, hold) in changes {
            book.ports[usize::from(port)].held[class as usize] = hold;
            self.holding |= hold;
            for lane in 0..book.lanes.count() {
                let Some(lane_book) = book.lanes.get(lane) else {
                    continue;
                };
                let waits = |flow: &&Flow| {
                    flow.port == port
                        && flow.waits()
                        && flow.books == Books::Link
                        && Class::of(flow.stage) == class
                };
                let flows = lane_book.flows.iter().filter(waits);
                let mut seqs: Vec<u64> = flows.map(|flow| flow.seq).collect();
                // The same input gives the same schedule.
                seqs.sort_unstable();
                for seq in seqs {
                    let flow = name(index, lane, seq);
                    self.hold(port, flow, hold);
                }
            }
        }
    }

    /// Holds or releases a flow of a client that owes. One that waits for the coordinator is not
    /// released here.
    fn hold(&mut self, port: u16, flow: laxity_policy::FlowId, hold: bool) {
        let event = match hold {
            true => Event::FlowHeld { flow },
            false if self.hints.holds_flow(flow) => return,
            false => Event::FlowReleased { flow },
        };
        let port = &mut self.ports[usize::from(port)];
        port.link.handle(self.now, event);
        port.dirty = true;
    }

    /// Bytes that were owed are complete: the flow, if something of it waits, goes on when all of
    /// it is.
    #[cold]
    pub(super) fn paid(
        &mut self,
        index: u32,
        book: &mut Book,
        (lane, seq): (u16, u64),
        (port, stage): (u16, Stage),
        bytes: u64,
    ) {
        let on_wire = &mut book.ports[usize::from(port)];
        on_wire.paid(stage, bytes);
        let held = on_wire.holds(stage);
        // The flow may have ended with this.
        if let Some(flow) = book.lanes.at(lane).flows.get_mut(seq)
            && flow.books == Books::OwedInPart
            && flow.outstanding() == 0
        {
            flow.books = Books::Link;
            if !held {
                self.hold(port, name(index, lane, seq), false);
            }
        }
        self.settle(index, book, port);
    }
}

impl Port {
    /// Takes the bytes of `flow` out of the window, though they were not completed. Gives who keeps
    /// the books of it from now on.
    fn set_aside(&mut self, now: Time, flow: &Flow, id: laxity_policy::FlowId) -> Books {
        let bytes = flow.outstanding();
        match flow.books {
            Books::Link => {
                self.link
                    .handle(now, Event::BytesCompleted { flow: id, bytes });
                if !flow.waits() {
                    return Books::Owed;
                }
                self.link.handle(now, Event::FlowHeld { flow: id });
                Books::OwedInPart
            }
            Books::Driver => {
                self.link.land(now, laxity_policy::Level(flow.level), bytes);
                Books::Owed
            }
            same => same,
        }
    }

    /// How long a client may take to complete a part of `bytes` while others wait.
    fn patience(&self, bytes: u64) -> Span {
        let on_wire = Span::transfer(bytes.min(self.alone_bytes()), self.link.config().rate);
        Span(PATIENCE.0.saturating_add(on_wire.0.saturating_mul(2)))
    }
}

impl Driver {
    /// Whether flows of any client are held for what it owes.
    pub(super) fn note_holds(&mut self) {
        let held = |client: &Client| client.book.ports.iter().any(OnWire::is_held);
        self.intake.holding &= self.clients.iter().flatten().any(held);
    }

    /// Looks for silent clients, and sets aside what they hold.
    pub(super) fn look_for_silence(&mut self) {
        let now = self.intake.now;
        let mut silenced = false;
        for port in 0..self.intake.ports.len() {
            if self.intake.ports[port].link.waiting_flows() == 0 {
                continue;
            }
            // Who is held waits for itself.
            let free = |client: &&Client| !client.book.ports[port].is_held();
            let free = self.clients.iter().flatten().filter(free);
            let waiting: usize = free.map(|client| client.book.waiting).sum();
            for index in 0..self.clients.len() {
                let Some(client) = self.clients[index].as_mut().filter(|c| !c.book.released) else {
                    continue;
                };
                let state = &self.intake.ports[port];
                let on_wire = &mut client.book.ports[port];
                let own = match on_wire.is_held() {
                    true => 0,
                    false => client.book.waiting,
                };
                let keeps_others = waiting > own && on_wire.outstanding > 0;
                if keeps_others && on_wire.is_silent(now, |bytes| state.patience(bytes)) {
                    // Perhaps it has told, and was not read.
                    self.sweep_up(index as u32);
                    silenced |= self.silence(index, port);
                }
            }
        }
        if silenced {
            self.suspect();
        }
    }

    /// Sets aside what a silent client holds, unless that was told in its lanes by now. Whether it
    /// did.
    fn silence(&mut self, index: usize, port: usize) -> bool {
        let Some(client) = self.clients[index].as_mut().filter(|c| !c.book.released) else {
            return false;
        };
        let (now, state) = (self.intake.now, &self.intake.ports[port]);
        if !client.book.ports[port].is_silent(now, |bytes| state.patience(bytes)) {
            return false;
        }
        let port = port as u16;
        let bytes = self.intake.set_aside(index as u32, &mut client.book, port);
        self.intake.settle(index as u32, &mut client.book, port);
        let state = &self.intake.ports[usize::from(port)];
        let identity = &client.book.identity;
        let (name, side) = (state.name(), state.direction());
        if bytes > 0 && now.since(self.warned_silence) >= WARN_EVERY {
            self.warned_silence = now;
            warn!(
                client = %identity.name, id = identity.id.0, pid = identity.pid,
                uid = identity.owner.uid, nic = name, direction = side, bytes,
                "a client completes nothing while others wait; what it holds counts no more, and \
                 it gets no permits until it completes that (`laxity status` lists what each owes)"
            );
        } else {
            debug!(client = %identity.name, nic = name, direction = side, bytes, "silent");
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u64 = 100;

    fn at(ms: u64) -> Time {
        Time::ZERO + Span::from_millis(ms)
    }

    /// Looks every five milliseconds until the client is silent; when that was.
    fn looks(on_wire: &mut OnWire, from: u64, each: impl Fn(&mut OnWire)) -> Option<u64> {
        (0..100).map(|look| from + 5 * look).find(|&ms| {
            each(on_wire);
            on_wire.is_silent(at(ms), |_| PATIENCE)
        })
    }

    #[test]
    fn a_client_that_completes_nothing_is_silent_after_its_patience_and_not_before_it_was_asked() {
        let mut on_wire = OnWire::default();
        on_wire.sent(WINDOW);
        assert_eq!(looks(&mut on_wire, 1000, |_| ()), Some(1010));
        // It was not looked at for long: nobody was kept waiting meanwhile.
        assert_eq!(looks(&mut on_wire, 2000, |_| ()), Some(2010));
    }

    #[test]
    fn a_trickle_is_silence_and_a_sixteenth_each_time_is_none() {
        let mut trickling = OnWire::default();
        trickling.sent(1600);
        let trickle = |on_wire: &mut OnWire| on_wire.done(10);
        assert!(looks(&mut trickling, 1000, trickle).is_some());
        let mut slow = OnWire::default();
        slow.sent(1600);
        let refill = |on_wire: &mut OnWire| {
            on_wire.done(110);
            on_wire.sent(110);
        };
        assert_eq!(looks(&mut slow, 1000, refill), None);
    }

    #[test]
    fn what_collectives_owe_holds_all_and_what_others_owe_holds_all_but_collectives() {
        let mut on_wire = OnWire::default();
        let changes = |on_wire: &OnWire| on_wire.changes(WINDOW).collect::<Vec<_>>();
        on_wire.owes(Stage::P2d, WINDOW / WINDOW_SHARE);
        assert_eq!(changes(&on_wire), [], "a chunk costs nothing");
        on_wire.owes(Stage::P2d, 1);
        assert_eq!(changes(&on_wire), [(Class::Other, true)]);
        on_wire.held = [false, true];
        on_wire.paid(Stage::P2d, 2);
        assert_eq!(changes(&on_wire), [], "half of it has to be paid");
        on_wire.owes(Stage::Collective, WINDOW);
        assert_eq!(changes(&on_wire), [(Class::Collective, true)]);
        on_wire.held = [true, true];
        assert!(on_wire.holds(Stage::Collective) && on_wire.holds(Stage::Weights));
        on_wire.paid(Stage::Collective, WINDOW);
        on_wire.paid(Stage::P2d, WINDOW);
        let none = [(Class::Collective, false), (Class::Other, false)];
        assert_eq!(changes(&on_wire), none);
        assert_eq!(on_wire.owed(), 0);
    }
}
