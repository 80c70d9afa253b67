//! Fetch tokens: who may read from a hot port now.
//!
//! Many hosts that read from one port at once make an incast that no reader's host can see, and the network then serves
//! them alike: the most urgent waits for all. So readers tell ([`Tokens::want`]), and of those that want
//! one victim port a bounded number is under way at a time: the first in the order of ranks, equals by arrival.
//!
//! * *Preemption.* Whoever becomes more urgent than one that is under way takes its token; that one waits
//!   again, with what it has still to fetch.
//! * *Leases.* A token is good for a while. Then the next reader is let in, whether or not the fetch has finished: a
//!   reader that died, or lies, holds a port up for one lease. The fetch itself goes on; nothing is taken away.
//! * *No permits.* A reader goes ahead unless it was told to wait, and does not wait for ever, so a lost word costs order and
//!   not progress.

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
    granted: BTreeSet<(u64, Key)>,
}

impl Victim {
    fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.granted.is_empty()
    }
}

/// All fetches of the cluster. See the module.
#[derive(Debug, Default)]
pub(crate) struct Tokens {
    fetches: Table<Fetch>,
    victims: BTreeMap<PortId, Victim>,
    leases: BTreeSet<(Time, Key)>,
    /// Victims where somebody may be let in.
    open: BTreeSet<PortId>,
    /// Fetches of which nothing was said so far.
    fresh: Vec<Key>,
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
        self.fresh.push(key);
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
                port.granted.remove(&(fetch.sort_key, key));
                self.leases.remove(&(until, key));
                self.open.insert(fetch.victim);
            }
            Turn::Expired => {}
        }
        if port.is_empty() {
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
        let Some(port) = self.victims.get_mut(&fetch.victim) else {
            return;
        };
        let among = match fetch.turn {
            Turn::Waiting => &mut port.waiting,
            Turn::Granted(_) => &mut port.granted,
            Turn::Expired => return,
        };
        if among.remove(&(before, key)) {
            among.insert((sort_key, key));
            self.open.insert(fetch.victim);
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
        port.map_or((0, 0), |port| (port.waiting.len(), port.granted.len()))
    }

    /// Ends leases that are over, and lets in who may be. Gives the fetches of whose turn their host is to be told:
    /// those that got a token, those that have to wait, for the first time or again.
    pub(crate) fn grant(&mut self, now: Time, terms: TokenTerms) -> Vec<Key> {
        while let Some(&(until, key)) = self.leases.first()
            && until <= now
        {
            self.leases.pop_first();
            if let Some(fetch) = self.fetches.get_mut(key) {
                fetch.turn = Turn::Expired;
                if let Some(port) = self.victims.get_mut(&fetch.victim) {
                    port.granted.remove(&(fetch.sort_key, key));
                    self.open.insert(fetch.victim);
                }
            }
        }
        let mut turned = Vec::new();
        while let Some(victim) = self.open.pop_first() {
            let Some(port) = self.victims.get_mut(&victim) else {
                continue;
            };
            while let Some(&first) = port.waiting.first() {
                if port.granted.len() >= terms.per_port {
                    let Some(&last) = port.granted.last().filter(|&&last| first < last) else {
                        break;
                    };
                    port.granted.remove(&last);
                    port.waiting.insert(last);
                    if let Some(fetch) = self.fetches.get_mut(last.1) {
                        if let Turn::Granted(until) = fetch.turn {
                            self.leases.remove(&(until, last.1));
                        }
                        fetch.turn = Turn::Waiting;
                    }
                    turned.push(last.1);
                }
                let until = now + terms.lease;
                port.waiting.remove(&first);
                port.granted.insert(first);
                self.leases.insert((until, first.1));
                if let Some(fetch) = self.fetches.get_mut(first.1) {
                    fetch.turn = Turn::Granted(until);
                }
                turned.push(first.1);
            }
            if port.is_empty() {
                self.victims.remove(&victim);
            }
        }
        let fresh = core::mem::take(&mut self.fresh);
        let waits = |key: &Key| self.turn(*key) == Some(Turn::Waiting);
        turned.extend(fresh.into_iter().filter(waits));
        turned
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
        // The one that has to wait is told, too.
        let told = tokens.grant(Time(0), TERMS);
        assert_eq!(told, [urgent, middle, elsewhere, slow]);
        assert_eq!(tokens.at(HOT), (1, 2));
        assert_eq!(tokens.turn(slow), Some(Turn::Waiting));
        tokens.finish(urgent);
        assert_eq!(tokens.grant(Time(1), TERMS), [slow]);
    }

    #[test]
    fn the_more_urgent_takes_the_token_of_the_least_urgent_and_gives_it_back() {
        let mut tokens = Tokens::default();
        let [first, second] = [300, 200].map(|rank| tokens.want(HOT, rank));
        tokens.grant(Time(0), TERMS);
        let urgent = tokens.want(HOT, 100);
        let less = tokens.want(HOT, 400);
        assert_eq!(tokens.grant(Time(5), TERMS), [first, urgent, less]);
        let turns = |tokens: &Tokens| [first, second, urgent].map(|key| tokens.turn(key));
        let waits = Some(Turn::Waiting);
        assert_eq!(turns(&tokens)[0], waits);
        assert_eq!(tokens.at(HOT), (2, 2));
        // The lease that was taken away does not end anything later.
        assert!(tokens.grant(Time(99), TERMS).is_empty());
        tokens.finish(urgent);
        assert_eq!(tokens.grant(Time(99), TERMS), [first]);
        assert_eq!(tokens.turn(first), Some(Turn::Granted(Time(199))));
        tokens.rerank(first, 50);
        tokens.rerank(less, 150);
        assert_eq!(tokens.grant(Time(99), TERMS), [second, less]);
    }

    #[test]
    fn a_reader_that_never_finishes_holds_others_up_for_one_lease() {
        let mut tokens = Tokens::default();
        let [one, two, next] = [1, 2, 3].map(|rank| tokens.want(HOT, rank));
        assert_eq!(tokens.grant(Time(0), TERMS), [one, two, next]);
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
        tokens.rerank(fourth, 2);
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
                    let keys = |turn: fn(&Turn) -> bool| {
                        let of = |key: &&Key| {
                            let fetch = tokens.fetches.get(**key);
                            fetch.is_some_and(|f| f.victim == PortId(port) && turn(&f.turn))
                        };
                        let rank = |key: &Key| tokens.fetches.get(*key).map(|f| (f.sort_key, *key));
                        living.iter().filter(of).filter_map(rank).collect::<Vec<_>>()
                    };
                    let worst = keys(|turn| matches!(turn, Turn::Granted(_))).into_iter().max();
                    let best = keys(|turn| *turn == Turn::Waiting).into_iter().min();
                    prop_assert!(best.is_none_or(|best| Some(best) > worst), "by rank");
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
