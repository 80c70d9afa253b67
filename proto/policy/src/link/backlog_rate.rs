//! How fast a port delivers while it is backlogged.
//!
//! Not in the paper, whose ports have their whole rate. If two hosts send to one, each gets half of
//! it. A deadline that is feasible at the port's rate is then missed by a little, and its bytes
//! took the port from a request that could have been in time. The port has no view of the other
//! host, but it sees its own bytes delivered. While flows wait because the window is full, the time
//! between two refusals is what the bytes delivered in it took:
//!
//! ```text
//! s ← s + (Δt · B / S − s) · S / (4 · W)      s = 1 at first      [times the time at the port's rate]
//!                   S = bytes delivered in Δt, B = the port's bytes/s, W = the window in bytes
//! ```
//!
//! So the mean is over about four windows: it has to follow the other host, which begins and stops
//! with each of its requests. A longer mean gains less (docs/notes/whole-transfers.md). The first
//! refusal after a pause begins at `s = 1` again, since what other hosts do now is not known.

use crate::time::{Span, Time};

/// The weight of delivered bytes in the mean is their share of this many windows.
const WINDOWS: f64 = 4.0;

/// The time that delivery takes while flows wait for room, by that at the port's rate.
#[derive(Clone, Copy, Debug)]
pub(super) struct BacklogRate {
    /// When bytes were last counted, if flows have waited for room since.
    since: Option<Time>,
    delivered: u64,
    last_delivery: Time,
    slowness: f64,
}

impl Default for BacklogRate {
    fn default() -> Self {
        Self { since: None, delivered: 0, last_delivery: Time::ZERO, slowness: 1.0 }
    }
}

impl BacklogRate {
    /// Notes that a flow waits because the window is full.
    #[inline]
    pub(super) fn refused(&mut self, now: Time, window: u64, rate: u64) {
        match self.since {
            Some(_) if self.delivered == 0 => {}
            Some(since) => {
                let own = Span::transfer(self.delivered, rate).0.max(1) as f64;
                let weight = (self.delivered as f64 / (WINDOWS * window as f64)).min(1.0);
                self.slowness += (now.since(since).0 as f64 / own - self.slowness) * weight;
                (self.since, self.delivered) = (Some(now), 0);
            }
            None => *self = Self { since: Some(now), ..Self::default() },
        }
    }

    /// Notes delivered bytes. If no flow was refused since the delivery before, none waited, and the
    /// time says nothing.
    #[inline]
    pub(super) fn delivered(&mut self, now: Time, bytes: u64) {
        let Some(since) = self.since else { return };
        if since < self.last_delivery && self.last_delivery < now {
            self.pause();
            return;
        }
        self.delivered = self.delivered.saturating_add(bytes);
        self.last_delivery = now;
    }

    /// Notes that nothing is in flight.
    #[inline]
    pub(super) fn pause(&mut self) {
        self.since = None;
    }

    /// Returns how many times the time at the port's rate delivery takes, at least 1.
    pub(super) fn slowness(self) -> f64 {
        self.slowness.max(1.0)
    }
}
