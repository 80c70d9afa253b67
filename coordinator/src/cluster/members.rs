//! How hosts join and leave batches, and how requests and fetches come, move and go with all that
//! refers to them.

use std::collections::BTreeSet;

use laxity_policy::{PortId, Time};

use super::Cluster;
use super::batch::{ClusterBatch, ClusterRequest, ReportedLoad};
use super::host::{Charge, HostId};
use super::intake::ReportIntake;
use super::refusal::{Refused, not_yours, over_limit, unknown};
use super::table::Key;

/// Batches that a host may take part in, for each one that it may announce.
const PARTS_PER_OWNED: usize = 4;

impl ReportIntake<'_> {
    /// Makes the host take part in a batch. The batch is created if it is new.
    pub(super) fn take_part(&mut self, name: u64) -> Result<Key, Refused> {
        let limits = &self.settings.limits;
        let parts_max = limits.batches_per_host_max.saturating_mul(PARTS_PER_OWNED);
        let hosts_max = limits.hosts_per_batch_max;
        let host = self.hosts.get_mut(self.id);
        let host = host.ok_or_else(|| unknown("host", 0))?;
        let known = self.workload.batch_named(self.tenant, name);
        if let Some(key) = known
            && let Some(mark) = host.batches.get_mut(&key)
        {
            *mark = self.mark;
            return Ok(key);
        }
        if host.batches.len() >= parts_max {
            return Err(over_limit(format!(
                "this host takes part in {parts_max} batches already; say which are finished"
            )));
        }
        let key = match known {
            Some(key) => {
                let batch = self.workload.batches.get_mut(key);
                let batch = batch.ok_or_else(|| unknown("batch", name))?;
                if batch.members.len() >= hosts_max {
                    return Err(over_limit(format!(
                        "{hosts_max} hosts take part in batch {name} already \
                         (limits.hosts_per_batch_max)"
                    )));
                }
                batch.members.push(self.id);
                key
            }
            None => {
                self.hosts.charge(self.id, Charge::Batch)?;
                let batch = ClusterBatch::new(name, self.tenant, self.id, self.now);
                self.workload.insert_batch(self.now, batch)
            }
        };
        if let Some(host) = self.hosts.get_mut(self.id) {
            host.batches.insert(key, self.mark);
        }
        Ok(key)
    }

    /// Makes the request a member of the batch. The request is created, or moved if the host may do
    /// so.
    pub(super) fn enter_request(
        &mut self,
        batch: Key,
        name: u64,
        is_entitled: bool,
    ) -> Result<Key, Refused> {
        if let Some(key) = self.workload.request_named(self.tenant, name) {
            let request = self.workload.requests.get(key);
            let (from, by) = request.map_or((batch, self.id), |it| (it.batch, it.by));
            if from == batch {
                return Ok(key);
            }
            if !(is_entitled && (by == self.id || self.workload.owns(self.id, from))) {
                return Err(not_yours(format!(
                    "request {name} is in another batch, and another host's"
                )));
            }
            self.move_request(key, from, batch)?;
            return Ok(key);
        }
        self.hosts.charge(self.id, Charge::Request)?;
        Ok(self.workload.insert_request(ClusterRequest {
            name,
            tenant: self.tenant,
            batch,
            by: self.id,
            mark: self.mark,
            deadline: Time::NEVER,
            loads: Vec::new(),
            pruned: false,
        }))
    }

    /// Moves a request to another batch, as chunked prefill does.
    ///
    /// A host that takes no part in the new batch could never undo its reports of the request. So
    /// its loads are removed, and the request is charged to this host instead.
    fn move_request(&mut self, key: Key, from: Key, to: Key) -> Result<(), Refused> {
        let members = self.workload.batches.get(to).map(|it| it.members.clone());
        let members = members.unwrap_or_default();
        let by = self.workload.requests.get(key).map(|request| request.by);
        if by.is_some_and(|by| !members.contains(&by)) {
            self.workload.take_over(self.hosts, self.id, key)?;
        }
        for (batch, is_there) in [(from, false), (to, true)] {
            if let Some(batch) = self.workload.batches.get_mut(batch) {
                if is_there {
                    batch.requests.insert(key);
                } else {
                    batch.requests.remove(&key);
                }
            }
        }
        let is_foreign = |load: &ReportedLoad| !members.contains(&load.by);
        self.workload.drop_loads(self.hosts, key, |_, load| is_foreign(load));
        let Some(request) = self.workload.requests.get_mut(key) else { return Ok(()) };
        request.batch = to;
        let (name, is_pruned) = (request.name, request.pruned);
        for batch in [from, to].into_iter().filter(|_| is_pruned) {
            self.workload.tell_pruned(self.hosts, batch, name);
        }
        Ok(())
    }

    /// Ends a batch. Its members get an order in which it has no rank.
    pub(super) fn end_batch(&mut self, key: Key) {
        *self.work += self.workload.batches.get(key).map_or(0, |it| it.requests.len());
        self.workload.end_batch(self.now, self.hosts, key);
    }

    /// Removes the host from a batch. If the host owned it, the next member becomes the owner.
    /// Without a member whose quota has room for that, the batch ends.
    pub(super) fn leave_batch(&mut self, key: Key) {
        let id = self.id;
        let batch = self.workload.batches.get_mut(key);
        let Some(batch) = batch.filter(|batch| batch.members.contains(&id)) else { return };
        let Some(heir) = batch.members.iter().copied().find(|&other| other != id) else {
            return self.end_batch(key);
        };
        if batch.owner() == Some(id) {
            if self.hosts.charge(heir, Charge::Batch).is_err() {
                return self.end_batch(key);
            }
            self.hosts.refund(id, Charge::Batch);
        }
        batch.members.retain(|&other| other != id);
        let (name, requests) = (batch.name, batch.requests.clone());
        *self.work += requests.len();
        if let Some(host) = self.hosts.get_mut(id) {
            host.batches.remove(&key);
        }
        self.note_batch(key, name);
        for request in requests {
            self.part_with(request);
        }
    }

    /// Notes a batch and its pruned requests for the host's next order. If the host has left the
    /// batch, the order removes them.
    pub(super) fn note_batch(&mut self, key: Key, name: u64) {
        let batch = self.workload.batches.get(key);
        let pruned = batch.map_or_else(Vec::new, |batch| self.workload.pruned_of(batch));
        self.hosts.note(self.id, |outbox| {
            outbox.ranks.insert(name);
            outbox.pruned.extend(pruned);
        });
    }

    /// Removes the host's loads of a request. If the request is charged to the host, another host
    /// with loads of it takes it over, or else the request ends.
    pub(super) fn part_with(&mut self, key: Key) {
        let (now, id) = (self.now, self.id);
        let (workload, hosts) = (&mut *self.workload, &mut *self.hosts);
        let gone = workload.drop_loads(hosts, key, |_, load| load.by == id);
        let Some(request) = workload.requests.get(key) else { return };
        if request.by == id {
            let heir = request.loads.first().map(|load| load.by);
            let has_heir = heir.is_some_and(|heir| workload.take_over(hosts, heir, key).is_ok());
            if !has_heir {
                return workload.end_request(now, hosts, key);
            }
        } else if gone == 0 {
            return;
        }
        workload.tell_admission(now, hosts, key);
    }

    /// Removes a fetch that has ended or whose victim port is gone.
    pub(super) fn close_fetch(&mut self, id: HostId, number: u64) {
        let Some(fetch) = self.fetches.0.remove(&(id, number)) else { return };
        self.hosts.refund(id, Charge::Fetch);
        let mut others = self.fetches.of_host(id);
        let same = others.any(|(_, it)| (it.request, it.victim) == (fetch.request, fetch.victim));
        if same || self.hosts.owns_port(id, fetch.victim) {
            return;
        }
        if let Some(key) = self.workload.request_named(self.tenant, fetch.request) {
            let of_fetch = |load: &ReportedLoad| load.by == id && load.port == fetch.victim;
            let workload = &mut *self.workload;
            if workload.drop_loads(self.hosts, key, |_, load| of_fetch(load)) > 0 {
                workload.tell_admission(self.now, self.hosts, key);
            }
        }
    }

    /// Removes what the host's snapshot, which has just ended, did not mention.
    pub(super) fn sweep(&mut self) {
        let (id, mark) = (self.id, self.mark);
        let Some(host) = self.hosts.get(id) else { return };
        let batches: Vec<(Key, bool)> =
            host.batches.iter().map(|(&key, &said)| (key, said == mark)).collect();
        let fetches = self.fetches.of_host(id);
        let stale = fetches.filter(|(_, fetch)| fetch.mark != mark);
        let stale: Vec<u64> = stale.map(|(number, _)| number).collect();
        for &(key, _) in batches.iter().filter(|(_, was_said)| !was_said) {
            if self.workload.owns(id, key) {
                self.end_batch(key);
            } else {
                self.leave_batch(key);
            }
        }
        for (key, _) in batches {
            let Some(batch) = self.workload.batches.get(key) else { continue };
            let requests = batch.requests.clone();
            for &request in &requests {
                let known = self.workload.requests.get(request);
                if known.is_some_and(|it| it.by == id && it.mark != mark) {
                    self.part_with(request);
                }
            }
            // Only loads of the host's own ports. Loads of fetches end with their fetch.
            for request in requests {
                let workload = &mut *self.workload;
                let gone = workload.drop_loads(self.hosts, request, |hosts, load| {
                    load.by == id && hosts.owns_port(id, load.port) && load.mark != mark
                });
                if gone > 0 {
                    workload.tell_admission(self.now, self.hosts, request);
                }
            }
        }
        for number in stale {
            self.close_fetch(id, number);
        }
    }

    pub(super) fn forget_reports(&mut self) {
        let Some(host) = self.hosts.get(self.id) else { return };
        let batches: Vec<Key> = host.batches.keys().copied().collect();
        let ports: BTreeSet<PortId> = host.ports.iter().map(|port| port.id).collect();
        let own = self.fetches.of_host(self.id);
        let own: Vec<u64> = own.map(|(number, _)| number).collect();
        for number in own {
            self.close_fetch(self.id, number);
        }
        for key in batches {
            self.leave_batch(key);
        }
        // The ports may go, so other hosts' fetches from them are removed.
        for (reader, number) in self.fetches.at_ports(&ports) {
            self.close_fetch(reader, number);
        }
    }
}

impl Cluster {
    pub(super) fn forget_host(&mut self, now: Time, id: HostId) {
        self.forget_reports(now, id);
        self.hosts.remove(id);
    }

    pub(super) fn forget_reports(&mut self, now: Time, id: HostId) {
        if let Some(mut intake) = self.intake(now, id) {
            intake.forget_reports();
        }
    }
}
