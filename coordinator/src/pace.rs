//! The rate at which a stream is read, and at which a host begins streams: a token bucket without a
//! clock. Flow control makes a faster sender wait, and the streams of others are not affected.

use std::collections::HashMap;

use laxity_policy::{Span, Time};

/// The size of a burst, as the time that its events take at the sustained rate.
const BURST: Span = Span::from_millis(500);

/// A token bucket, stored as the instant at which it is full again.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    full_at: Time,
}

impl Pace {
    /// Counts `events`. Returns the pause that keeps the sustained rate of reads at `per_second`.
    pub(crate) fn took(&mut self, now: Time, events: usize, per_second: u32) -> Span {
        let cost = Span::transfer(events as u64, u64::from(per_second.max(1)));
        self.full_at = self.full_at.max(now) + cost;
        Span(self.full_at.since(now).0.saturating_sub(BURST.0))
    }
}

/// Hellos of one host per second. Four at once are free.
const HELLOS_PER_S: u32 = 8;
/// Longest wait of a Hello. A daemon waits longer for its Welcome.
const HELLO_WAIT_MAX: Span = Span::from_millis(1000);

/// The rates at which hosts say Hello.
#[derive(Debug, Default)]
pub(crate) struct Hellos {
    by_host: HashMap<String, Pace>,
    /// The rate of all hosts for which there was no room.
    others: Pace,
}

impl Hellos {
    /// Counts a Hello. Returns how long it has to wait, or `None` if it is refused. A refused one
    /// does not count. At most `hosts_max` hosts are remembered, and only while they would wait.
    pub(crate) fn said(&mut self, now: Time, host: &str, hosts_max: usize) -> Option<Span> {
        if self.by_host.len() >= hosts_max && !self.by_host.contains_key(host) {
            self.by_host.retain(|_, pace| pace.full_at > now);
        }
        let has_room = self.by_host.len() < hosts_max;
        let pace = match self.by_host.get_mut(host) {
            Some(pace) => pace,
            None if has_room => self.by_host.entry(host.to_owned()).or_default(),
            None => &mut self.others,
        };
        let mut counted = *pace;
        let wait = counted.took(now, 1, HELLOS_PER_S);
        (wait <= HELLO_WAIT_MAX).then(|| {
            *pace = counted;
            wait
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_says_hello_in_a_loop_waits_is_refused_and_disturbs_no_other() {
        let mut hellos = Hellos::default();
        let now = Time(1_000_000_000);
        let mut said = |now, host| hellos.said(now, host, 2);
        let waits: Vec<_> =
            (0..14).map(|_| said(now, "a").map(|wait| wait.0 / 1_000_000)).collect();
        let waiting = (1..=8).map(|nth| Some(nth * 125));
        let expected: Vec<_> = [Some(0); 4].into_iter().chain(waiting).chain([None; 2]).collect();
        assert_eq!(waits, expected);
        assert_eq!(said(now, "b"), Some(Span::ZERO));
        for host in ["c", "d", "e", "f"] {
            assert_eq!(said(now, host), Some(Span::ZERO));
        }
        assert_eq!(said(now, "g"), Some(Span::from_millis(125)), "they share what is left");
        assert_eq!(said(now + Span::from_millis(1000), "a"), Some(Span::from_millis(125)));
        assert_eq!(said(now + Span::from_millis(10_000), "g"), Some(Span::ZERO));
        assert_eq!(hellos.by_host.len(), 1, "the others are forgotten");
    }

    #[test]
    fn a_burst_is_free_and_what_follows_has_the_rate() {
        let mut pace = Pace::default();
        let now = Time(1_000_000_000);
        assert_eq!(pace.took(now, 500, 1000), Span::ZERO);
        assert_eq!(pace.took(now, 100, 1000), Span::from_millis(100));
        let later = now + Span::from_millis(600);
        assert_eq!(pace.took(later, 500, 1000), Span::ZERO);
    }
}
