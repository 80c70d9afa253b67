//! The fetches of all hosts: the host of each one, and whether it holds a token ([`tokens`]).
//!
//! [`tokens`]: super::tokens

use std::collections::{BTreeMap, BTreeSet, HashMap};

use laxity_policy::{PortId, Time};

use super::host::HostId;
use super::table::Key;
use super::tokens::{FetchRank, TokenPolicy, Tokens, Turn};
use super::workload::Workload;

/// A fetch that waits for a token or is under way.
#[derive(Clone, Debug)]
pub(super) struct Fetch {
    /// The host's [`Host::mark`](super::host::Host::mark) when it last reported the fetch.
    pub(super) mark: u64,
    pub(super) batch: Key,
    pub(super) request: u64,
    pub(super) victim: PortId,
}

/// A fetch, named by its host and the host's own number.
type FetchId = (HostId, u64);

#[derive(Debug, Default)]
pub(super) struct Fetches {
    pub(super) tokens: Tokens,
    open: BTreeMap<FetchId, (Key, Fetch)>,
    ids: HashMap<Key, FetchId>,
    /// (batch, fetch) pairs of all batches that have not ended.
    of_batches: BTreeSet<(Key, Key)>,
}

impl Fetches {
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    pub(super) fn get_mut(&mut self, id: HostId, number: u64) -> Option<&mut Fetch> {
        Some(&mut self.open.get_mut(&(id, number))?.1)
    }

    /// Returns the fetches of a host with their numbers.
    pub(super) fn of_host(&self, id: HostId) -> impl Iterator<Item = (u64, &Fetch)> {
        let open = self.open.range((id, 0)..=(id, u64::MAX));
        open.map(|(&(_, number), (_, fetch))| (number, fetch))
    }

    pub(super) fn at_ports(&self, ports: &BTreeSet<PortId>) -> Vec<FetchId> {
        let open = self.open.iter();
        let from = open.filter(|(_, (_, fetch))| ports.contains(&fetch.victim));
        from.map(|(&id, _)| id).collect()
    }

    fn of_batch(&self, batch: Key) -> Vec<Key> {
        let fetches = self.of_batches.range((batch, 0)..=(batch, Key::MAX));
        fetches.map(|&(_, key)| key).collect()
    }

    pub(super) fn open(&mut self, id: HostId, number: u64, fetch: Fetch, rank: FetchRank) {
        let key = self.tokens.want(fetch.victim, rank);
        self.of_batches.insert((fetch.batch, key));
        self.ids.insert(key, (id, number));
        self.open.insert((id, number), (key, fetch));
    }

    /// Removes a fetch. Returns it and whether it still waited for a token.
    pub(super) fn close(&mut self, id: HostId, number: u64) -> Option<(Fetch, bool)> {
        let (key, fetch) = self.open.remove(&(id, number))?;
        let waits = self.tokens.turn(key) == Some(Turn::Waiting);
        self.tokens.finish(key);
        self.ids.remove(&key);
        self.of_batches.remove(&(fetch.batch, key));
        Some((fetch, waits))
    }

    pub(super) fn turn(&self, id: HostId, number: u64) -> Option<Turn> {
        let (key, _) = self.open.get(&(id, number))?;
        self.tokens.turn(*key)
    }

    /// Ranks the fetches of a batch anew, after a change to the batch or its requests.
    pub(super) fn rerank(&mut self, workload: &Workload, batch: Key) {
        let Some(tenant) = workload.batches.get(batch).map(|batch| batch.tenant) else {
            return;
        };
        for key in self.of_batch(batch) {
            if let Some((_, fetch)) = self.ids.get(&key).and_then(|id| self.open.get(id)) {
                let request = workload.request_named(tenant, fetch.request);
                self.tokens.rerank(key, workload.fetch_rank(batch, request));
            }
        }
    }

    /// Ranks the fetches of a batch that has ended last.
    pub(super) fn end_batch(&mut self, batch: Key) {
        for key in self.of_batch(batch) {
            self.of_batches.remove(&(batch, key));
            self.tokens.rerank(key, FetchRank::LAST);
        }
    }

    /// Moves fetches of a request to another batch, if their hosts take part in both batches.
    pub(super) fn move_request(&mut self, workload: &Workload, request: u64, from: Key, to: Key) {
        for key in self.of_batch(from) {
            let Some(id) = self.ids.get(&key) else {
                continue;
            };
            let Some((_, fetch)) = self.open.get_mut(id) else {
                continue;
            };
            if fetch.request == request && workload.takes_part(id.0, to) {
                fetch.batch = to;
                self.of_batches.remove(&(from, key));
                self.of_batches.insert((to, key));
            }
        }
        self.rerank(workload, to);
    }

    /// Ends leases that are over and assigns tokens. Returns the fetches whose hosts need a message
    /// about it.
    pub(super) fn assign_tokens(&mut self, now: Time, policy: TokenPolicy) -> Vec<FetchId> {
        let turned = self.tokens.assign(now, policy).into_iter();
        turned.filter_map(|key| self.ids.get(&key).copied()).collect()
    }
}
