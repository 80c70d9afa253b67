//! What daemons say, checked and passed on to admission. Every field comes from another machine.
//!
//! A host speaks for its own ports, and for batches that it takes part in; the host that announced
//! a batch first owns it (docs/coordinator.md, "Who may say what"). What is refused is counted and
//! told to the daemon, and changes nothing; only a broken stream (sequence, size) ends.

use core::hash::BuildHasher;

use laxity_policy::admission::AdmissionEvent;
use laxity_policy::{BatchId, RequestId, Span, Time};
use laxity_wire::v1::{
    self, RefusalReason, Report, SnapshotPiece, event::Event, from_coordinator::Message,
};

use super::attend::goodbye;
use super::batch::Load;
use super::host::{HostId, HostPort, Tenant};
use super::table::Key;
use super::{Cluster, EVENT_WORK, REQUEST_WORK};

/// Most of a victim port's time that one fetch is believed to take, so that a reader can't make
/// others look late by inventing bytes.
const FETCH_TIME_MAX: u64 = 10;

/// Why an event was refused, for the daemon.
pub(super) type Refused = (RefusalReason, String);

/// Whether a run should answer.
pub(super) type Outcome = Result<bool, Refused>;

pub(super) fn unknown(what: &str, id: u64) -> Refused {
    let detail = format!("{what} {id} is not known; announce it first");
    (RefusalReason::Unknown, detail)
}

pub(super) fn not_yours(detail: impl Into<String>) -> Refused {
    (RefusalReason::NotYours, detail.into())
}

pub(super) fn over_limit(detail: impl Into<String>) -> Refused {
    (RefusalReason::Limit, detail.into())
}

fn invalid(detail: impl Into<String>) -> Refused {
    (RefusalReason::Invalid, detail.into())
}

/// The instant that is so far away; late ones before the clock's origin are the origin.
fn instant(now: Time, remaining_ns: Option<i64>) -> Time {
    match remaining_ns {
        None => Time::NEVER,
        Some(left) => Time(now.0.saturating_add_signed(left).min(Time::NEVER.0 - 1)),
    }
}

impl Cluster {
    /// Whether this stream still speaks for the host.
    #[must_use]
    pub fn speaks(&self, id: HostId, stream: u64) -> bool {
        self.host(id)
            .is_some_and(|host| host.stream == Some(stream))
    }

    /// How much a host has to do with.
    fn entries_of(&self, id: HostId) -> usize {
        let batches = self
            .host(id)
            .into_iter()
            .flat_map(|host| host.batches.keys());
        let batches = batches.filter_map(|&key| self.batches.get(key));
        batches.map(|batch| 1 + batch.requests.len()).sum()
    }

    /// A message came from the host: it lives.
    pub fn heard(&mut self, now: Time, id: HostId, stream: u64) {
        if let Some(host) = self.host_mut(id).filter(|host| host.stream == Some(stream)) {
            host.heard_at = now;
        }
    }

    /// The host has applied an order.
    pub fn acknowledged(&mut self, id: HostId, stream: u64, epoch: Option<v1::Epoch>) {
        if let Some(host) = self.host_mut(id).filter(|host| host.stream == Some(stream)) {
            host.applied = epoch.or(host.applied);
        }
    }

    /// The host wants a full order.
    pub fn resync(&mut self, id: HostId, stream: u64) {
        if let Some(host) = self.host_mut(id).filter(|host| host.stream == Some(stream)) {
            host.outbox.demand_full();
            self.work += self.entries_of(id);
            self.list(id);
        }
    }

    /// Takes a report.
    ///
    /// # Errors
    /// The stream has broken a rule and must end with this.
    pub fn report(
        &mut self,
        now: Time,
        id: HostId,
        stream: u64,
        report: Report,
    ) -> Result<(), v1::Goodbye> {
        let most = self.settings.limits.events_per_report_max;
        self.work += (1 + report.events.len()) * EVENT_WORK;
        let Some(host) = self.host_mut(id).filter(|host| host.stream == Some(stream)) else {
            let detail = "another stream speaks for this host".to_owned();
            return Err(goodbye(v1::GoodbyeReason::Replaced, detail));
        };
        if report.sequence != host.reported + 1 {
            let detail = format!(
                "report {} follows report {}; sequences grow by one",
                report.sequence, host.reported
            );
            return Err(goodbye(v1::GoodbyeReason::Protocol, detail));
        }
        let requests = |event: &v1::Event| match &event.event {
            Some(Event::BatchArrived(said)) => said.requests.len(),
            _ => 0,
        };
        let requests: usize = report.events.iter().map(requests).sum();
        if requests > most {
            let detail = format!(
                "a report of {requests} requests exceeds limits.events_per_report_max = {most}; \
                 announce a batch in several reports"
            );
            return Err(goodbye(v1::GoodbyeReason::Protocol, detail));
        }
        if report.events.len() > most {
            let detail = format!(
                "a report of {} events exceeds limits.events_per_report_max = {most}",
                report.events.len()
            );
            return Err(goodbye(v1::GoodbyeReason::Protocol, detail));
        }
        host.reported = report.sequence;
        host.heard_at = now;
        host.counters.reports += 1;
        host.counters.events += report.events.len() as u64;
        if host.drained {
            return Ok(());
        }
        let piece = report.snapshot();
        if piece != SnapshotPiece::Unspecified && !host.in_snapshot {
            host.in_snapshot = true;
            host.mark += 1;
        }
        let mut first: Option<(usize, Refused)> = None;
        let mut count = 0;
        let mut owed = false;
        for (index, event) in report.events.into_iter().enumerate() {
            // An arm that this release does not know.
            let Some(event) = event.event else { continue };
            match self.take_event(now, id, event) {
                Ok(answer) => owed |= answer,
                Err(refused) => {
                    count += 1;
                    first.get_or_insert((index, refused));
                }
            }
        }
        if piece == SnapshotPiece::End {
            self.work += self.entries_of(id);
            self.sweep(now, id);
            owed = true;
        }
        let Some(host) = self.host_mut(id) else {
            return Ok(());
        };
        if piece == SnapshotPiece::End {
            host.in_snapshot = false;
            host.complete = true;
            host.outbox.demand_full();
        }
        host.owed |= owed;
        if let Some((event, (reason, detail))) = first {
            host.counters.refused_events += u64::from(count);
            host.outbox.write(Message::Refusal(v1::Refusal {
                report: report.sequence,
                event: event as u32,
                reason: reason as i32,
                detail,
                count,
            }));
            self.list(id);
        }
        self.unconsidered.insert(id);
        if owed {
            let at = now + self.policy().debounce;
            self.settle_at = Some(self.settle_at.map_or(at, |due| due.min(at)));
        }
        Ok(())
    }

    fn take_event(&mut self, now: Time, id: HostId, event: Event) -> Outcome {
        match event {
            Event::BatchArrived(said) => self.batch_arrived(now, id, &said),
            Event::BatchStarted(said) => {
                if let Some(key) = self.owned_batch(id, said.batch)? {
                    self.batch_started(now, key);
                }
                Ok(false)
            }
            Event::BatchProgress(said) => {
                if let Some(key) = self.owned_batch(id, said.batch)? {
                    self.batch_started(now, key);
                    if let Some(batch) = self.batches.get_mut(key) {
                        batch.layer = said.layer;
                    }
                }
                Ok(false)
            }
            Event::BatchFinished(said) => {
                let key = match self.batch_of(id, said.batch) {
                    // The owner's word came first: hosts don't wait for each other.
                    Err((RefusalReason::Unknown, _)) => return Ok(true),
                    known => known?,
                };
                if self.owns_batch(id, key) {
                    self.count_ends_of(now, key);
                    self.depart(now, key);
                } else {
                    self.leave_batch(now, id, key);
                }
                Ok(true)
            }
            Event::RequestJoined(said) => {
                let key = self.batch_of(id, said.batch)?;
                let load = said
                    .request
                    .as_ref()
                    .ok_or_else(|| invalid("RequestJoined has no request"))?;
                self.request_joined(now, id, key, load)
            }
            Event::RequestStarted(said) => {
                match self.request_by(id, said.request) {
                    Ok(key) => {
                        if let Some(request) = self.requests.get_mut(key) {
                            request.started = true;
                        }
                        let request = RequestId(key);
                        self.admission
                            .handle(now, AdmissionEvent::RequestStarted { request });
                    }
                    Err(refused) => self.excuse(id, said.request, refused)?,
                }
                Ok(false)
            }
            Event::RequestEnded(said) => self.request_ended(now, id, said.request),
            Event::BytesCompleted(said) => self.bytes_completed(now, id, &said),
            Event::PortLoad(said) => self.port_load(now, id, said),
            Event::FetchWanted(said) => self.fetch_wanted(now, id, &said),
            Event::FetchFinished(said) => {
                let known = self
                    .host_mut(id)
                    .and_then(|host| host.fetches.remove(&said.fetch));
                // It may have lost its turn with its victim.
                if let Some(fetch) = known {
                    self.forget_fetch(now, id, &fetch);
                }
                Ok(false)
            }
        }
    }

    /// A batch that the host takes part in.
    fn batch_of(&self, id: HostId, name: u64) -> Result<Key, Refused> {
        let host = self.host(id).ok_or_else(|| unknown("batch", name))?;
        let key = self.batch_names.get(&(host.tenant, name));
        let &key = key.ok_or_else(|| unknown("batch", name))?;
        if host.batches.contains_key(&key) {
            Ok(key)
        } else {
            Err(not_yours(format!(
                "this host takes no part in batch {name}; announce it first"
            )))
        }
    }

    /// A batch that the host owns. None if the host only takes part in it, or it has ended: a
    /// daemon can't know which host announced a batch first, nor that its end is under way, so what
    /// it says then is left aside and not refused.
    fn owned_batch(&self, id: HostId, name: u64) -> Result<Option<Key>, Refused> {
        match self.batch_of(id, name) {
            Ok(key) => Ok(Some(key).filter(|&key| self.owns_batch(id, key))),
            Err((RefusalReason::Unknown, _)) => Ok(None),
            Err(refused) => Err(refused),
        }
    }

    /// What a host says of a request is left aside, and not refused, if the request has ended or
    /// the host takes part in its batch.
    fn excuse(&self, id: HostId, name: u64, refused: Refused) -> Result<(), Refused> {
        let host = self.host(id).map(|host| (host.tenant, &host.batches));
        let known = host.and_then(|(tenant, batches)| {
            let &key = self.request_names.get(&(tenant, name))?;
            Some((self.requests.get(key)?.batch, batches))
        });
        match known {
            Some((batch, batches)) if !batches.contains_key(&batch) => Err(refused),
            _ => Ok(()),
        }
    }

    pub(super) fn owns_batch(&self, id: HostId, key: Key) -> bool {
        let batch = self.batches.get(key);
        batch.is_some_and(|batch| batch.owner() == Some(id))
    }

    /// Whether the host may say which requests a batch has, and when they are due.
    fn may_add_requests(&self, id: HostId, key: Key) -> bool {
        let (Some(batch), Some(host)) = (self.batches.get(key), self.host(id)) else {
            return false;
        };
        batch.owner() == Some(id)
            || self.settings.tenants.trusts_members(batch.tenant)
            || batch
                .invited
                .contains(&self.invitations.hash_one(&host.name))
    }

    /// A request that the host told of first, or whose batch it owns.
    fn request_by(&self, id: HostId, name: u64) -> Result<Key, Refused> {
        let host = self.host(id).ok_or_else(|| unknown("request", name))?;
        let key = self.request_names.get(&(host.tenant, name));
        let &key = key.ok_or_else(|| unknown("request", name))?;
        let request = self.requests.get(key);
        let request = request.ok_or_else(|| unknown("request", name))?;
        if request.by == id || self.owns_batch(id, request.batch) {
            Ok(key)
        } else {
            Err(not_yours(format!("another host told of request {name}")))
        }
    }

    fn request_ended(&mut self, now: Time, id: HostId, name: u64) -> Outcome {
        match self.request_by(id, name) {
            Ok(key) => {
                self.count_end(now, key);
                self.end_request(now, key);
            }
            Err((RefusalReason::Unknown, _)) => {}
            Err(refused) => {
                let host = self.host(id).map(|host| (host.tenant, &host.batches));
                let part = host.and_then(|(tenant, batches)| {
                    let &key = self.request_names.get(&(tenant, name))?;
                    let request = self.requests.get(key)?;
                    batches.contains_key(&request.batch).then_some(key)
                });
                // A member that has nothing left of it.
                self.part_with(now, id, part.ok_or(refused)?);
            }
        }
        Ok(false)
    }

    fn batch_started(&mut self, now: Time, key: Key) {
        if let Some(batch) = self.batches.get_mut(key)
            && batch.started.is_none()
        {
            batch.started = Some(now);
            let batch = BatchId(key);
            self.admission
                .handle(now, AdmissionEvent::BatchStarted { batch });
            self.rerank_fetches(key);
        }
    }

    fn batch_arrived(&mut self, now: Time, id: HostId, said: &v1::BatchArrived) -> Outcome {
        if said.batch == 0 {
            return Err(invalid("a batch id is not 0"));
        }
        let parts = self.host(id).map_or(0, |host| host.batches.len());
        let key = self.take_part(now, id, said.batch)?;
        let joined = self.host(id).map_or(0, |host| host.batches.len()) > parts;
        let owner = self.owns_batch(id, key);
        if owner {
            let most = self.settings.limits.hosts_per_batch_max;
            let Some(batch) = self.batches.get_mut(key) else {
                return Err(unknown("batch", said.batch));
            };
            if !said.hosts.is_empty() {
                let named = said.hosts.iter().take(most);
                batch.invited = named.map(|name| self.invitations.hash_one(name)).collect();
            }
            if said.layers != 0 {
                batch.layers = said.layers;
            }
            let elapsed = batch.started.map_or(Span::ZERO, |at| now.since(at));
            let event = AdmissionEvent::BatchArrived {
                batch: BatchId(key),
                requests: Vec::new(),
                compute: Span(said.compute_ns) + elapsed,
            };
            self.admission.handle(now, event);
            if let Some(ahead) = said.queued_behind {
                // One that has ended meanwhile is nothing to wait for.
                if let Ok(ahead) = self.batch_of(id, ahead) {
                    let event = AdmissionEvent::BatchQueued {
                        batch: BatchId(key),
                        ahead: BatchId(ahead),
                    };
                    self.admission.handle(now, event);
                }
            }
        }
        let mut refused = None;
        for load in &said.requests {
            if let Err(error) = self.request_joined(now, id, key, load) {
                refused.get_or_insert(error);
            }
        }
        if owner && said.started {
            self.batch_started(now, key);
        }
        // One that joins a batch that has a rank already has to be told of it.
        if joined {
            self.note_all(id, key);
        }
        refused.map_or(Ok(true), Err)
    }

    fn loads(&self, id: HostId, said: &v1::RequestLoad) -> Result<Vec<Load>, Refused> {
        let host = self.host(id).ok_or_else(|| unknown("host", 0))?;
        if said.loads.len() > host.ports.len() {
            let detail = format!(
                "request {} loads {} ports; this host has {}, name each once",
                said.request,
                said.loads.len(),
                host.ports.len()
            );
            return Err(invalid(detail));
        }
        let load = |load: &v1::PortBytes| {
            let port = host.port(load.port).ok_or_else(|| {
                invalid(format!(
                    "port {} is not one of the {} that the Hello listed",
                    load.port,
                    host.ports.len()
                ))
            })?;
            Ok(Load {
                port,
                by: id,
                bytes: load.bytes,
                mark: host.mark,
            })
        };
        said.loads.iter().map(load).collect()
    }

    fn request_joined(
        &mut self,
        now: Time,
        id: HostId,
        batch: Key,
        said: &v1::RequestLoad,
    ) -> Outcome {
        if said.request == 0 {
            return Err(invalid("a request id is not 0"));
        }
        self.work += REQUEST_WORK;
        let loads = self.loads(id, said)?;
        let entitled = self.may_add_requests(id, batch);
        let deadline = instant(now, said.remaining_ns);
        let key = self.enter_request(id, batch, said.request, entitled)?;
        let owner = self.owns_batch(id, batch);
        let mark = self.host(id).map_or(0, |host| host.mark);
        let by = self.requests.get(key).map(|request| request.by);
        if owner && by != Some(id) {
            self.take_over(id, key);
        }
        let Some(request) = self.requests.get_mut(key) else {
            return Err(unknown("request", said.request));
        };
        if request.by == id {
            request.mark = mark;
            if entitled {
                request.deadline = deadline;
            }
            request.started |= said.started;
        }
        self.set_loads(id, key, &loads)?;
        self.tell_admission(now, key);
        Ok(true)
    }

    fn bytes_completed(&mut self, now: Time, id: HostId, said: &v1::BytesCompleted) -> Outcome {
        let host = self.host(id).ok_or_else(|| unknown("host", 0))?;
        let port = host
            .port(said.port)
            .ok_or_else(|| invalid(format!("port {} is not in the Hello", said.port)))?;
        let Some(&key) = self.request_names.get(&(host.tenant, said.request)) else {
            return Ok(false);
        };
        let request = self.requests.get_mut(key);
        let request = request.ok_or_else(|| unknown("request", said.request))?;
        let own = |load: &&mut Load| load.by == id && load.port == port;
        let Some(load) = request.loads.iter_mut().find(own) else {
            let refused = not_yours(format!(
                "this host takes no part in the batch of request {}",
                said.request
            ));
            return self.excuse(id, said.request, refused).map(|()| false);
        };
        let bytes = said.bytes.min(load.bytes);
        load.bytes -= bytes;
        let request = RequestId(key);
        let event = AdmissionEvent::BytesCompleted {
            request,
            port,
            bytes,
        };
        self.admission.handle(now, event);
        Ok(false)
    }

    fn port_load(&mut self, now: Time, id: HostId, mut said: v1::PortLoad) -> Outcome {
        let host = self.host_mut(id).ok_or_else(|| unknown("host", 0))?;
        let count = host.ports.len();
        let Some(port) = host.ports.get_mut(said.port as usize) else {
            let detail = format!(
                "port {} is not one of the {count} that the Hello listed",
                said.port
            );
            return Err(invalid(detail));
        };
        said.queued_level_bytes.truncate(laxity_policy::Level::ROWS);
        said.queued_stage_bytes
            .truncate(laxity_policy::Stage::ALL.len());
        said.load_permille = said.load_permille.min(1000);
        let rate = said.rate_bytes_per_s;
        host.counters.completed_flows += u64::from(said.completed_flows as u32);
        host.counters.missed_flows += u64::from(said.missed_flows as u32);
        port.load = said;
        if let Some(bytes_per_second) = rate {
            port.info.rate_bytes_per_s = bytes_per_second;
            let port = port.id;
            let event = AdmissionEvent::PortRate {
                port,
                bytes_per_second,
            };
            self.admission.handle(now, event);
        }
        Ok(false)
    }

    /// The egress that has this address, among the hosts of a tenant.
    fn port_at(&self, tenant: Tenant, address: &[u8]) -> Option<&HostPort> {
        let port = *self.addresses.get(&(tenant, address.try_into().ok()?))?;
        let host = self.host((*self.port_hosts.get(port.0 as usize)?)?)?;
        host.ports.iter().find(|known| known.id == port)
    }

    fn fetch_wanted(&mut self, now: Time, id: HostId, said: &v1::FetchWanted) -> Outcome {
        if said.fetch == 0 {
            return Err(invalid("a fetch id is not 0"));
        }
        let batch = match self.batch_of(id, said.batch) {
            // Its end and this crossed on their way.
            Err((RefusalReason::Unknown, _)) => return Ok(false),
            known => known?,
        };
        let host = self.host(id).ok_or_else(|| unknown("host", 0))?;
        if !host.can(v1::Capability::FetchTokens) {
            return Err(invalid(
                "this daemon did not name FETCH_TOKENS in its Hello",
            ));
        }
        let (tenant, mark) = (host.tenant, host.mark);
        let port = if said.victim_address.is_empty() {
            let port = self
                .host_names
                .get(&said.victim_host)
                .and_then(|&victim| self.host(victim))
                .filter(|victim| victim.tenant == tenant)
                .and_then(|victim| victim.ports.get(said.victim_port as usize));
            let Some(port) = port else {
                let detail = format!(
                    "{} has no port {} that is known here; fetch without a token",
                    said.victim_host, said.victim_port
                );
                return Err((RefusalReason::Unknown, detail));
            };
            if port.info.direction() != v1::Direction::Egress {
                return Err(invalid("a victim port is an egress"));
            }
            port
        } else {
            // Storage, or a host without a daemon: no mistake of the reader, and nobody to be
            // protected.
            match self.port_at(tenant, &said.victim_address) {
                Some(port) => port,
                None => return Ok(false),
            }
        };
        let (victim, rate) = (port.id, port.info.rate_bytes_per_s);
        let bytes = said.bytes.min(rate.saturating_mul(FETCH_TIME_MAX));
        if let Some(fetch) = host_fetch(self, id, said.fetch) {
            if (fetch.batch, fetch.request, fetch.victim) == (batch, said.request, victim) {
                fetch.mark = mark;
                return Ok(false);
            }
            // Another of that number: its daemon was restarted, or the batch begun anew.
            self.drop_fetches(now, id, vec![said.fetch]);
        }
        let request = self.request_names.get(&(tenant, said.request)).copied();
        let request = request.filter(|&key| {
            let request = self.requests.get(key);
            request.is_some_and(|request| request.batch == batch)
        });
        let rank = self.fetch_rank(batch, request);
        let key = self.open_fetch(id, said, batch, victim, rank)?;
        if let Some(batch) = self.batches.get_mut(batch) {
            batch.fetches.insert(key);
        }
        if let Some(request) = request
            && self.add_load(id, request, victim, bytes)
        {
            self.tell_admission(now, request);
        }
        Ok(false)
    }
}

/// A fetch of a host by its own number.
fn host_fetch(
    cluster: &mut Cluster,
    id: HostId,
    fetch: u64,
) -> Option<&mut super::host::HostFetch> {
    cluster.host_mut(id)?.fetches.get_mut(&fetch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_what_remains_counted_from_receipt() {
        let now = Time(1000);
        assert_eq!(instant(now, Some(500)), Time(1500));
        assert_eq!(instant(now, Some(-400)), Time(600));
        assert_eq!(instant(now, Some(i64::MIN)), Time(0));
        assert_eq!(instant(now, None), Time::NEVER);
        assert!(instant(Time(u64::MAX - 5), Some(i64::MAX)) < Time::NEVER);
    }
}
