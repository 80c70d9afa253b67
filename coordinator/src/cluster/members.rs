//! Who takes part in what: batches and requests come, change hands and go, with all that refers to
//! them.

use std::collections::BTreeSet;

use laxity_policy::admission::AdmissionEvent;
use laxity_policy::{BatchId, PortId, RequestId, Span, Time};
use laxity_wire::v1;

use super::Cluster;
use super::batch::{Batch, Load, Request};
use super::host::{HostFetch, HostId, Membership};
use super::intake::{Refused, not_yours, over_limit, unknown};
use super::table::Key;
use super::tokens::{FetchRank, Turn};

/// A host may take part in so many times the batches that it may own.
const PARTS_PER_OWNED: usize = 4;

impl Cluster {
    /// The host takes part in a batch, which is new if nobody did.
    pub(super) fn take_part(&mut self, now: Time, id: HostId, name: u64) -> Result<Key, Refused> {
        let limits = &self.settings.limits;
        let parts_max = limits.batches_per_host_max.saturating_mul(PARTS_PER_OWNED);
        let hosts_max = limits.hosts_per_batch_max;
        let host = self.hosts[id.0 as usize].as_mut();
        let host = host.ok_or_else(|| unknown("host", 0))?;
        let (tenant, mark) = (host.tenant, host.mark);
        if name == 0 {
            return Err(unknown("batch", 0));
        }
        let known = self.batch_names.get(&(tenant, name)).copied();
        if let Some(part) = known.and_then(|key| host.batches.get_mut(&key))
            && let Some(key) = known
        {
            part.mark = mark;
            return Ok(key);
        }
        if host.batches.len() >= parts_max {
            return Err(over_limit(format!(
                "this host takes part in {parts_max} batches already; say which are finished"
            )));
        }
        let key = match known {
            Some(key) => {
                let batch = self.batches.get_mut(key);
                let batch = batch.ok_or_else(|| unknown("batch", name))?;
                if batch.members.len() >= hosts_max {
                    return Err(over_limit(format!(
                        "{hosts_max} hosts take part in batch {name} already \
                         (limits.hosts_per_batch_max)"
                    )));
                }
                batch.members.push(id);
                key
            }
            None => {
                if !self.quotas.batches.take(&mut host.usage.batches) {
                    return Err(over_limit(format!(
                        "this host owns {} batches, which is all it may now (limits.batches_*)",
                        host.usage.batches
                    )));
                }
                let key = self.batches.insert(Batch {
                    name,
                    tenant,
                    members: vec![id],
                    invited: Vec::new(),
                    requests: BTreeSet::new(),
                    fetches: BTreeSet::new(),
                    arrived: now,
                    started: None,
                    layer: 0,
                    layers: 0,
                    sort_key: None,
                });
                self.batch_names.insert((tenant, name), key);
                let event = AdmissionEvent::BatchArrived {
                    batch: BatchId(key),
                    requests: Vec::new(),
                    compute: Span::ZERO,
                };
                self.admission.handle(now, event);
                key
            }
        };
        host.batches.insert(key, Membership { mark });
        Ok(key)
    }

    /// The request is a member of the batch; it is made, or moved, if the host may.
    pub(super) fn enter_request(
        &mut self,
        id: HostId,
        batch: Key,
        name: u64,
        entitled: bool,
    ) -> Result<Key, Refused> {
        let host = self.hosts[id.0 as usize].as_mut();
        let host = host.ok_or_else(|| unknown("host", 0))?;
        let (tenant, mark) = (host.tenant, host.mark);
        if let Some(&key) = self.request_names.get(&(tenant, name)) {
            let request = self.requests.get(key);
            let (from, by) = request.map_or((batch, id), |request| (request.batch, request.by));
            if from == batch {
                return Ok(key);
            }
            if !(entitled && (by == id || self.owns_batch(id, from))) {
                return Err(not_yours(format!(
                    "request {name} is in another batch, and another host's"
                )));
            }
            self.move_request(id, key, from, batch)?;
            return Ok(key);
        }
        if !self.quotas.requests.take(&mut host.usage.requests) {
            return Err(over_limit(format!(
                "this host has told of {} requests, which is all it may now (limits.requests_*)",
                host.usage.requests
            )));
        }
        let key = self.requests.insert(Request {
            name,
            tenant,
            batch,
            by: id,
            mark,
            deadline: Time::NEVER,
            started: false,
            loads: Vec::new(),
            pruned: false,
        });
        self.request_names.insert((tenant, name), key);
        if let Some(batch) = self.batches.get_mut(batch) {
            batch.requests.insert(key);
        }
        Ok(key)
    }

    /// The request is this host's to tell of, and charged to it, if it has room for one more.
    pub(super) fn take_over(&mut self, id: HostId, key: Key) {
        let Some(request) = self.requests.get_mut(key) else {
            return;
        };
        let Some(host) = self.hosts[id.0 as usize].as_mut() else {
            return;
        };
        if !self.quotas.requests.take(&mut host.usage.requests) {
            return;
        }
        let before = core::mem::replace(&mut request.by, id);
        request.mark = host.mark;
        if let Some(host) = self.hosts[before.0 as usize].as_mut() {
            self.quotas.requests.give(&mut host.usage.requests);
        }
    }

    /// Chunked prefill moves requests on: `id` says so, a member of the batch where it goes.
    ///
    /// Who is no member there could never take back what it said of the request: its loads stay
    /// behind, and so does its being the one who told of it.
    fn move_request(&mut self, id: HostId, key: Key, from: Key, to: Key) -> Result<(), Refused> {
        let members = self.batches.get(to).map(|batch| batch.members.clone());
        let members = members.unwrap_or_default();
        let by = self.requests.get(key).map(|request| request.by);
        if by.is_some_and(|by| !members.contains(&by)) {
            self.take_over(id, key);
            if self.requests.get(key).map(|request| request.by) != Some(id) {
                return Err(over_limit(
                    "this host has told of as many requests as it may now (limits.requests_*)",
                ));
            }
        }
        if let Some(batch) = self.batches.get_mut(from) {
            batch.requests.remove(&key);
        }
        if let Some(batch) = self.batches.get_mut(to) {
            batch.requests.insert(key);
        }
        let Some(request) = self.requests.get_mut(key) else {
            return Ok(());
        };
        request.batch = to;
        let name = request.name;
        for load in request
            .loads
            .extract_if(.., |load| !members.contains(&load.by))
        {
            if let Some(host) = self.hosts[load.by.0 as usize].as_mut() {
                self.quotas.loads.give(&mut host.usage.loads);
            }
        }
        if request.pruned {
            self.note_pruned(from, name);
            self.note_pruned(to, name);
        }
        self.move_fetches(name, from, to);
        Ok(())
    }

    /// What hosts that take part in both batches fetch for the request moves on with it.
    fn move_fetches(&mut self, request: u64, from: Key, to: Key) {
        let Some(old) = self.batches.get(from) else {
            return;
        };
        for key in old.fetches.iter().copied().collect::<Vec<_>>() {
            let Some(&(id, number)) = self.fetchers.get(&key) else {
                continue;
            };
            let Some(host) = self.host_mut(id) else {
                continue;
            };
            let takes_part = host.batches.contains_key(&to);
            let fetch = host.fetches.get_mut(&number);
            if let Some(fetch) = fetch.filter(|fetch| takes_part && fetch.request == request) {
                fetch.batch = to;
                if let Some(batch) = self.batches.get_mut(from) {
                    batch.fetches.remove(&key);
                }
                if let Some(batch) = self.batches.get_mut(to) {
                    batch.fetches.insert(key);
                }
            }
        }
        self.rerank_fetches(to);
    }

    /// The loads that the host says a request has on its ports, instead of what it said before.
    pub(super) fn set_loads(
        &mut self,
        id: HostId,
        key: Key,
        loads: &[Load],
    ) -> Result<(), Refused> {
        let (Some(host), Some(request)) = (
            self.hosts[id.0 as usize].as_mut(),
            self.requests.get_mut(key),
        ) else {
            return Ok(());
        };
        let quota = &mut self.quotas.loads;
        let owns = |port: PortId| self.port_hosts[port.0 as usize] == Some(id);
        request.loads.retain(|load| {
            let replaced = load.by == id && owns(load.port);
            if replaced {
                quota.give(&mut host.usage.loads);
            }
            !replaced
        });
        for (index, load) in loads.iter().enumerate() {
            if load.bytes == 0 || loads[..index].iter().any(|other| other.port == load.port) {
                continue;
            }
            if !quota.take(&mut host.usage.loads) {
                return Err(over_limit(format!(
                    "this host has {} loads of requests on ports, which is all it may now \
                     (limits.loads_*)",
                    host.usage.loads
                )));
            }
            request.loads.push(*load);
        }
        Ok(())
    }

    /// The host wants to fetch so much for a request from another host's port. False if there is no
    /// room.
    pub(super) fn add_load(&mut self, id: HostId, key: Key, port: PortId, bytes: u64) -> bool {
        let (Some(host), Some(request)) = (
            self.hosts[id.0 as usize].as_mut(),
            self.requests.get_mut(key),
        ) else {
            return false;
        };
        let same = |load: &&mut Load| load.by == id && load.port == port;
        if let Some(load) = request.loads.iter_mut().find(same) {
            load.bytes = load.bytes.saturating_add(bytes);
            return true;
        }
        let room = self.quotas.loads.take(&mut host.usage.loads);
        if room {
            request.loads.push(Load {
                port,
                by: id,
                bytes,
                mark: host.mark,
            });
        }
        room
    }

    /// Tells admission of a request as it is now.
    pub(super) fn tell_admission(&mut self, now: Time, key: Key) {
        let Some(request) = self.requests.get(key) else {
            return;
        };
        let owns =
            |by: HostId, port: PortId| self.port_hosts.get(port.0 as usize) == Some(&Some(by));
        let event = AdmissionEvent::RequestJoined {
            batch: BatchId(request.batch),
            load: request.merged(key, owns),
        };
        self.admission.handle(now, event);
    }

    /// The request is over.
    pub(super) fn end_request(&mut self, now: Time, key: Key) {
        let Some(request) = self.requests.get(key) else {
            return;
        };
        let (batch, name, pruned) = (request.batch, request.name, request.pruned);
        let request = RequestId(key);
        self.admission
            .handle(now, AdmissionEvent::RequestEnded { request });
        self.drop_request(key);
        if let Some(batch) = self.batches.get_mut(batch) {
            batch.requests.remove(&key);
        }
        if pruned {
            self.note_pruned(batch, name);
        }
    }

    /// Forgets a request and what it was charged for.
    fn drop_request(&mut self, key: Key) {
        let Some(request) = self.requests.remove(key) else {
            return;
        };
        self.request_names.remove(&(request.tenant, request.name));
        if let Some(host) = self.hosts[request.by.0 as usize].as_mut() {
            self.quotas.requests.give(&mut host.usage.requests);
        }
        for load in &request.loads {
            if let Some(host) = self.hosts[load.by.0 as usize].as_mut() {
                self.quotas.loads.give(&mut host.usage.loads);
            }
        }
        if request.pruned
            && let Ok(index) = self.pruned.binary_search(&key)
        {
            self.pruned.remove(index);
        }
    }

    /// The batch is over. Its members are told that it has no rank.
    pub(super) fn depart(&mut self, now: Time, key: Key) {
        let Some(batch) = self.batches.get(key) else {
            return;
        };
        let requests: Vec<Key> = batch.requests.iter().copied().collect();
        self.work += requests.len();
        for request in requests {
            if let Some(known) = self.requests.get(request)
                && known.pruned
            {
                let name = known.name;
                self.note_pruned(key, name);
            }
            self.drop_request(request);
        }
        self.note_rank(key);
        let event = AdmissionEvent::BatchDeparted {
            batch: BatchId(key),
        };
        self.admission.handle(now, event);
        let Some(batch) = self.batches.remove(key) else {
            return;
        };
        self.batch_names.remove(&(batch.tenant, batch.name));
        for fetch in batch.fetches {
            self.tokens.rerank(fetch, FetchRank::LAST);
        }
        if let Some(owner) = batch.members.first()
            && let Some(host) = self.hosts[owner.0 as usize].as_mut()
        {
            self.quotas.batches.give(&mut host.usage.batches);
        }
        for id in batch.members {
            if let Some(host) = self.hosts[id.0 as usize].as_mut() {
                host.batches.remove(&key);
            }
        }
    }

    /// The host takes no part in the batch any more. The next member owns it if it did.
    pub(super) fn leave_batch(&mut self, now: Time, id: HostId, key: Key) {
        let Some(batch) = self.batches.get_mut(key) else {
            return;
        };
        if !batch.members.contains(&id) {
            return;
        }
        let owned = batch.owner() == Some(id);
        let heir = batch.members.iter().copied().find(|&other| other != id);
        let Some(heir) = heir else {
            return self.depart(now, key);
        };
        if owned {
            let Some(host) = self.hosts[heir.0 as usize].as_mut() else {
                return self.depart(now, key);
            };
            if !self.quotas.batches.take(&mut host.usage.batches) {
                return self.depart(now, key);
            }
            if let Some(host) = self.hosts[id.0 as usize].as_mut() {
                self.quotas.batches.give(&mut host.usage.batches);
            }
        }
        let Some(batch) = self.batches.get_mut(key) else {
            return;
        };
        batch.members.retain(|&other| other != id);
        let name = batch.name;
        let requests: Vec<Key> = batch.requests.iter().copied().collect();
        self.work += requests.len();
        if let Some(host) = self.hosts[id.0 as usize].as_mut() {
            host.batches.remove(&key);
        }
        let pruned = self.pruned_of(requests.iter());
        self.note(id, name, pruned);
        for request in requests {
            self.part_with(now, id, request);
        }
    }

    /// The host says nothing of the request any more: its loads go, and the request, if nobody else
    /// loads it.
    pub(super) fn part_with(&mut self, now: Time, id: HostId, key: Key) {
        let (Some(host), Some(request)) = (
            self.hosts[id.0 as usize].as_mut(),
            self.requests.get_mut(key),
        ) else {
            return;
        };
        let before = request.loads.len();
        request.loads.retain(|load| load.by != id);
        for _ in request.loads.len()..before {
            self.quotas.loads.give(&mut host.usage.loads);
        }
        if request.by != id {
            if request.loads.len() != before {
                self.tell_admission(now, key);
            }
            return;
        }
        let Some(heir) = request.loads.first().map(|load| load.by) else {
            return self.end_request(now, key);
        };
        self.take_over(heir, key);
        let by = self.requests.get(key).map(|request| request.by);
        if by == Some(heir) {
            self.tell_admission(now, key);
        } else {
            self.end_request(now, key);
        }
    }

    /// A fetch begins to wait.
    pub(super) fn open_fetch(
        &mut self,
        id: HostId,
        said: &v1::FetchWanted,
        batch: Key,
        victim: PortId,
        rank: FetchRank,
    ) -> Result<Key, Refused> {
        let host = self.hosts[id.0 as usize].as_mut();
        let host = host.ok_or_else(|| unknown("host", 0))?;
        if !self.quotas.fetches.take(&mut host.usage.fetches) {
            return Err(over_limit(format!(
                "this host has {} fetches open, which is all it may now (limits.fetches_*); fetch \
                 without a token",
                host.usage.fetches
            )));
        }
        let key = self.tokens.want(victim, rank);
        let fetch = HostFetch {
            key,
            mark: host.mark,
            batch,
            request: said.request,
            victim,
        };
        host.fetches.insert(said.fetch, fetch);
        self.fetchers.insert(key, (id, said.fetch));
        Ok(key)
    }

    /// A fetch that its host has let go of.
    pub(super) fn forget_fetch(&mut self, now: Time, id: HostId, fetch: &HostFetch) {
        let waits = self.tokens.turn(fetch.key) == Some(Turn::Waiting);
        self.tokens.finish(fetch.key);
        if let Some((_, number)) = self.fetchers.remove(&fetch.key)
            && waits
        {
            self.note_turn(id, number);
        }
        if let Some(batch) = self.batches.get_mut(fetch.batch) {
            batch.fetches.remove(&fetch.key);
        }
        let Some(host) = self.hosts[id.0 as usize].as_mut() else {
            return;
        };
        self.quotas.fetches.give(&mut host.usage.fetches);
        let tenant = host.tenant;
        let same =
            |other: &HostFetch| (other.request, other.victim) == (fetch.request, fetch.victim);
        let others = host.fetches.values().any(same);
        let Some(&key) = self.request_names.get(&(tenant, fetch.request)) else {
            return;
        };
        let own = self.port_hosts[fetch.victim.0 as usize] == Some(id);
        if others || own {
            return;
        }
        if let Some(request) = self.requests.get_mut(key)
            && let Some(host) = self.hosts[id.0 as usize].as_mut()
        {
            let before = request.loads.len();
            let of_fetch = |load: &Load| load.by == id && load.port == fetch.victim;
            request.loads.retain(|load| !of_fetch(load));
            if request.loads.len() < before {
                self.quotas.loads.give(&mut host.usage.loads);
                self.tell_admission(now, key);
            }
        }
    }

    /// A snapshot has ended: what it did not mention is gone.
    pub(super) fn sweep(&mut self, now: Time, id: HostId) {
        let Some(host) = self.host(id) else { return };
        let mark = host.mark;
        let stale = |part: &(&Key, &Membership)| part.1.mark != mark;
        let left: Vec<Key> = host
            .batches
            .iter()
            .filter(stale)
            .map(|(&key, _)| key)
            .collect();
        let kept: Vec<Key> = host.batches.keys().copied().collect();
        let fetches: Vec<u64> = host
            .fetches
            .iter()
            .filter(|(_, fetch)| fetch.mark != mark)
            .map(|(&fetch, _)| fetch)
            .collect();
        for key in left {
            if self.owns_batch(id, key) {
                self.depart(now, key);
            } else {
                self.leave_batch(now, id, key);
            }
        }
        for key in kept {
            let Some(batch) = self.batches.get(key) else {
                continue;
            };
            let unsaid = |key: &&Key| {
                let request = self.requests.get(**key);
                request.is_some_and(|request| request.by == id && request.mark != mark)
            };
            let ended: Vec<Key> = batch.requests.iter().filter(unsaid).copied().collect();
            let others: Vec<Key> = batch.requests.iter().copied().collect();
            for request in ended {
                self.part_with(now, id, request);
            }
            for request in others {
                self.sweep_loads(now, id, request, mark);
            }
        }
        self.drop_fetches(now, id, fetches);
    }

    /// Loads of the host's own ports that its snapshot did not mention. Those of fetches end with
    /// their fetch.
    fn sweep_loads(&mut self, now: Time, id: HostId, key: Key, mark: u64) {
        let (Some(host), Some(request)) = (
            self.hosts[id.0 as usize].as_mut(),
            self.requests.get_mut(key),
        ) else {
            return;
        };
        let before = request.loads.len();
        request.loads.retain(|load| {
            let own = load.by == id && self.port_hosts[load.port.0 as usize] == Some(id);
            !own || load.mark == mark
        });
        let gone = before - request.loads.len();
        for _ in 0..gone {
            self.quotas.loads.give(&mut host.usage.loads);
        }
        if gone > 0 {
            self.tell_admission(now, key);
        }
    }

    pub(super) fn drop_fetches(&mut self, now: Time, id: HostId, fetches: Vec<u64>) {
        for number in fetches {
            let host = self.host_mut(id);
            if let Some(fetch) = host.and_then(|host| host.fetches.remove(&number)) {
                self.forget_fetch(now, id, &fetch);
            }
        }
    }

    /// Nothing that the host said holds any more.
    pub(super) fn forget_reports(&mut self, now: Time, id: HostId) {
        let Some(host) = self.host(id) else { return };
        let fetches: Vec<u64> = host.fetches.keys().copied().collect();
        let batches: Vec<Key> = host.batches.keys().copied().collect();
        self.drop_fetches(now, id, fetches);
        for key in batches {
            self.leave_batch(now, id, key);
        }
        self.forget_loads_on(now, id);
    }

    /// Fetches of other hosts from the ports of this one lose their turn: its ports may go.
    fn forget_loads_on(&mut self, now: Time, id: HostId) {
        let Some(host) = self.host(id) else { return };
        let ports: BTreeSet<PortId> = host.ports.iter().map(|port| port.id).collect();
        let mut orphans = Vec::new();
        for (slot, other) in self.hosts.iter().enumerate() {
            let Some(other) = other else { continue };
            for (&number, fetch) in &other.fetches {
                if ports.contains(&fetch.victim) {
                    orphans.push((HostId(slot as u32), number));
                }
            }
        }
        for (reader, number) in orphans {
            self.drop_fetches(now, reader, vec![number]);
        }
    }

    /// The host is gone for good.
    pub(super) fn forget_host(&mut self, now: Time, id: HostId) {
        self.forget_reports(now, id);
        let Some(host) = self.hosts.get_mut(id.0 as usize).and_then(Option::take) else {
            return;
        };
        self.lost.remove(&(host.lost_at, id));
        self.host_names.remove(&host.name);
        self.unconsidered.remove(&id);
        self.ready.retain(|&ready| ready != id);
        for port in &host.ports {
            self.forget_port(host.tenant, port);
        }
        let past = &mut self.past;
        past.reports += host.counters.reports;
        past.events += host.counters.events;
        past.refused_events += host.counters.refused_events;
        past.orders += host.counters.orders;
        past.coalesced_orders += host.counters.coalesced_orders;
    }
}
