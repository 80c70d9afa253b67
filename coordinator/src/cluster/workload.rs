//! Batches and requests of all hosts, and admission, which orders them.
//!
//! A tenant's hosts share ids. Admission uses keys of [`table`](super::table) instead, which ascend
//! by arrival. So of two batches with equal REDs the earlier one stays first.

use std::collections::HashMap;

use laxity_policy::admission::{Admission, AdmissionEvent};
use laxity_policy::{BatchId, PortId, RequestId, Span, Time};

use super::batch::{ClusterBatch, ClusterRequest, ReportedLoad};
use super::ended::EndedRequests;
use super::host::{Charge, HostId, Tenant};
use super::hosts::Hosts;
use super::outbox::Outbox;
use super::refusal::Refused;
use super::table::{Key, KeyedTable};

#[derive(Debug)]
pub(super) struct Workload {
    pub(super) admission: Admission,
    pub(super) batches: KeyedTable<ClusterBatch>,
    pub(super) batch_names: HashMap<(Tenant, u64), Key>,
    pub(super) requests: KeyedTable<ClusterRequest>,
    pub(super) request_names: HashMap<(Tenant, u64), Key>,
    /// Requests that daemons got as pruned, ascending.
    pub(super) pruned: Vec<Key>,
    pub(super) ended: EndedRequests,
}

impl Workload {
    pub(super) fn new(admission: Admission) -> Self {
        Self {
            admission,
            batches: KeyedTable::default(),
            batch_names: HashMap::new(),
            requests: KeyedTable::default(),
            request_names: HashMap::new(),
            pruned: Vec::new(),
            ended: EndedRequests::default(),
        }
    }

    pub(super) fn batch_named(&self, tenant: Tenant, name: u64) -> Option<Key> {
        self.batch_names.get(&(tenant, name)).copied()
    }

    pub(super) fn request_named(&self, tenant: Tenant, name: u64) -> Option<Key> {
        self.request_names.get(&(tenant, name)).copied()
    }

    /// Reports whether the host is the batch's announcer or its successor.
    pub(super) fn owns(&self, id: HostId, batch: Key) -> bool {
        let batch = self.batches.get(batch);
        batch.is_some_and(|batch| batch.owner() == Some(id))
    }

    pub(super) fn takes_part(&self, id: HostId, batch: Key) -> bool {
        let batch = self.batches.get(batch);
        batch.is_some_and(|batch| batch.members.contains(&id))
    }

    /// Adds a batch that is not known yet.
    pub(super) fn insert_batch(&mut self, now: Time, batch: ClusterBatch) -> Key {
        let name = (batch.tenant, batch.name);
        let key = self.batches.insert(batch);
        self.batch_names.insert(name, key);
        self.announce(now, key, Span::ZERO);
        key
    }

    pub(super) fn announce(&mut self, now: Time, batch: Key, compute: Span) {
        let event =
            AdmissionEvent::BatchArrived { batch: BatchId(batch), requests: Vec::new(), compute };
        self.admission.handle(now, event);
        if let Some(tenant) = self.batches.get(batch).map(|batch| batch.tenant) {
            let batch = BatchId(batch);
            self.admission.handle(now, AdmissionEvent::BatchTenant { batch, tenant });
        }
    }

    /// Records that the batch starts to compute, unless it had started before.
    pub(super) fn start(&mut self, now: Time, key: Key) {
        if let Some(batch) = self.batches.get_mut(key).filter(|it| it.started.is_none()) {
            batch.started = Some(now);
            let batch = BatchId(key);
            self.admission.handle(now, AdmissionEvent::BatchStarted { batch });
        }
    }

    /// Ends a batch with all its requests. Its members get an order in which it has no rank.
    pub(super) fn end_batch(&mut self, now: Time, hosts: &mut Hosts, key: Key) {
        let Some(batch) = self.batches.get(key) else { return };
        let (name, pruned) = (batch.name, self.pruned_of(batch));
        let requests = batch.requests.clone();
        self.tell_members(hosts, key, |outbox| {
            outbox.ranks.insert(name);
            outbox.pruned.extend(&pruned);
        });
        for request in requests {
            self.remove_request(hosts, request);
        }
        let event = AdmissionEvent::BatchDeparted { batch: BatchId(key) };
        self.admission.handle(now, event);
        let Some(batch) = self.batches.remove(key) else { return };
        self.batch_names.remove(&(batch.tenant, batch.name));
        if let Some(owner) = batch.owner() {
            hosts.refund(owner, Charge::Batch);
        }
        for id in batch.members {
            if let Some(host) = hosts.get_mut(id) {
                host.batches.remove(&key);
            }
        }
    }

    /// Applies a change to the outbox of each member of a batch.
    pub(super) fn tell_members(&self, hosts: &mut Hosts, batch: Key, change: impl Fn(&mut Outbox)) {
        for &id in self.batches.get(batch).iter().flat_map(|it| &it.members) {
            hosts.tell(id, &change);
        }
    }

    /// Notes for the members of a batch that a request is pruned, or no longer pruned.
    pub(super) fn tell_pruned(&self, hosts: &mut Hosts, batch: Key, request: u64) {
        self.tell_members(hosts, batch, |outbox| {
            outbox.pruned.insert(request);
        });
    }

    pub(super) fn pruned_of(&self, batch: &ClusterBatch) -> Vec<u64> {
        let requests = batch.requests.iter().filter_map(|&it| self.requests.get(it));
        let pruned = requests.filter(|request| request.pruned);
        pruned.map(|request| request.name).collect()
    }

    /// Adds a request that is not known yet. The caller has charged its host.
    pub(super) fn insert_request(&mut self, request: ClusterRequest) -> Key {
        let (name, batch) = ((request.tenant, request.name), request.batch);
        let key = self.requests.insert(request);
        self.request_names.insert(name, key);
        if let Some(batch) = self.batches.get_mut(batch) {
            batch.requests.insert(key);
        }
        key
    }

    /// Charges the request to this host, whose reports about it count from now on.
    pub(super) fn take_over(
        &mut self,
        hosts: &mut Hosts,
        id: HostId,
        key: Key,
    ) -> Result<(), Refused> {
        let Some(request) = self.requests.get_mut(key) else { return Ok(()) };
        hosts.charge(id, Charge::Request)?;
        let before = core::mem::replace(&mut request.by, id);
        request.mark = hosts.get(id).map_or(0, |host| host.mark);
        hosts.refund(before, Charge::Request);
        Ok(())
    }

    /// Replaces the loads that the host reported for a request on its own ports.
    pub(super) fn set_loads(
        &mut self,
        hosts: &mut Hosts,
        id: HostId,
        key: Key,
        loads: &[ReportedLoad],
    ) -> Result<(), Refused> {
        let own =
            |hosts: &Hosts, load: &ReportedLoad| load.by == id && hosts.owns_port(id, load.port);
        self.drop_loads(hosts, key, own);
        let Some(request) = self.requests.get_mut(key) else { return Ok(()) };
        for (index, load) in loads.iter().enumerate() {
            if load.bytes == 0 || loads[..index].iter().any(|other| other.port == load.port) {
                continue;
            }
            hosts.charge(id, Charge::Load)?;
            request.loads.push(*load);
        }
        Ok(())
    }

    /// Adds the load of a fetch for a request on another host's port. Returns false if there is no
    /// room.
    pub(super) fn add_load(&mut self, hosts: &mut Hosts, key: Key, load: ReportedLoad) -> bool {
        let Some(request) = self.requests.get_mut(key) else { return false };
        let same = |other: &&mut ReportedLoad| (other.by, other.port) == (load.by, load.port);
        if let Some(known) = request.loads.iter_mut().find(same) {
            known.bytes = known.bytes.saturating_add(load.bytes);
            return true;
        }
        let has_room = hosts.charge(load.by, Charge::Load).is_ok();
        if has_room {
            request.loads.push(load);
        }
        has_room
    }

    /// Removes loads of a request. Returns how many were removed.
    pub(super) fn drop_loads(
        &mut self,
        hosts: &mut Hosts,
        key: Key,
        goes: impl Fn(&Hosts, &ReportedLoad) -> bool,
    ) -> usize {
        let Some(request) = self.requests.get_mut(key) else { return 0 };
        let before = request.loads.len();
        request.loads.retain(|load| {
            let goes = goes(hosts, load);
            if goes {
                hosts.refund(load.by, Charge::Load);
            }
            !goes
        });
        before - request.loads.len()
    }

    pub(super) fn tell_admission(&mut self, now: Time, hosts: &Hosts, key: Key) {
        let Some(request) = self.requests.get(key) else { return };
        let owns = |by: HostId, port: PortId| hosts.owns_port(by, port);
        let event = AdmissionEvent::RequestJoined {
            batch: BatchId(request.batch),
            load: request.merged(key, owns),
        };
        self.admission.handle(now, event);
    }

    pub(super) fn end_request(&mut self, now: Time, hosts: &mut Hosts, key: Key) {
        let request = RequestId(key);
        let ended = AdmissionEvent::RequestEnded { request };
        self.admission.handle(now, ended);
        let Some(request) = self.remove_request(hosts, key) else { return };
        if let Some(batch) = self.batches.get_mut(request.batch) {
            batch.requests.remove(&key);
        }
        if request.pruned {
            self.tell_pruned(hosts, request.batch, request.name);
        }
    }

    fn remove_request(&mut self, hosts: &mut Hosts, key: Key) -> Option<ClusterRequest> {
        let request = self.requests.remove(key)?;
        self.request_names.remove(&(request.tenant, request.name));
        hosts.refund(request.by, Charge::Request);
        for load in &request.loads {
            hosts.refund(load.by, Charge::Load);
        }
        if request.pruned
            && let Ok(index) = self.pruned.binary_search(&key)
        {
            self.pruned.remove(index);
        }
        Some(request)
    }

    /// Counts the outcome of a request that is about to end in order.
    pub(super) fn count_end(&mut self, now: Time, key: Key) {
        if let Some(request) = self.requests.get(key) {
            self.ended.count(now, request);
        }
    }

    /// Counts the outcomes of all requests of a batch that is about to end in order.
    pub(super) fn count_ends_of(&mut self, now: Time, batch: Key) {
        let requests = self.batches.get(batch).map(|batch| batch.requests.clone());
        for request in requests.into_iter().flatten() {
            self.count_end(now, request);
        }
    }
}
