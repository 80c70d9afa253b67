//! Turns the decisions of a run of admission into messages to each host.

use laxity_policy::RequestId;
use laxity_wire::v1::{self, Epoch, FromCoordinator};

use super::host::{Host, HostId};
use super::outbox::{self, Contents, Outbox};
use super::table::Key;
use super::{Cluster, Taken, rank};

impl Cluster {
    /// Updates the ranks after the REDs of the last run. Returns how many changed.
    pub(super) fn publish_ranks(&mut self) -> usize {
        let margin = self.policy().rank_margin;
        let mut changed = Vec::new();
        // No other REDs changed in the last run.
        for (batch, red) in self.workload.admission.rescored() {
            let Some(known) = self.workload.batches.get_mut(batch.0) else { continue };
            let key = rank::follow(known.sort_key, red, margin);
            if known.sort_key != Some(key) {
                known.sort_key = Some(key);
                changed.push((batch.0, known.name));
            }
        }
        for &(batch, name) in &changed {
            self.workload.tell_members(&mut self.hosts, batch, |outbox| {
                outbox.ranks.insert(name);
            });
        }
        changed.len()
    }

    /// Publishes requests that the last run pruned, and requests that it no longer prunes.
    pub(super) fn publish_pruned(&mut self) {
        let order = self.workload.admission.order();
        let mut pruned: Vec<Key> = order.pruned.iter().map(|request| request.0).collect();
        let before = core::mem::take(&mut self.workload.pruned);
        let new = pruned.iter().filter(|key| before.binary_search(key).is_err());
        let freed = before.iter().filter(|key| pruned.binary_search(key).is_err());
        let new = new.map(|&key| (key, true));
        let changed: Vec<(Key, bool)> = new.chain(freed.map(|&key| (key, false))).collect();
        for (key, is_pruned) in changed {
            if let Some(request) = self.workload.requests.get_mut(key) {
                request.pruned = is_pruned;
                let (batch, name) = (request.batch, request.name);
                self.workload.tell_pruned(&mut self.hosts, batch, name);
            }
        }
        pruned.retain(|&key| self.workload.requests.get(key).is_some());
        self.workload.pruned = pruned;
    }

    /// Removes and returns the next host from the list of hosts with messages, and its stream. A
    /// later change lists the host again.
    pub fn poll_ready(&mut self) -> Option<(HostId, u64)> {
        self.hosts.pop_ready()
    }

    /// Takes the messages that wait for a host, with at most one order.
    pub fn take(&mut self, id: HostId, stream: u64) -> Taken {
        let Some(host) = self.hosts.speaking(id, stream) else { return Taken::Replaced };
        let mut frames: Vec<FromCoordinator> = host.outbox.take_messages().collect();
        if !host.gets_orders() || !host.outbox.wants_order() {
            return Taken::Frames(frames);
        }
        self.sequence += 1;
        let epoch = Epoch { term: self.term, sequence: self.sequence };
        if host.outbox.sent.is_none() {
            host.outbox.demand_full();
        }
        let notes = host.outbox.take_notes();
        let contents = self.contents(id, &notes);
        let Some(host) = self.hosts.get_mut(id) else { return Taken::Replaced };
        let base = if host.outbox.full { None } else { host.outbox.sent };
        host.outbox.full = false;
        host.outbox.answer = false;
        host.outbox.sent = Some(epoch);
        host.counters.orders += 1;
        host.told = true;
        let considered = host.considered;
        frames.extend(outbox::pieces(contents, epoch, base, considered));
        Taken::Frames(frames)
    }

    fn contents(&self, id: HostId, notes: &Outbox) -> Contents {
        let mut contents = Contents::default();
        let Some(host) = self.hosts.get(id) else { return contents };
        if notes.full {
            for &key in host.batches.keys() {
                let Some(batch) = self.workload.batches.get(key) else { continue };
                let rank = |sort_key| v1::Rank { batch: batch.name, sort_key };
                contents.ranks.extend(batch.sort_key.map(rank));
                let requests = batch.requests.iter();
                let pruned = requests.filter_map(|&key| self.pruned_for(host, key));
                contents.pruned.extend(pruned);
            }
            return contents;
        }
        for &name in &notes.ranks {
            let key = self.workload.batch_named(host.tenant, name);
            let batch = key
                .filter(|key| host.batches.contains_key(key))
                .and_then(|key| self.workload.batches.get(key));
            match batch.and_then(|batch| batch.sort_key) {
                Some(sort_key) => contents.ranks.push(v1::Rank { batch: name, sort_key }),
                None => contents.unranked.push(name),
            }
        }
        for &name in &notes.pruned {
            let key = self.workload.request_named(host.tenant, name);
            match key.and_then(|key| self.pruned_for(host, key)) {
                Some(pruned) => contents.pruned.push(pruned),
                None => contents.unpruned.push(name),
            }
        }
        contents
    }

    /// Returns the entry of a pruned request in a host's order. `None` if it does not concern the
    /// host.
    fn pruned_for(&self, host: &Host, key: Key) -> Option<v1::Pruned> {
        let request = self.workload.requests.get(key).filter(|request| request.pruned)?;
        // The host may have left the batch, or the request may have moved to another batch.
        if !host.batches.contains_key(&request.batch) {
            return None;
        }
        let mut told = v1::Pruned { request: request.name, ..v1::Pruned::default() };
        if let Some(cause) = self.workload.admission.prune_cause(RequestId(key)) {
            let batch = self.workload.batches.get(cause.batch.0);
            let batch = batch.filter(|batch| batch.tenant == host.tenant);
            told.for_batch = batch.map_or(0, |batch| batch.name);
            told.bottleneck = cause.port.and_then(|port| self.hosts.port_name(port));
        }
        Some(told)
    }
}
