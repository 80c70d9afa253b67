//! Owners whose clients take permits and complete nothing.
//!
//! A client that recently lost more than a quarter of a window is unscheduled for a while: its
//! flows go out at once as scavenger. New clients of the same [`Owner`] are also unscheduled,
//! because a process could otherwise attach again and hold the window again. Clients of that owner
//! that are attached and complete their bytes are not affected. A client that leaves has lost its
//! owed bytes, but has only abandoned them if it began to owe within the last second. It has also
//! abandoned its bytes in flight if others wait for them. More than two abandoned windows of one
//! port are a loss. What an owner's clients abandon within [`ONE_CRASH`] counts as one window at
//! most, because a killed job may have several in flight to several peers.
//!
//! Distrust lasts [`FIRST`] completion timeouts at first, and twice as long each further time. So
//! the share of time in which one owner can hold a port shrinks. The record ends if the owner has
//! no loss for as long again after a distrust. One lost completion of a chunk costs an honest
//! client nothing.

use std::collections::HashMap;

use laxity_policy::{Span, Time};
use tracing::warn;

use crate::owner::Owner;

/// The duration of the first distrust, in completion timeouts.
const FIRST: u64 = 4;
/// Maximum number of distrusts of an owner that count. The length doubles with each of them but the
/// first.
const STRIKES_MAX: u32 = 8;
/// A client is distrusted if it lost more than a window divided by this number.
pub(super) const WINDOW_SHARE: u64 = 4;
/// The number that stands for one whole window in losses, since windows differ in size.
pub(super) const WINDOW: u64 = 1000;
/// Windows that clients of an owner may abandon within the length of a distrust.
const ABANDONED_WINDOWS: u64 = 2;
/// Clients that stop within this time belong to one crash.
const ONE_CRASH: Span = Span::from_millis(100);
/// Maximum number of owners with a record. Beyond that, the record that ends first is removed.
const OWNERS_MAX: usize = 1024;

/// The recent loss of one client: bytes that were written off, or that it owed and cancelled.
#[derive(Clone, Copy, Debug, Default)]
pub struct Loss {
    /// The loss, in parts of a [`WINDOW`].
    part: u64,
    until: Time,
}

impl Loss {
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

/// Returns `bytes` as a part of a window, in the unit of [`WINDOW`], rounded up so that no loss is
/// zero.
pub(super) fn part(bytes: u64, window: u64) -> u64 {
    let parts = u128::from(bytes) * u128::from(WINDOW);
    u64::try_from(parts.div_ceil(u128::from(window.max(1)))).unwrap_or(u64::MAX)
}

/// Bytes of one port that clients left in flight, in parts of a [`WINDOW`].
#[derive(Clone, Copy, Debug, Default)]
struct Abandoned {
    all: u64,
    /// When the latest crash began, and its bytes among them.
    crash: (Time, u64),
}

impl Abandoned {
    fn add(&mut self, now: Time, part: u64) {
        if now.since(self.crash.0) > ONE_CRASH || self.crash.0.since(now) > ONE_CRASH {
            self.crash = (now, 0);
        }
        let counted = part.min(WINDOW - self.crash.1);
        self.crash.1 += counted;
        self.all = self.all.saturating_add(counted);
    }
}

#[derive(Clone, Debug, Default)]
struct OwnerLosses {
    strikes: u32,
    distrusted: bool,
    abandoned: Vec<Abandoned>,
    /// When the distrust or the record ends.
    until: Time,
}

impl OwnerLosses {
    /// Distrusts the owner from now on, because a client lost too much.
    fn strike(&mut self, now: Time, timeout: Span) {
        if self.distrusted {
            return;
        }
        self.distrusted = true;
        self.abandoned.clear();
        self.strikes = (self.strikes + 1).min(STRIKES_MAX);
        self.until = now + self.term(timeout);
    }

    fn term(&self, timeout: Span) -> Span {
        timeout.times(FIRST << self.strikes.saturating_sub(1))
    }

    /// Ends distrust and losses that have expired at `now`. Returns whether the owner is trusted
    /// again.
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

#[derive(Debug, Default)]
pub struct OwnerTrust {
    /// How long bytes may take to complete before they are written off. Distrust is a multiple of
    /// it.
    pub timeout: Span,
    owners: HashMap<Owner, OwnerLosses>,
}

impl OwnerTrust {
    /// Reports whether new clients of the owner are unscheduled.
    pub fn distrusts(&self, owner: &Owner) -> bool {
        self.owners.get(owner).is_some_and(|record| record.distrusted)
    }

    /// Returns the distrusted owners in order, each with the end of its distrust.
    pub fn distrusted(&self) -> Vec<(Owner, Time)> {
        let distrusted = self.owners.iter().filter(|(_, record)| record.distrusted);
        let mut all: Vec<_> =
            distrusted.map(|(owner, record)| (owner.clone(), record.until)).collect();
        all.sort();
        all
    }

    fn record(&mut self, owner: &Owner) -> &mut OwnerLosses {
        if self.owners.len() >= OWNERS_MAX && !self.owners.contains_key(owner) {
            let first = self.owners.iter().min_by_key(|(owner, r)| (r.until, *owner));
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
                "distrusts an owner, whose clients hold permitted bytes and complete nothing: new \
                 clients of the owner run unscheduled for this time (`laxity status` lists such \
                 owners)"
            );
        }
    }

    /// Records that a client stopped and left with bytes in flight on a port, as a part of a
    /// [`WINDOW`].
    pub(super) fn abandon(&mut self, now: Time, owner: &Owner, port: usize, part: u64) {
        let timeout = self.timeout;
        let record = self.record(owner);
        if record.distrusted {
            return;
        }
        if record.abandoned.len() <= port {
            record.abandoned.resize(port + 1, Abandoned::default());
        }
        record.abandoned[port].add(now, part);
        let too_much = record.abandoned[port].all > ABANDONED_WINDOWS * WINDOW;
        record.until = record.until.max(now + record.term(timeout));
        if too_much {
            self.strike(now, owner);
        }
    }

    /// Ends distrust and losses that have expired at `now`. Returns the owners that are trusted
    /// again.
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
        Owner { uid, cgroup: "".into() }
    }

    fn trust() -> OwnerTrust {
        OwnerTrust { timeout: TIMEOUT, ..OwnerTrust::default() }
    }

    /// Returns the timeouts until the owner is trusted again.
    fn served(trust: &mut OwnerTrust, now: &mut Time, owner: &Owner) -> u64 {
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
        // A job is killed that has many processes for each of many ports.
        for (port, process) in (0..16).flat_map(|port| (0..16).map(move |process| (port, process)))
        {
            trust.abandon(now + Span(process), &owner, port, WINDOW);
        }
        assert!(!trust.distrusts(&owner), "one crash of a large job");
        for crash in 1..=2 {
            assert!(!trust.distrusts(&owner));
            trust.abandon(now + ONE_CRASH.times(2 * crash), &owner, 3, WINDOW);
        }
        assert!(trust.distrusts(&owner));
    }

    #[test]
    fn clients_that_stopped_together_are_one_crash_whenever_and_in_whatever_order_they_leave() {
        let (mut trust, owner) = (trust(), owner(7));
        let stopped = Time::ZERO + Span::from_millis(5000);
        for earlier in [0, 90, 40, 70] {
            trust.abandon(stopped - Span::from_millis(earlier), &owner, 0, WINDOW);
        }
        assert!(!trust.distrusts(&owner), "one crash");
        for earlier in [1000, 2000] {
            trust.abandon(stopped - Span::from_millis(earlier), &owner, 0, WINDOW);
        }
        assert!(trust.distrusts(&owner), "who leaves youngest first is three crashes, too");
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
