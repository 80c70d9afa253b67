//! Fetch tokens: who may read from a hot port now.
//!
//! Many hosts that read from one port at once make an incast that no reader's host can see, and the network then serves
//! them alike: the most urgent waits for all. So readers ask ([`Tokens::want`]), and of those that want
//! one victim port a bounded number is under way at a time, in the order of ranks; equals by arrival.
//!
//! * *Leases.* A token is good for a while. Then the next reader is let in, whether or not the fetch has finished: a
//!   reader that died, or lies, holds a port up for one lease. The fetch itself goes on; nothing is taken away.
//! * *No permits.* A reader that can't wait any longer goes ahead unasked, so a lost token costs order and not progress.

use std::collections::{BTreeMap, BTreeSet};

use laxity_policy::{PortId, Span, Time};

use super::table::{Key, Table};

/// What is set of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenTerms {
    /// Fetches under way at a port.
    pub(crate) per_port: usize,
    /// How long a token is good for.
    pub(crate) lease: Span,
}

/// Where a fetch stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    Waiting,
    /// Holds a token until then.
    Granted(Time),
    /// Its lease is over. It goes on, but counts no more.
    Expired,
}

#[derive(Debug)]
struct Fetch {
    victim: PortId,
    sort_key: u64,
    turn: Turn,
}

#[derive(Debug, Default)]
struct Victim {
    waiting: BTreeSet<(u64, Key)>,
    granted: usize,
}

/// All fetches of the cluster. See the module.
#[derive(Debug, Default)]
pub(crate) struct Tokens {
    fetches: Table<Fetch>,
    victims: BTreeMap<PortId, Victim>,
    leases: BTreeSet<(Time, Key)>,
    /// Victims where somebody may be let in.
    open: BTreeSet<PortId>,
}

impl Tokens {
    /// A fetch from `victim` waits for its turn. The caller bounds their number.
    pub(crate) fn want(&mut self, victim: PortId, sort_key: u64) -> Key {
        let key = self.fetches.insert(Fetch {
            victim,
            sort_key,
            turn: Turn::Waiting,
        });
        let port = self.victims.entry(victim).or_default();
        port.waiting.insert((sort_key, key));
        self.open.insert(victim);
        key
    }

    /// The fetch is over, or not wanted any more.
    pub(crate) fn finish(&mut self, key: Key) {
        let Some(fetch) = self.fetches.remove(key) else {
            return;
        };
        let Some(port) = self.victims.get_mut(&fetch.victim) else {
            return;
        };
        match fetch.turn {
            Turn::Waiting => {
                port.waiting.remove(&(fetch.sort_key, key));
            }
            Turn::Granted(until) => {
                port.granted -= 1;
                self.leases.remove(&(until, key));
                self.open.insert(fetch.victim);
            }
            Turn::Expired => {}
        }
        if port.waiting.is_empty() && port.granted == 0 {
            self.victims.remove(&fetch.victim);
            self.open.remove(&fetch.victim);
        }
    }

    /// The batch of a fetch has another place now.
    pub(crate) fn rerank(&mut self, key: Key, sort_key: u64) {
        let Some(fetch) = self.fetches.get_mut(key) else {
            return;
        };
        let before = core::mem::replace(&mut fetch.sort_key, sort_key);
        if fetch.turn == Turn::Waiting
            && before != sort_key
            && let Some(port) = self.victims.get_mut(&fetch.victim)
        {
            port.waiting.remove(&(before, key));
            port.waiting.insert((sort_key, key));
        }
    }

    /// Where a fetch stands.
    pub(crate) fn turn(&self, key: Key) -> Option<Turn> {
        self.fetches.get(key).map(|fetch| fetch.turn)
    }

    /// Waiting and granted fetches at `victim`.
    #[cfg(test)]
    pub(crate) fn at(&self, victim: PortId) -> (usize, usize) {
        let port = self.victims.get(&victim);
        port.map_or((0, 0), |port| (port.waiting.len(), port.granted))
    }

    /// Ends leases that are over, and lets in who may be. Gives the fetches that got a token.
    pub(crate) fn grant(&mut self, now: Time, terms: TokenTerms) -> Vec<Key> {
        while let Some(&(until, key)) = self.leases.first()
            && until <= now
        {
            self.leases.pop_first();
            if let Some(fetch) = self.fetches.get_mut(key) {
                fetch.turn = Turn::Expired;
                if let Some(port) = self.victims.get_mut(&fetch.victim) {
                    port.granted -= 1;
                    self.open.insert(fetch.victim);
                }
            }
        }
        let mut granted = Vec::new();
        while let Some(victim) = self.open.pop_first() {
            let Some(port) = self.victims.get_mut(&victim) else {
                continue;
            };
            while port.granted < terms.per_port
                && let Some((_, key)) = port.waiting.pop_first()
            {
                let until = now + terms.lease;
                port.granted += 1;
                self.leases.insert((until, key));
                if let Some(fetch) = self.fetches.get_mut(key) {
                    fetch.turn = Turn::Granted(until);
                }
                granted.push(key);
            }
            if port.waiting.is_empty() && port.granted == 0 {
                self.victims.remove(&victim);
            }
        }
        granted
    }

    /// When [`Tokens::grant`] has something to do: now, if somebody may be let in.
    pub(crate) fn next_deadline(&self) -> Option<Time> {
        if self.open.is_empty() {
            self.leases.first().map(|&(until, _)| until)
        } else {
            Some(Time::ZERO)
        }
    }

    /// More may be under way than before.
    pub(crate) fn reopen(&mut self) {
        self.open.extend(self.victims.keys());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TERMS: TokenTerms = TokenTerms {
        per_port: 2,
        lease: Span(100),
    };
    const HOT: PortId = PortId(7);

    #[test]
    fn readers_of_a_hot_port_are_let_in_by_rank_and_few_at_a_time() {
        let mut tokens = Tokens::default();
        let [slow, urgent, middle] = [900, 100, 500].map(|rank| tokens.want(HOT, rank));
        let elsewhere = tokens.want(PortId(8), 999);
        assert_eq!(tokens.grant(Time(0), TERMS), [urgent, middle, elsewhere]);
        assert_eq!(tokens.at(HOT), (1, 2));
        tokens.finish(urgent);
        assert_eq!(tokens.grant(Time(1), TERMS), [slow]);
    }

    #[test]
    fn a_reader_that_never_finishes_holds_others_up_for_one_lease() {
        let mut tokens = Tokens::default();
        let [one, two, next] = [1, 2, 3].map(|rank| tokens.want(HOT, rank));
        assert_eq!(tokens.grant(Time(0), TERMS), [one, two]);
        assert_eq!(tokens.next_deadline(), Some(Time(100)));
        assert!(tokens.grant(Time(99), TERMS).is_empty());
        assert_eq!(tokens.grant(Time(100), TERMS), [next]);
        assert_eq!(tokens.turn(one), Some(Turn::Expired));
        tokens.finish(one);
        assert_eq!(tokens.at(HOT), (0, 1));
    }

    #[test]
    fn a_fetch_whose_batch_became_urgent_overtakes() {
        let mut tokens = Tokens::default();
        let [_, _, third, fourth] = [1, 2, 3, 4].map(|rank| tokens.want(HOT, rank));
        let first = tokens.grant(Time(0), TERMS);
        tokens.rerank(fourth, 0);
        tokens.finish(first[0]);
        assert_eq!(tokens.grant(Time(1), TERMS), [fourth]);
        assert_eq!(tokens.turn(third), Some(Turn::Waiting));
    }

    proptest! {
        #[test]
        fn the_bound_holds_and_everybody_is_let_in_at_last(
            steps in proptest::collection::vec((0_u32..3, 0_u64..50, 0_u8..4), 1..200),
        ) {
            let mut tokens = Tokens::default();
            let (mut living, mut now) = (Vec::new(), 0);
            for (port, rank, what) in steps {
                now += rank;
                match what {
                    0 | 1 => living.push(tokens.want(PortId(port), rank)),
                    2 if !living.is_empty() => {
                        tokens.finish(living.swap_remove(rank as usize % living.len()));
                    }
                    _ => if let Some(&key) = living.first() { tokens.rerank(key, rank) },
                }
                tokens.grant(Time(now), TERMS);
                for port in 0..3 {
                    let (waiting, granted) = tokens.at(PortId(port));
                    prop_assert!(granted <= TERMS.per_port);
                    prop_assert!(waiting == 0 || granted == TERMS.per_port, "work conserving");
                }
            }
            for _ in 0..living.len() {
                now += TERMS.lease.0;
                tokens.grant(Time(now), TERMS);
            }
            for &key in &living {
                prop_assert_ne!(tokens.turn(key), Some(Turn::Waiting));
            }
            for key in living {
                tokens.finish(key);
            }
            prop_assert!(tokens.leases.is_empty() && tokens.fetches.len() == 0);
        }
    }
}
