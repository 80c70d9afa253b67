//! How fast a port delivers while it is backlogged.
//!
//! Not in the paper, whose ports have their whole rate. If two hosts send to one, each gets half of
//! it. A deadline that is feasible at the port's rate is then missed by a little, and its bytes
//! took the port from a request that could have been in time. The port has no view of the other
//! host, but it sees its own bytes delivered. While flows wait because there is no room:
//!
//! ```text
//! r ← r + (min(S / Δt, B) − r) · min(S / (4 · W), 1)    [bytes/s], r = B at first
//!          S = bytes delivered in Δt, at least W / 2
//!          B = the port's rate, W = its window in bytes
//! ```
//!
//! The mean is over about four windows: it has to follow the other host, which begins and stops
//! with each of its requests. So it says nothing about later than that, and only [`HORIZON`]
//! windows of a transfer are judged by it: a request that is given up stays so. It is a mean of
//! rates and not of times, which a single pause of the network would raise many times over.
//! docs/notes/whole-transfers.md has what this is worth.
//!
//! It counts only while flows wait. If no flow was refused between two deliveries, or nothing was
//! delivered for the time of four windows, what other hosts do is not known any more.

use crate::time::{Span, Time};

/// The weight of delivered bytes in the mean is their share of this many windows. No more of a
/// transfer is judged by the mean.
pub(super) const HORIZON: u64 = 4;

/// Mean rate of delivery while flows wait for room.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BacklogRate {
    /// When bytes were last counted, if flows have waited for room since.
    since: Option<Time>,
    /// When a flow was refused last.
    refused: Time,
    delivered: u64,
    last_delivery: Time,
    /// The mean in bytes per second.
    rate: u64,
}

impl BacklogRate {
    /// Notes that a flow waits because the window is full.
    #[inline]
    pub(super) fn refused(&mut self, now: Time, window: u64, port_rate: u64) {
        let Some(since) = self.since.filter(|_| !self.is_stale(now, window)) else {
            *self = Self { since: Some(now), refused: now, rate: port_rate, ..Self::default() };
            return;
        };
        self.refused = now;
        let took = self.last_delivery.since(since);
        // Chunks may be reported in pairs, and a pair in two rounds.
        if self.delivered < window / 2 || took == Span::ZERO {
            return;
        }
        let per_second = u128::from(self.delivered) * 1_000_000_000 / u128::from(took.0);
        let rate = per_second.min(u128::from(port_rate)) as i128;
        let all = window.saturating_mul(HORIZON).max(1);
        let change = (rate - i128::from(self.rate)) * i128::from(self.delivered.min(all));
        self.rate = (i128::from(self.rate) + change / i128::from(all)).max(1) as u64;
        (self.since, self.delivered) = (Some(now), 0);
    }

    /// Reports whether nothing was delivered for so long that the port was probably idle.
    fn is_stale(self, now: Time, window: u64) -> bool {
        let last = self.since.map_or(Time::ZERO, |since| since.max(self.last_delivery));
        now.since(last) > Span::transfer(window.saturating_mul(HORIZON), self.rate)
    }

    /// Counts bytes that were delivered, if flows wait: they are the next sample's `S`.
    #[inline]
    pub(super) fn delivered(&mut self, now: Time, bytes: u64) {
        if self.since.is_none() || bytes == 0 {
            return;
        }
        if self.refused < self.last_delivery && self.last_delivery < now {
            // No flow was refused after the delivery before, so none waited.
            self.pause();
            return;
        }
        self.delivered = self.delivered.saturating_add(bytes);
        self.last_delivery = now;
    }

    /// Ends the measurement, until a flow is refused again.
    #[inline]
    pub(super) fn pause(&mut self) {
        self.since = None;
    }

    /// Returns the mean in bytes per second if flows waited lately, else the port's rate.
    pub(super) fn on(self, now: Time, window: u64, port_rate: u64) -> u64 {
        match self.since {
            Some(_) if !self.is_stale(now, window) => self.rate.min(port_rate),
            _ => port_rate,
        }
    }
}
