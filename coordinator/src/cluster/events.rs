//! What each event of a report changes. [`ReportIntake`] holds the host that reports it.

use laxity_policy::admission::AdmissionEvent;
use laxity_policy::{BatchId, PortId, RequestId, Span, Time};
use laxity_wire::v1::{self, RefusalReason};

use super::REQUEST_WORK;
use super::batch::ReportedLoad;
use super::fetches::ClusterFetch;
use super::host::Charge;
use super::intake::{IntakeResult, ReportIntake};
use super::refusal::{Refused, invalid, not_yours, unknown};
use super::table::Key;

/// Longest time that one fetch is assumed to take at a victim port, in seconds. The bound keeps a
/// host from making the batches of others look late with invented bytes.
const FETCH_TIME_MAX: u64 = 10;

/// Returns the instant that is `remaining_ns` after `now`, or the clock's origin if that would be
/// earlier. Without `remaining_ns`, returns [`Time::NEVER`].
fn instant(now: Time, remaining_ns: Option<i64>) -> Time {
    match remaining_ns {
        None => Time::NEVER,
        Some(left) => Time(now.0.saturating_add_signed(left).min(Time::NEVER.0 - 1)),
    }
}

impl ReportIntake<'_> {
    pub(super) fn request_ended(&mut self, name: u64) -> Result<(), Refused> {
        match self.request_by(name) {
            Ok(key) => {
                self.workload.count_end(self.now, key);
                self.workload.end_request(self.now, self.hosts, key);
            }
            Err((RefusalReason::Unknown, _)) => {}
            Err(refused) => match self.request_of(name) {
                // The host takes part in the batch and reports nothing more about the request.
                Some((key, true)) => self.part_with(key),
                _ => return Err(refused),
            },
        }
        Ok(())
    }

    pub(super) fn batch_finished(&mut self, name: u64) -> IntakeResult {
        let key = match self.batch_of(name) {
            // The announcer's report came first, since hosts don't wait for each other.
            Err((RefusalReason::Unknown, _)) => return Ok(true),
            known => known?,
        };
        if self.workload.owns(self.id, key) {
            self.workload.count_ends_of(self.now, key);
            self.end_batch(key);
        } else {
            self.leave_batch(key);
        }
        Ok(true)
    }

    pub(super) fn batch_arrived(&mut self, said: &v1::BatchArrived) -> IntakeResult {
        if said.batch == 0 {
            return Err(invalid("a batch id is not 0"));
        }
        let parts = self.host()?.batches.len();
        let key = self.take_part(said.batch)?;
        let has_joined = self.host()?.batches.len() > parts;
        let is_owner = self.workload.owns(self.id, key);
        if is_owner {
            self.describe_batch(key, said);
        }
        let mut refused = None;
        for load in &said.requests {
            if let Err(error) = self.request_joined(key, load) {
                refused.get_or_insert(error);
            }
        }
        if is_owner && said.started {
            self.workload.start(self.now, key);
        }
        // A host that joins a batch with a rank needs the rank.
        if has_joined && let Some(batch) = self.workload.batches.get(key) {
            *self.work += batch.requests.len();
            self.note_batch(key, said.batch);
        }
        refused.map_or(Ok(true), Err)
    }

    /// Records what the announcer of a batch reports about it.
    fn describe_batch(&mut self, key: Key, said: &v1::BatchArrived) {
        let mut elapsed = Span::ZERO;
        if let Some(batch) = self.workload.batches.get_mut(key) {
            if said.layers != 0 {
                batch.layers = said.layers;
            }
            elapsed = batch.started.map_or(elapsed, |at| self.now.since(at));
        }
        let compute = Span(said.compute_ns) + elapsed;
        self.workload.announce(self.now, key, compute);
        // If the batch ahead has already ended, there is nothing to wait for.
        if let Some(ahead) = said.queued_behind
            && let Ok(ahead) = self.batch_of(ahead)
        {
            let event = AdmissionEvent::BatchQueued { batch: BatchId(key), ahead: BatchId(ahead) };
            self.workload.admission.handle(self.now, event);
        }
    }

    /// Returns the port with this index in the host's own list.
    fn port(&self, index: u32) -> Result<PortId, Refused> {
        let ports = &self.host()?.ports;
        let port = ports.get(index as usize).map(|port| port.id);
        port.ok_or_else(|| {
            let count = ports.len();
            invalid(format!("port {index} is not one of the {count} that the Hello listed"))
        })
    }

    fn loads(&self, said: &v1::RequestLoad) -> Result<Vec<ReportedLoad>, Refused> {
        let ports = self.host()?.ports.len();
        if said.loads.len() > ports {
            return Err(invalid(format!(
                "request {} loads {} ports; this host has {ports}, name each once",
                said.request,
                said.loads.len()
            )));
        }
        let load = |load: &v1::PortBytes| {
            Ok(ReportedLoad {
                port: self.port(load.port)?,
                by: self.id,
                bytes: load.bytes,
                mark: self.mark,
            })
        };
        said.loads.iter().map(load).collect()
    }

    pub(super) fn request_joined(&mut self, batch: Key, said: &v1::RequestLoad) -> IntakeResult {
        if said.request == 0 {
            return Err(invalid("a request id is not 0"));
        }
        *self.work += REQUEST_WORK;
        let loads = self.loads(said)?;
        let is_entitled = self.may_add_requests(batch);
        let key = self.enter_request(batch, said.request, is_entitled)?;
        let by = self.workload.requests.get(key).map(|request| request.by);
        if self.workload.owns(self.id, batch) && by != Some(self.id) {
            // If the announcer's quota is exhausted, the other host's report of the request holds.
            let _ = self.workload.take_over(self.hosts, self.id, key);
        }
        let Some(request) = self.workload.requests.get_mut(key) else {
            return Err(unknown("request", said.request));
        };
        if request.by == self.id {
            request.mark = self.mark;
            if is_entitled {
                request.deadline = instant(self.now, said.remaining_ns);
            }
        }
        self.workload.set_loads(self.hosts, self.id, key, &loads)?;
        self.workload.tell_admission(self.now, self.hosts, key);
        Ok(true)
    }

    pub(super) fn bytes_completed(&mut self, said: &v1::BytesCompleted) -> Result<(), Refused> {
        let port = self.port(said.port)?;
        let Some(key) = self.workload.request_named(self.tenant, said.request) else {
            return Ok(());
        };
        let request = self.workload.requests.get_mut(key);
        let request = request.ok_or_else(|| unknown("request", said.request))?;
        let own = |load: &&mut ReportedLoad| load.by == self.id && load.port == port;
        let Some(load) = request.loads.iter_mut().find(own) else {
            let refused = not_yours(format!(
                "this host takes no part in the batch of request {}",
                said.request
            ));
            return self.excuse(said.request, refused);
        };
        let bytes = said.bytes.min(load.bytes);
        load.bytes -= bytes;
        let event = AdmissionEvent::BytesCompleted { request: RequestId(key), port, bytes };
        self.workload.admission.handle(self.now, event);
        Ok(())
    }

    pub(super) fn port_load(&mut self, mut said: v1::PortLoad) -> Result<(), Refused> {
        let id = self.port(said.port)?;
        let Some(host) = self.hosts.get_mut(self.id) else { return Ok(()) };
        said.queued_level_bytes.truncate(laxity_policy::Level::ROWS);
        said.queued_stage_bytes.truncate(laxity_policy::Stage::ALL.len());
        said.load_permille = said.load_permille.min(1000);
        let rate = said.rate_bytes_per_s;
        host.counters.completed_flows += u64::from(said.completed_flows as u32);
        host.counters.missed_flows += u64::from(said.missed_flows as u32);
        if let Some(port) = host.ports.get_mut(said.port as usize) {
            port.info.rate_bytes_per_s = rate.unwrap_or(port.info.rate_bytes_per_s);
            port.load = said;
        }
        if let Some(bytes_per_second) = rate {
            let event = AdmissionEvent::PortRate { port: id, bytes_per_second };
            self.workload.admission.handle(self.now, event);
        }
        Ok(())
    }

    pub(super) fn fetch_wanted(&mut self, said: &v1::FetchWanted) -> Result<(), Refused> {
        if said.fetch == 0 {
            return Err(invalid("a fetch id is not 0"));
        }
        let batch = match self.batch_of(said.batch) {
            // The batch ended while this event was on its way.
            Err((RefusalReason::Unknown, _)) => return Ok(()),
            known => known?,
        };
        // Storage, or a host without a daemon, has no port here.
        let port = self.hosts.port_at(self.tenant, &said.victim_address);
        let Some((victim, rate)) = port.map(|port| (port.id, port.info.rate_bytes_per_s)) else {
            return Ok(());
        };
        let wanted = (batch, said.request, victim);
        if let Some(fetch) = self.fetches.0.get_mut(&(self.id, said.fetch)) {
            if (fetch.batch, fetch.request, fetch.victim) == wanted {
                fetch.mark = self.mark;
                return Ok(());
            }
            // Another fetch had this number: the daemon restarted, or the batch began anew.
            self.close_fetch(self.id, said.fetch);
        }
        let request = self.workload.request_named(self.tenant, said.request);
        let request = request.filter(|&key| {
            let request = self.workload.requests.get(key);
            request.is_some_and(|request| request.batch == batch)
        });
        self.hosts.charge(self.id, Charge::Fetch)?;
        let fetch = ClusterFetch { mark: self.mark, batch, request: said.request, victim };
        self.fetches.0.insert((self.id, said.fetch), fetch);
        let load = ReportedLoad {
            port: victim,
            by: self.id,
            bytes: said.bytes.min(rate.saturating_mul(FETCH_TIME_MAX)),
            mark: self.mark,
        };
        if let Some(request) = request
            && self.workload.add_load(self.hosts, request, load)
        {
            self.workload.tell_admission(self.now, self.hosts, request);
        }
        Ok(())
    }
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
