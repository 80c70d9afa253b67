//! Fetch tokens: leases by which hosts read from a busy port.
//!
//! If many hosts read from one port at once, the network serves them alike, and the most urgent one
//! waits for all. No reader's host can see that. So readers report their fetches
//! ([`Tokens::want`]), and a bounded number of fetches of each victim port gets tokens: the first
//! by rank, and then by arrival.
//!
//! * *Blocking fetches go.* A GPU waits for what a running batch still has to read. Such a fetch
//!   gets a token regardless of the bound. The bound limits fetches ahead, of batches that have not
//!   started (MFS §2.2, stage 1). Layers are left to the readers' daemons.
//! * *Preemption.* A fetch that becomes more urgent than one that holds a token takes that token.
//!   The other fetch waits again.
//! * *Leases.* When a lease ends, the next reader gets a token, even if the fetch has not finished.
//!   So a reader that died or lies delays a port by one lease. Its fetch may go on.
//! * *No permits.* A reader only waits if its daemon got a message to wait, and only for a bounded
//!   time. A lost message therefore costs order and not progress.

use std::collections::{BTreeMap, BTreeSet};

use laxity_policy::{PortId, Span, Time};

use super::table::{Key, Table};

/// The settings of fetch tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenPolicy {
    /// Most fetches that hold a token at one port.
    pub(crate) per_port: usize,
    pub(crate) lease: Span,
}

/// The key by which fetches get tokens, smallest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FetchRank {
    /// How much depends on the fetch.
    pub(crate) need: Need,
    pub(crate) sort_key: u64,
}

impl FetchRank {
    /// The rank of a fetch whose batch has ended.
    pub(crate) const LAST: Self = Self { need: Need::Doomed, sort_key: u64::MAX };
}

/// How much depends on a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Need {
    /// The fetch's batch runs and stalls without it.
    Blocking,
    /// The fetch's batch has not started.
    Ahead,
    /// The fetch's request is pruned.
    Doomed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    Waiting,
    /// The fetch holds a token until this instant.
    Granted(Time),
    /// The fetch's lease is over. It may go on and no longer counts.
    Expired,
}

#[derive(Debug)]
struct Fetch {
    victim: PortId,
    rank: FetchRank,
    turn: Turn,
}

#[derive(Debug, Default)]
struct Victim {
    waiting: BTreeSet<(FetchRank, Key)>,
    granted: BTreeSet<(FetchRank, Key)>,
}

impl Victim {
    fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.granted.is_empty()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Tokens {
    fetches: Table<Fetch>,
    victims: BTreeMap<PortId, Victim>,
    leases: BTreeSet<(Time, Key)>,
    /// Victim ports at which a fetch may get a token.
    open: BTreeSet<PortId>,
    /// Fetches whose hosts have no message about them yet.
    fresh: Vec<Key>,
}

impl Tokens {
    /// Adds a fetch from `victim` that waits for a token. The caller bounds their number.
    pub(crate) fn want(&mut self, victim: PortId, rank: FetchRank) -> Key {
        let key = self.fetches.insert(Fetch { victim, rank, turn: Turn::Waiting });
        let port = self.victims.entry(victim).or_default();
        port.waiting.insert((rank, key));
        self.open.insert(victim);
        self.fresh.push(key);
        key
    }

    /// Removes a fetch that is over or not wanted any more.
    pub(crate) fn finish(&mut self, key: Key) {
        let Some(fetch) = self.fetches.remove(key) else {
            return;
        };
        let Some(port) = self.victims.get_mut(&fetch.victim) else {
            return;
        };
        match fetch.turn {
            Turn::Waiting => {
                port.waiting.remove(&(fetch.rank, key));
            }
            Turn::Granted(until) => {
                port.granted.remove(&(fetch.rank, key));
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

    pub(crate) fn rerank(&mut self, key: Key, rank: FetchRank) {
        let Some(fetch) = self.fetches.get_mut(key) else {
            return;
        };
        let before = core::mem::replace(&mut fetch.rank, rank);
        let Some(port) = self.victims.get_mut(&fetch.victim) else {
            return;
        };
        let among = match fetch.turn {
            Turn::Waiting => &mut port.waiting,
            Turn::Granted(_) => &mut port.granted,
            Turn::Expired => return,
        };
        if among.remove(&(before, key)) {
            among.insert((rank, key));
            self.open.insert(fetch.victim);
        }
    }

    pub(crate) fn turn(&self, key: Key) -> Option<Turn> {
        self.fetches.get(key).map(|fetch| fetch.turn)
    }

    /// Returns how many fetches wait at `victim`, and how many hold a token.
    #[cfg(test)]
    pub(crate) fn at(&self, victim: PortId) -> (usize, usize) {
        let port = self.victims.get(&victim);
        port.map_or((0, 0), |port| (port.waiting.len(), port.granted.len()))
    }

    /// Ends leases that are over and gives tokens to the next fetches. Returns the fetches whose
    /// hosts need a message: those that got a token, and those that have to wait for the first time
    /// or again.
    pub(crate) fn assign(&mut self, now: Time, policy: TokenPolicy) -> Vec<Key> {
        while let Some(&(until, key)) = self.leases.first()
            && until <= now
        {
            self.leases.pop_first();
            if let Some(fetch) = self.fetches.get_mut(key) {
                fetch.turn = Turn::Expired;
                if let Some(port) = self.victims.get_mut(&fetch.victim) {
                    port.granted.remove(&(fetch.rank, key));
                    self.open.insert(fetch.victim);
                }
            }
        }
        let mut turned = Vec::new();
        while let Some(victim) = self.open.pop_first() {
            let Some(port) = self.victims.get_mut(&victim) else {
                continue;
            };
            loop {
                let has_room = port.granted.len() < policy.per_port;
                let last = port.granted.last().copied();
                let last = last.filter(|(rank, _)| rank.need != Need::Blocking);
                let first = port.waiting.first().copied();
                let is_before = first.is_some_and(|first| last.is_some_and(|last| first < last));
                let blocks = first.is_some_and(|(rank, _)| rank.need == Need::Blocking);
                if port.granted.len() > policy.per_port && last.is_some() || is_before && !has_room
                {
                    let Some(last) = last else { break };
                    port.granted.remove(&last);
                    port.waiting.insert(last);
                    if let Some(fetch) = self.fetches.get_mut(last.1) {
                        if let Turn::Granted(until) = fetch.turn {
                            self.leases.remove(&(until, last.1));
                        }
                        fetch.turn = Turn::Waiting;
                    }
                    turned.push(last.1);
                } else if let Some(first) = first.filter(|_| has_room || blocks) {
                    let until = now + policy.lease;
                    port.waiting.remove(&first);
                    port.granted.insert(first);
                    self.leases.insert((until, first.1));
                    if let Some(fetch) = self.fetches.get_mut(first.1) {
                        fetch.turn = Turn::Granted(until);
                    }
                    turned.push(first.1);
                } else {
                    break;
                }
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

    /// Returns when [`Tokens::assign`] is due. It is due at once if a fetch may get a token.
    pub(crate) fn next_deadline(&self) -> Option<Time> {
        if self.open.is_empty() {
            self.leases.first().map(|&(until, _)| until)
        } else {
            Some(Time::ZERO)
        }
    }

    /// Makes all victim ports due, since the policy may allow more tokens than before.
    pub(crate) fn reopen(&mut self) {
        self.open.extend(self.victims.keys());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const POLICY: TokenPolicy = TokenPolicy { per_port: 2, lease: Span(100) };
    const HOT: PortId = PortId(7);

    const fn ranked(need: Need, sort_key: u64) -> FetchRank {
        FetchRank { need, sort_key }
    }

    const fn ahead(sort_key: u64) -> FetchRank {
        ranked(Need::Ahead, sort_key)
    }

    #[test]
    fn readers_of_a_hot_port_are_let_in_by_rank_and_few_at_a_time() {
        let mut tokens = Tokens::default();
        let [slow, urgent, middle] = [900, 100, 500].map(|rank| tokens.want(HOT, ahead(rank)));
        let elsewhere = tokens.want(PortId(8), ahead(999));
        // The fetch that has to wait is in the list, too.
        let told = tokens.assign(Time(0), POLICY);
        assert_eq!(told, [urgent, middle, elsewhere, slow]);
        assert_eq!(tokens.at(HOT), (1, 2));
        assert_eq!(tokens.turn(slow), Some(Turn::Waiting));
        tokens.finish(urgent);
        assert_eq!(tokens.assign(Time(1), POLICY), [slow]);
    }

    #[test]
    fn the_more_urgent_takes_the_token_of_the_least_urgent_and_gives_it_back() {
        let mut tokens = Tokens::default();
        let [first, second] = [300, 200].map(|rank| tokens.want(HOT, ahead(rank)));
        tokens.assign(Time(0), POLICY);
        let urgent = tokens.want(HOT, ahead(100));
        let less = tokens.want(HOT, ahead(400));
        assert_eq!(tokens.assign(Time(5), POLICY), [first, urgent, less]);
        let turns = |tokens: &Tokens| [first, second, urgent].map(|key| tokens.turn(key));
        let waits = Some(Turn::Waiting);
        assert_eq!(turns(&tokens)[0], waits);
        assert_eq!(tokens.at(HOT), (2, 2));
        // The lease of the token that was taken away ends nothing later.
        assert!(tokens.assign(Time(99), POLICY).is_empty());
        tokens.finish(urgent);
        assert_eq!(tokens.assign(Time(99), POLICY), [first]);
        assert_eq!(tokens.turn(first), Some(Turn::Granted(Time(199))));
        tokens.rerank(first, ahead(50));
        tokens.rerank(less, ahead(150));
        assert_eq!(tokens.assign(Time(99), POLICY), [second, less]);
    }

    #[test]
    fn who_blocks_a_gpu_is_let_in_beyond_the_bound_and_those_that_look_ahead_make_room() {
        let mut tokens = Tokens::default();
        let [one, two] = [1, 2].map(|rank| tokens.want(HOT, ahead(rank)));
        let doomed = tokens.want(HOT, ranked(Need::Doomed, 0));
        assert_eq!(tokens.assign(Time(0), POLICY), [one, two, doomed]);
        let blocking = [7, 8, 9].map(|rank| tokens.want(HOT, ranked(Need::Blocking, rank)));
        tokens.assign(Time(1), POLICY);
        let waits = Some(Turn::Waiting);
        assert_eq!([one, two, doomed].map(|key| tokens.turn(key)), [waits; 3]);
        assert_eq!(tokens.at(HOT), (3, 3));
        // The batch of this fetch starts.
        tokens.rerank(two, ranked(Need::Blocking, 2));
        assert_eq!(tokens.assign(Time(2), POLICY), [two]);
        for key in blocking {
            tokens.finish(key);
        }
        assert_eq!(tokens.assign(Time(3), POLICY), [one]);
        tokens.finish(one);
        assert_eq!(tokens.assign(Time(4), POLICY), [doomed]);
    }

    #[test]
    fn a_reader_that_never_finishes_holds_others_up_for_one_lease() {
        let mut tokens = Tokens::default();
        let [one, two, next] = [1, 2, 3].map(|rank| tokens.want(HOT, ahead(rank)));
        assert_eq!(tokens.assign(Time(0), POLICY), [one, two, next]);
        assert_eq!(tokens.next_deadline(), Some(Time(100)));
        assert!(tokens.assign(Time(99), POLICY).is_empty());
        assert_eq!(tokens.assign(Time(100), POLICY), [next]);
        assert_eq!(tokens.turn(one), Some(Turn::Expired));
        tokens.finish(one);
        assert_eq!(tokens.at(HOT), (0, 1));
    }

    #[test]
    fn a_fetch_whose_batch_became_urgent_overtakes() {
        let mut tokens = Tokens::default();
        let [_, _, third, fourth] = [1, 2, 3, 4].map(|rank| tokens.want(HOT, ahead(rank)));
        let first = tokens.assign(Time(0), POLICY);
        tokens.rerank(fourth, ahead(2));
        tokens.finish(first[0]);
        assert_eq!(tokens.assign(Time(1), POLICY), [fourth]);
        assert_eq!(tokens.turn(third), Some(Turn::Waiting));
    }

    proptest! {
        #[test]
        fn the_bound_holds_and_everybody_is_let_in_at_last(
            steps in proptest::collection::vec((0_u32..3, 0_u64..50, 0_u8..4), 1..200),
        ) {
            let mut tokens = Tokens::default();
            let (mut living, mut now) = (Vec::new(), 0);
            let of = |rank: u64| {
                let need = [Need::Blocking, Need::Ahead, Need::Ahead, Need::Doomed];
                ranked(need[rank as usize % 4], rank)
            };
            for (port, rank, what) in steps {
                now += rank;
                match what {
                    0 | 1 => living.push(tokens.want(PortId(port), of(rank))),
                    2 if !living.is_empty() => {
                        tokens.finish(living.swap_remove(rank as usize % living.len()));
                    }
                    _ => if let Some(&key) = living.first() { tokens.rerank(key, of(rank)) },
                }
                tokens.assign(Time(now), POLICY);
                for port in 0..3 {
                    let (waiting, granted) = tokens.at(PortId(port));
                    prop_assert!(waiting == 0 || granted >= POLICY.per_port, "work conserving");
                    let keys = |turn: fn(&Turn) -> bool| {
                        let of = |key: &&Key| {
                            let fetch = tokens.fetches.get(**key);
                            fetch.is_some_and(|f| f.victim == PortId(port) && turn(&f.turn))
                        };
                        let rank = |key: &Key| tokens.fetches.get(*key).map(|f| (f.rank, *key));
                        living.iter().filter(of).filter_map(rank).collect::<Vec<_>>()
                    };
                    let worst = keys(|turn| matches!(turn, Turn::Granted(_))).into_iter().max();
                    let best = keys(|turn| *turn == Turn::Waiting).into_iter().min();
                    prop_assert!(best.is_none_or(|best| Some(best) > worst), "by rank");
                    let beyond = granted > POLICY.per_port;
                    let blocks = |(rank, _): (FetchRank, Key)| rank.need == Need::Blocking;
                    prop_assert!(!beyond || worst.is_some_and(blocks), "bounded");
                    prop_assert!(!best.is_some_and(blocks), "whoever blocks goes");
                }
            }
            for _ in 0..living.len() {
                now += POLICY.lease.0;
                tokens.assign(Time(now), POLICY);
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
