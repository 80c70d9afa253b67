//! From what a run decided to what each host is told.

use laxity_policy::{PortId, Time};
use laxity_wire::v1::{self, Epoch, FromCoordinator};

use super::host::{Host, HostId};
use super::outbox::{self, Contents};
use super::table::Key;
use super::tokens::Turn;
use super::{Cluster, Taken, rank};

impl Cluster {
    pub(super) fn publish_ranks(&mut self) -> usize {
        let margin = self.policy().rank_margin;
        let mut changed = Vec::new();
        // A key follows RED, and RED of the others is what it was.
        for (batch, red) in self.admission.rescored() {
            let Some(known) = self.batches.get_mut(batch.0) else {
                continue;
            };
            let key = rank::follow(known.sort_key, red, margin);
            if known.sort_key != Some(key) {
                known.sort_key = Some(key);
                changed.push(batch.0);
            }
        }
        for &batch in &changed {
            self.note_rank(batch);
            self.rerank_fetches(batch);
        }
        changed.len()
    }

    /// Who was pruned since daemons were told, and who no longer is though it has not ended.
    pub(super) fn publish_pruned(&mut self) {
        let order = self.admission.order();
        let now_pruned: Vec<Key> = order.pruned.iter().map(|request| request.0).collect();
        let before = core::mem::take(&mut self.pruned);
        let new = |key: &&Key| before.binary_search(key).is_err();
        let freed = |key: &&Key| now_pruned.binary_search(key).is_err();
        let changed: Vec<(Key, bool)> = now_pruned
            .iter()
            .filter(new)
            .map(|&key| (key, true))
            .chain(before.iter().filter(freed).map(|&key| (key, false)))
            .collect();
        for (key, pruned) in changed {
            if let Some(request) = self.requests.get_mut(key) {
                request.pruned = pruned;
                let (batch, name) = (request.batch, request.name);
                self.note_pruned(batch, name);
                self.rerank_fetches(batch);
            }
        }
        self.pruned = now_pruned;
        let living = |key: &Key| self.requests.get(*key).is_some();
        self.pruned.retain(living);
    }

    /// Names of those of these requests that are pruned.
    pub(super) fn pruned_of<'a>(&self, requests: impl Iterator<Item = &'a Key>) -> Vec<u64> {
        requests
            .filter_map(|&request| self.requests.get(request))
            .filter(|request| request.pruned)
            .map(|request| request.name)
            .collect()
    }

    /// A host has come to take part in a batch: it has to be told of all there is.
    pub(super) fn note_all(&mut self, id: HostId, key: Key) {
        if let Some(batch) = self.batches.get(key) {
            self.work += batch.requests.len();
            let pruned = self.pruned_of(batch.requests.iter());
            self.note(id, batch.name, pruned);
        }
    }

    /// A host has to be told of a batch and of these requests, if only that they are none of its
    /// business any more.
    pub(super) fn note(&mut self, id: HostId, batch: u64, pruned: Vec<u64>) {
        let Some(host) = self.host_mut(id) else {
            return;
        };
        if host.gets_orders() && !host.outbox.full {
            host.outbox.ranks.insert(batch);
            host.outbox.pruned.extend(pruned);
            host.outbox.trim();
        }
    }

    /// The members of a batch have to be told of its rank.
    pub(super) fn note_rank(&mut self, batch: Key) {
        let Some(batch) = self.batches.get(batch) else {
            return;
        };
        for &id in &batch.members {
            let Some(host) = self.hosts[id.0 as usize].as_mut() else {
                continue;
            };
            if host.gets_orders() && !host.outbox.full {
                host.outbox.ranks.insert(batch.name);
                host.outbox.trim();
            }
            if host.gets_orders() && !core::mem::replace(&mut host.outbox.listed, true) {
                self.ready.push(id);
            }
        }
    }

    /// The members of its batch have to be told of a request.
    pub(super) fn note_pruned(&mut self, batch: Key, request: u64) {
        let Some(batch) = self.batches.get(batch) else {
            return;
        };
        for &id in &batch.members {
            let Some(host) = self.hosts[id.0 as usize].as_mut() else {
                continue;
            };
            if host.gets_orders() && !host.outbox.full {
                host.outbox.pruned.insert(request);
                host.outbox.trim();
            }
            if host.gets_orders() && !core::mem::replace(&mut host.outbox.listed, true) {
                self.ready.push(id);
            }
        }
    }

    /// Puts the host among those that have something waiting.
    pub(super) fn list(&mut self, id: HostId) {
        if let Some(host) = self.host_mut(id)
            && host.stream.is_some()
            && !host.outbox.is_empty()
            && !core::mem::replace(&mut host.outbox.listed, true)
        {
            self.ready.push(id);
        }
    }

    /// The next host that has something waiting, with its stream. Each is given once until
    /// [`Cluster::take`].
    pub fn poll_ready(&mut self) -> Option<(HostId, u64)> {
        while let Some(id) = self.ready.pop() {
            if let Some(host) = self.host_mut(id) {
                host.outbox.listed = false;
                if let Some(stream) = host.stream {
                    return Some((id, stream));
                }
            }
        }
        None
    }

    /// What waits for a host, in one order at most.
    pub fn take(&mut self, now: Time, id: HostId, stream: u64) -> Taken {
        let Some(host) = self.host_mut(id).filter(|host| host.stream == Some(stream)) else {
            return Taken::Replaced;
        };
        let mut frames: Vec<FromCoordinator> = host.outbox.take_letters().collect();
        if !host.gets_orders() || !host.outbox.wants_order() {
            return Taken::Frames(frames);
        }
        if !host.can(v1::Capability::OrderDeltas) {
            host.outbox.demand_full();
        }
        self.sequence += 1;
        let epoch = Epoch {
            term: self.term,
            sequence: self.sequence,
        };
        let contents = self.contents(now, id);
        let Some(host) = self.host_mut(id) else {
            return Taken::Replaced;
        };
        let base = if host.outbox.full {
            None
        } else {
            host.outbox.sent
        };
        host.outbox.full = false;
        host.outbox.answer = false;
        host.outbox.sent = Some(epoch);
        host.counters.orders += 1;
        host.told = true;
        let considered = host.considered;
        frames.extend(outbox::pieces(contents, epoch, base, considered));
        Taken::Frames(frames)
    }

    /// Fills in what the notes of a host's outbox stand for, as it is now.
    fn contents(&mut self, now: Time, id: HostId) -> Contents {
        let mut contents = Contents::default();
        let Some(host) = self.hosts[id.0 as usize].as_mut() else {
            return contents;
        };
        if host.outbox.sent.is_none() {
            host.outbox.demand_full();
        }
        let notes = (
            core::mem::take(&mut host.outbox.ranks),
            core::mem::take(&mut host.outbox.pruned),
            core::mem::take(&mut host.outbox.tokens),
        );
        let Some(host) = self.host(id) else {
            return contents;
        };
        let tell_turn = |contents: &mut Contents, fetch: u64| {
            let known = host.fetches.get(&fetch);
            match known.and_then(|known| self.tokens.turn(known.key)) {
                Some(Turn::Granted(until)) => contents.tokens.push(v1::FetchToken {
                    fetch,
                    lease_ns: until.since(now).0,
                }),
                Some(Turn::Waiting) => contents.held.push(fetch),
                // Nothing keeps it any more. A full order says so by not naming it.
                Some(Turn::Expired) | None if !host.outbox.full => {
                    contents.tokens.push(v1::FetchToken { fetch, lease_ns: 0 });
                }
                Some(Turn::Expired) | None => {}
            }
        };
        if host.outbox.full {
            for &key in host.batches.keys() {
                let Some(batch) = self.batches.get(key) else {
                    continue;
                };
                let rank = |sort_key| v1::Rank {
                    batch: batch.name,
                    sort_key,
                };
                contents.ranks.extend(batch.sort_key.map(rank));
                let requests = batch.requests.iter();
                let pruned = requests.filter_map(|&key| self.pruned_for(host, key));
                contents.pruned.extend(pruned);
            }
            for &fetch in host.fetches.keys() {
                tell_turn(&mut contents, fetch);
            }
            return contents;
        }
        for name in notes.0 {
            let key = self.batch_names.get(&(host.tenant, name));
            let batch = key
                .filter(|key| host.batches.contains_key(key))
                .and_then(|&key| self.batches.get(key));
            match batch.and_then(|batch| batch.sort_key) {
                Some(sort_key) => contents.ranks.push(v1::Rank {
                    batch: name,
                    sort_key,
                }),
                None => contents.unranked.push(name),
            }
        }
        for name in notes.1 {
            let key = self.request_names.get(&(host.tenant, name));
            match key.and_then(|&key| self.pruned_for(host, key)) {
                Some(pruned) => contents.pruned.push(pruned),
                None => contents.unpruned.push(name),
            }
        }
        for fetch in notes.2 {
            tell_turn(&mut contents, fetch);
        }
        contents
    }

    /// How a host is told of a pruned request; `None` if it is not pruned, or none of its business.
    fn pruned_for(&self, host: &Host, key: Key) -> Option<v1::Pruned> {
        let request = self.requests.get(key).filter(|request| request.pruned)?;
        // One that has left the batch, or whose request has moved on, has nothing to do with it any
        // more.
        if !host.batches.contains_key(&request.batch) {
            return None;
        }
        let mut told = v1::Pruned {
            request: request.name,
            ..v1::Pruned::default()
        };
        if host.can(v1::Capability::PruneCauses)
            && let Some(cause) = self.admission.prune_cause(laxity_policy::RequestId(key))
        {
            let batch = self.batches.get(cause.batch.0);
            let batch = batch.filter(|batch| batch.tenant == host.tenant);
            told.for_batch = batch.map_or(0, |batch| batch.name);
            told.bottleneck = cause.port.and_then(|port| self.port_name(port));
        }
        Some(told)
    }

    pub(super) fn port_name(&self, port: PortId) -> Option<v1::PortName> {
        let id = (*self.port_hosts.get(port.0 as usize)?)?;
        let host = self.host(id)?;
        let known = host.ports.iter().find(|known| known.id == port)?;
        Some(v1::PortName {
            host: host.name.clone(),
            port: known.info.name.clone(),
            direction: known.info.direction,
        })
    }
}
