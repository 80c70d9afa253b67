//! Owners whose clients take permits and complete nothing, and what is remembered of them.
//!
//! A client that has lost more than a quarter of a window lately is not scheduled at all for a
//! while: what it submits goes out at once in the scavenger class. So is whoever of the same
//! [`Owner`] attaches meanwhile, because a process that attaches anew would otherwise have the
//! window again. Processes of that owner that are attached already and complete what they send are
//! not touched. A client that leaves with bytes that it owes has lost them. One that leaves with
//! bytes on the wire while others wait for them has abandoned them: more than two windows of those
//! on one port count as a loss. A job that is killed, whatever its size, abandons one.
//!
//! Distrust lasts [`FIRST`] timeouts the first time, then twice as long each time, so the share of
//! time in which one owner can hold a port shrinks towards nothing. It is forgotten after as long
//! a time without a loss. One lost completion of a chunk costs an honest client nothing.

use std::collections::HashMap;

use laxity_policy::{Span, Time};
use tracing::warn;

use crate::owner::Owner;

/// Length of the first distrust, in timeouts.
const FIRST: u64 = 4;
/// It doubles no more often than this.
const DOUBLINGS: u32 = 8;
/// A client is distrusted that has lost more than a window divided by this.
pub(super) const WINDOW_SHARE: u64 = 4;
/// A window, in the unit of losses: ports differ in their windows.
pub(super) const WINDOW: u64 = 1000;
/// Windows that clients of an owner may abandon within the time of a distrust.
const ABANDONED_WINDOWS: u64 = 2;
/// Owners of whom something is remembered. Beyond it the one whose term ends first is forgotten.
const OWNERS_MAX: usize = 1024;

/// What one client lost lately: bytes that were written off, or that it owed and cancelled.
#[derive(Clone, Copy, Debug, Default)]
pub struct Loss {
    /// Parts of a [`WINDOW`].
    part: u64,
    /// When it is forgotten.
    until: Time,
}

impl Loss {
    /// Adds `bytes` of a port with this window.
    pub fn add(&mut self, now: Time, bytes: u64, window: u64, timeout: Span) {
        self.part = self.part.saturating_add(part(bytes, window));
        self.until = now + timeout.times(FIRST);
    }

    pub(super) const fn is_too_much(&self) -> bool {
        self.part > WINDOW / WINDOW_SHARE
    }

    pub(super) fn forget(&mut self, now: Time) {
        if now >= self.until {
            self.part = 0;
        }
    }
}

/// `bytes` as a part of a window, in the unit of [`WINDOW`]. Rounded up: nothing is lost for free.
pub(super) fn part(bytes: u64, window: u64) -> u64 {
    let parts = u128::from(bytes) * u128::from(WINDOW);
    u64::try_from(parts.div_ceil(u128::from(window.max(1)))).unwrap_or(u64::MAX)
}

/// What the clients of one owner have lost lately.
#[derive(Clone, Debug, Default)]
struct Record {
    strikes: u32,
    distrusted: bool,
    /// Parts of a [`WINDOW`] that were abandoned, by port.
    abandoned: Vec<u64>,
    /// When the distrust ends, or the record is forgotten.
    until: Time,
}

impl Record {
    /// A client lost too much. The owner is distrusted from now on.
    fn strike(&mut self, now: Time, timeout: Span) {
        if self.distrusted {
            return;
        }
        self.distrusted = true;
        self.abandoned.clear();
        self.strikes = (self.strikes + 1).min(DOUBLINGS);
        self.until = now + self.term(timeout);
    }

    fn term(&self, timeout: Span) -> Span {
        timeout.times(FIRST << self.strikes.saturating_sub(1))
    }

    /// Time passes. True if the owner is trusted again.
    fn forgive(&mut self, now: Time, timeout: Span) -> bool {
        if now < self.until {
            return false;
        }
        if self.distrusted {
            self.distrusted = false;
            self.until = now + self.term(timeout);
            return true;
        }
        *self = Self::default();
        false
    }

    const fn is_clean(&self) -> bool {
        self.strikes == 0 && self.abandoned.is_empty()
    }
}

/// The owners of whom something is remembered.
#[derive(Debug, Default)]
pub struct Trust {
    /// Time after which what was not completed is written off. The unit of a distrust.
    pub timeout: Span,
    owners: HashMap<Owner, Record>,
}

impl Trust {
    /// Whether nothing of the owner's next client is to be scheduled.
    #[must_use]
    pub fn distrusts(&self, owner: &Owner) -> bool {
        self.owners
            .get(owner)
            .is_some_and(|record| record.distrusted)
    }

    /// Distrusted owners, and until when, in the order of their names.
    #[must_use]
    pub fn distrusted(&self) -> Vec<(Owner, Time)> {
        let distrusted = self.owners.iter().filter(|(_, record)| record.distrusted);
        let mut all: Vec<_> = distrusted
            .map(|(owner, record)| (owner.clone(), record.until))
            .collect();
        all.sort();
        all
    }

    fn record(&mut self, owner: &Owner) -> &mut Record {
        if self.owners.len() >= OWNERS_MAX && !self.owners.contains_key(owner) {
            let first = self
                .owners
                .iter()
                .min_by_key(|(owner, r)| (r.until, *owner));
            if let Some(first) = first.map(|(owner, _)| owner.clone()) {
                self.owners.remove(&first);
            }
        }
        self.owners.entry(owner.clone()).or_default()
    }

    pub(super) fn strike(&mut self, now: Time, owner: &Owner) {
        let timeout = self.timeout;
        let record = self.record(owner);
        if !record.distrusted {
            record.strike(now, timeout);
            let seconds = record.term(timeout).0 / 1_000_000_000;
            warn!(
                uid = owner.uid, cgroup = %owner.cgroup, strikes = record.strikes, seconds,
                "distrusts an owner, whose clients hold permitted bytes and complete nothing: what \
                 attaches of it goes unscheduled for so long (`laxity status` lists such owners)"
            );
        }
    }

    /// A client left with bytes on the wire of a port, this part of a [`WINDOW`].
    pub(super) fn abandon(&mut self, now: Time, owner: &Owner, port: usize, part: u64) {
        let timeout = self.timeout;
        let record = self.record(owner);
        if record.distrusted {
            return;
        }
        if record.abandoned.len() <= port {
            record.abandoned.resize(port + 1, 0);
        }
        let abandoned = &mut record.abandoned[port];
        *abandoned = abandoned.saturating_add(part);
        let too_much = *abandoned > ABANDONED_WINDOWS * WINDOW;
        record.until = record.until.max(now + record.term(timeout));
        if too_much {
            self.strike(now, owner);
        }
    }

    /// Time passes. Gives the owners that are trusted again.
    pub(super) fn forgive(&mut self, now: Time) -> Vec<Owner> {
        let timeout = self.timeout;
        let mut forgiven = Vec::new();
        self.owners.retain(|owner, record| {
            if record.forgive(now, timeout) {
                forgiven.push(owner.clone());
            }
            !record.is_clean()
        });
        forgiven
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Span = Span::from_millis(10);

    fn owner(uid: u32) -> Owner {
        Owner {
            uid,
            cgroup: "".into(),
        }
    }

    fn trust() -> Trust {
        Trust {
            timeout: TIMEOUT,
            ..Trust::default()
        }
    }

    /// Timeouts until the owner is trusted again.
    fn served(trust: &mut Trust, now: &mut Time, owner: &Owner) -> u64 {
        let struck = *now;
        while trust.forgive(*now).is_empty() {
            assert!(trust.distrusts(owner));
            *now = *now + TIMEOUT;
        }
        assert!(!trust.distrusts(owner));
        now.since(struck).0 / TIMEOUT.0
    }

    #[test]
    fn whose_clients_lose_windows_is_shut_out_ever_longer_and_forgiven_after_good_conduct() {
        let (mut trust, mut now, owner) = (trust(), Time::ZERO + TIMEOUT, owner(7));
        let mut terms = Vec::new();
        for _ in 0..4 {
            trust.strike(now, &owner);
            trust.strike(now, &owner);
            terms.push(served(&mut trust, &mut now, &owner));
        }
        assert_eq!(terms, [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST]);
        now = now + TIMEOUT.times(8 * FIRST);
        trust.forgive(now);
        assert!(trust.owners.is_empty(), "good conduct was not seen");
    }

    #[test]
    fn one_lost_chunk_costs_nothing_and_losses_that_are_far_apart_do_not_add_up() {
        let (mut loss, mut now) = (Loss::default(), Time::ZERO);
        for _ in 0..3 {
            loss.add(now, 25, 100, TIMEOUT);
            assert!(!loss.is_too_much());
            now = now + TIMEOUT.times(FIRST);
            loss.forget(now);
        }
        loss.add(now, 25, 100, TIMEOUT);
        loss.add(now, 1, u64::MAX, TIMEOUT);
        assert!(loss.is_too_much());
    }

    #[test]
    fn one_crash_is_forgotten_and_a_crash_loop_is_a_loss() {
        let (mut trust, mut now, owner) = (trust(), Time::ZERO + TIMEOUT, owner(7));
        for _ in 0..3 {
            trust.abandon(now, &owner, 0, WINDOW);
            assert!(!trust.distrusts(&owner));
            now = now + TIMEOUT.times(FIRST);
            trust.forgive(now);
            assert!(trust.owners.is_empty(), "a crash was not forgotten");
        }
        // A job of a process for each of many ports.
        for port in 0..16 {
            trust.abandon(now, &owner, port, WINDOW);
        }
        assert!(!trust.distrusts(&owner), "one crash of a large job");
        for _ in 0..2 {
            trust.abandon(now, &owner, 3, WINDOW);
            now = now + TIMEOUT;
        }
        assert!(trust.distrusts(&owner));
    }

    #[test]
    fn what_is_remembered_of_owners_is_bounded() {
        let (mut trust, mut now) = (trust(), Time::ZERO);
        for uid in 0..2 * OWNERS_MAX as u32 {
            trust.strike(now, &owner(uid));
            now = now + Span(1);
        }
        assert_eq!(trust.owners.len(), OWNERS_MAX);
        assert!(trust.distrusts(&owner(2 * OWNERS_MAX as u32 - 1)));
        assert!(!trust.distrusts(&owner(0)));
    }
}
