//! The bytes that one client has in flight on one port, and when the client counts as silent there.

use laxity_policy::{Span, Stage, Time};

use super::trust::WINDOW_SHARE;

/// The binary logarithm of 16: completing at most a sixteenth of the bytes is no progress.
pub(super) const TRICKLE_SHIFT: u32 = 4;
/// How long a client that keeps others waiting may complete nothing, besides the time of its bytes
/// on the port. An honest process on a busy machine rarely pauses for as long.
pub(super) const PATIENCE: Span = Span::from_millis(10);
/// A killed process completes nothing any more, but its connection ends only when the kernel has
/// freed its memory. Within this time, what it owes counts as abandoned, and not as lost.
const TEARDOWN: Span = Span::from_millis(1000);
/// The time between checks for silent clients, while anything waits.
pub(super) const LOOK_EVERY: Span = Span::from_millis(5);

/// The bytes of one client on one port, by the completions that the daemon has read.
#[derive(Clone, Copy, Debug, Default)]
pub struct OnWire {
    /// Bytes that are permitted, not completed and counted in the port's window.
    pub outstanding: u64,
    /// Bytes completed since `since`.
    pub completed: u64,
    /// Bytes outstanding at `since`. The client has to complete a sixteenth of them in time.
    asked: u64,
    /// When the client began to keep others waiting, or last made progress.
    pub(super) since: Time,
    /// The time of the last check. A check after a pause shows nothing about progress.
    looked: Time,
    /// Owed bytes, by [`WireClass`].
    owed: [u64; 2],
    /// Since when the client owes bytes, if it does.
    owes_since: Time,
    /// Whether flows of each [`WireClass`] are held.
    pub(super) held: [bool; 2],
}

/// The two classes of flows. With strict priorities in the fabric, collectives pass all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WireClass {
    Collective,
    Other,
}

impl WireClass {
    const ALL: [Self; 2] = [Self::Collective, Self::Other];

    pub(super) const fn of(stage: Stage) -> Self {
        match stage {
            Stage::Collective => Self::Collective,
            _ => Self::Other,
        }
    }
}

impl OnWire {
    pub const fn owed(&self) -> u64 {
        self.owed[0].saturating_add(self.owed[1])
    }

    /// Returns the owed bytes if the client has owed bytes for less than [`TEARDOWN`].
    pub(super) fn owed_lately(&self, now: Time) -> u64 {
        if now.since(self.owes_since) < TEARDOWN { self.owed() } else { 0 }
    }

    #[inline]
    pub const fn holds(&self, stage: Stage) -> bool {
        self.held[WireClass::of(stage) as usize]
    }

    pub const fn is_held(&self) -> bool {
        self.held[0] || self.held[1]
    }

    /// Returns when a leaving client counts as stopped: when it began to owe bytes, if that was
    /// within [`TEARDOWN`], else `now`.
    pub(super) fn stopped(&self, now: Time) -> Time {
        if self.owed_lately(now) > 0 { self.owes_since } else { now }
    }

    /// Adds bytes that were permitted or sent on credit.
    #[inline]
    pub const fn sent(&mut self, bytes: u64) {
        self.outstanding = self.outstanding.saturating_add(bytes);
    }

    /// Accounts for completed bytes that counted in the window.
    #[inline]
    pub const fn done(&mut self, bytes: u64) {
        self.outstanding = self.outstanding.saturating_sub(bytes);
        self.completed = self.completed.saturating_add(bytes);
    }

    /// Removes bytes from the window that will never complete.
    #[inline]
    pub const fn dropped(&mut self, bytes: u64) {
        self.outstanding = self.outstanding.saturating_sub(bytes);
    }

    /// Removes owed bytes that completed or were written off.
    pub const fn paid(&mut self, stage: Stage, bytes: u64) {
        let owed = &mut self.owed[WireClass::of(stage) as usize];
        *owed = owed.saturating_sub(bytes);
    }

    pub(super) fn owes(&mut self, now: Time, stage: Stage, bytes: u64) {
        if self.owed() == 0 {
            self.owes_since = now;
        }
        let owed = &mut self.owed[WireClass::of(stage) as usize];
        *owed = owed.saturating_add(bytes);
        self.dropped(bytes);
    }

    /// Reports whether the client is silent while its bytes keep others waiting. `patience` returns
    /// the time limit for a number of bytes. A client with several windows in flight need only
    /// complete a sixteenth of one.
    pub(super) fn is_silent(
        &mut self,
        now: Time,
        window: u64,
        patience: impl Fn(u64) -> Span,
    ) -> bool {
        let paused = !self.kept_others(now);
        self.looked = now;
        if paused || self.completed > self.asked.min(window) >> TRICKLE_SHIFT {
            self.ask(now);
            return false;
        }
        now.since(self.since) >= patience(self.asked)
    }

    /// Reports whether the client kept others waiting at a recent check.
    pub(super) fn kept_others(&self, now: Time) -> bool {
        self.looked != Time::ZERO && now.since(self.looked) <= LOOK_EVERY.times(4)
    }

    pub(super) fn ask(&mut self, now: Time) {
        (self.asked, self.completed, self.since) = (self.outstanding, 0, now);
    }

    /// Returns the classes whose state has to change, each with whether to hold it.
    pub(super) fn changes(&self, window: u64) -> impl Iterator<Item = (WireClass, bool)> {
        let [collective, other] = self.owed;
        let owed = [collective, collective.saturating_add(other)];
        let held = self.held;
        WireClass::ALL.into_iter().filter_map(move |class| {
            let (owed, held) = (owed[class as usize], held[class as usize]);
            // A class is released at half of the limit, so that one byte does not change it back.
            let limit = window / WINDOW_SHARE / if held { 2 } else { 1 };
            let hold = owed > limit;
            (hold != held).then_some((class, hold))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u64 = 100;

    fn at(ms: u64) -> Time {
        Time::ZERO + Span::from_millis(ms)
    }

    /// Checks every five milliseconds and returns when the client became silent.
    fn looks(on_wire: &mut OnWire, from: u64, each: impl Fn(&mut OnWire)) -> Option<u64> {
        (0..100).map(|look| from + 5 * look).find(|&ms| {
            each(on_wire);
            on_wire.is_silent(at(ms), 16 * WINDOW, |_| PATIENCE)
        })
    }

    #[test]
    fn a_client_that_completes_nothing_is_silent_after_its_patience_and_not_before_it_was_asked() {
        let mut on_wire = OnWire::default();
        on_wire.sent(WINDOW);
        assert_eq!(looks(&mut on_wire, 1000, |_| ()), Some(1010));
        // After a pause without checks, the time limit begins anew.
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
        let mut to_many = OnWire::default();
        to_many.sent(4 * 16 * WINDOW);
        let part = |on_wire: &mut OnWire| on_wire.done(WINDOW + 1);
        assert_eq!(looks(&mut to_many, 1000, part), None, "a sixteenth of one window each time");
    }

    #[test]
    fn what_collectives_owe_holds_all_and_what_others_owe_holds_all_but_collectives() {
        let mut on_wire = OnWire::default();
        let changes = |on_wire: &OnWire| on_wire.changes(WINDOW).collect::<Vec<_>>();
        on_wire.owes(at(1000), Stage::P2d, WINDOW / WINDOW_SHARE);
        assert_eq!(changes(&on_wire), [], "a chunk costs nothing");
        on_wire.owes(at(1999), Stage::P2d, 1);
        assert_eq!((on_wire.owed_lately(at(1999)), on_wire.owed_lately(at(2000))), (26, 0));
        assert_eq!(changes(&on_wire), [(WireClass::Other, true)]);
        on_wire.held = [false, true];
        on_wire.paid(Stage::P2d, 2);
        assert_eq!(changes(&on_wire), [], "half of it has to be paid");
        on_wire.owes(at(2000), Stage::Collective, WINDOW);
        assert_eq!(changes(&on_wire), [(WireClass::Collective, true)]);
        on_wire.held = [true, true];
        assert!(on_wire.holds(Stage::Collective) && on_wire.holds(Stage::Weights));
        on_wire.paid(Stage::Collective, WINDOW);
        on_wire.paid(Stage::P2d, WINDOW);
        let none = [(WireClass::Collective, false), (WireClass::Other, false)];
        assert_eq!(changes(&on_wire), none);
        assert_eq!(on_wire.owed(), 0);
    }
}
