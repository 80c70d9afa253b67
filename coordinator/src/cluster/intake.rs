//! Checks what daemons report and passes it on to admission. Every field comes from another
//! machine.
//!
//! A host may report on its own ports and on batches that it takes part in. The host that announced
//! a batch first owns it (docs/coordinator.md, "Who may say what"). A refused event changes
//! nothing. It is counted, and the daemon gets a refusal. Only a wrong sequence or size ends the
//! stream.

use laxity_policy::{Level, Time};
use laxity_wire::v1::{
    self, RefusalReason, Report, SnapshotPiece, event::Event, from_coordinator::Message,
};

use super::fetches::ClusterFetches;
use super::host::{Host, HostId, Tenant};
use super::hosts::Hosts;
use super::refusal::{Refused, goodbye, not_yours, unknown};
use super::table::Key;
use super::workload::Workload;
use super::{Cluster, ClusterSettings, EVENT_WORK};

/// Maximum number of characters of a word of a host's settings.
const SETTING_CHARS_MAX: usize = 16;

/// Whether the event needs an order as an answer, or why it is refused.
pub(super) type IntakeResult = Result<bool, Refused>;

/// The report of one host at one time, and the parts of the cluster that it may change.
pub(super) struct ReportIntake<'a> {
    pub(super) now: Time,
    pub(super) id: HostId,
    pub(super) tenant: Tenant,
    /// The host's current [`Host::mark`].
    pub(super) mark: u64,
    pub(super) settings: &'a ClusterSettings,
    pub(super) hosts: &'a mut Hosts,
    pub(super) workload: &'a mut Workload,
    pub(super) fetches: &'a mut ClusterFetches,
    /// Work so far, for [`Cluster::take_work`].
    pub(super) work: &'a mut usize,
}

/// Returns the problem with a report that is too large or out of sequence.
fn broken(report: &Report, reported: u64, most: usize) -> Option<String> {
    let requests = |event: &v1::Event| match &event.event {
        Some(Event::BatchArrived(said)) => said.requests.len(),
        _ => 0,
    };
    let requests: usize = report.events.iter().map(requests).sum();
    if report.sequence != reported + 1 {
        Some(format!("report {} follows report {reported}; sequences grow by one", report.sequence))
    } else if requests > most {
        Some(format!(
            "a report of {requests} requests exceeds limits.events_per_report_max = {most}; \
             announce a batch in several reports"
        ))
    } else if report.events.len() > most {
        Some(format!(
            "a report of {} events exceeds limits.events_per_report_max = {most}",
            report.events.len()
        ))
    } else {
        None
    }
}

impl Cluster {
    /// Reports whether `stream` is still the host's current stream.
    pub fn speaks(&self, id: HostId, stream: u64) -> bool {
        let host = self.hosts.get(id);
        host.is_some_and(|host| host.stream == Some(stream))
    }

    /// Counts the batches that a host takes part in and their requests.
    fn entries_of(&self, id: HostId) -> usize {
        let host = self.hosts.get(id).into_iter();
        let batches = host.flat_map(|host| host.batches.keys());
        let batches = batches.filter_map(|&key| self.workload.batches.get(key));
        batches.map(|batch| 1 + batch.requests.len()).sum()
    }

    pub fn heard(&mut self, now: Time, id: HostId, stream: u64) {
        if let Some(host) = self.hosts.speaking(id, stream) {
            host.heard_at = now;
        }
    }

    pub fn acknowledged(&mut self, id: HostId, stream: u64, epoch: Option<v1::Epoch>) {
        if let Some(host) = self.hosts.speaking(id, stream) {
            host.applied = epoch.or(host.applied);
        }
    }

    pub fn resync(&mut self, id: HostId, stream: u64) {
        if let Some(host) = self.hosts.speaking(id, stream) {
            host.outbox.demand_full();
            self.work += self.entries_of(id);
            self.hosts.list(id);
        }
    }

    pub(super) fn intake(&mut self, now: Time, id: HostId) -> Option<ReportIntake<'_>> {
        let host = self.hosts.get(id)?;
        Some(ReportIntake {
            now,
            id,
            tenant: host.tenant,
            mark: host.mark,
            settings: &self.settings,
            hosts: &mut self.hosts,
            workload: &mut self.workload,
            fetches: &mut self.fetches,
            work: &mut self.work,
        })
    }

    pub fn report(
        &mut self,
        now: Time,
        id: HostId,
        stream: u64,
        report: Report,
    ) -> Result<(), v1::Goodbye> {
        let most = self.settings.limits.events_per_report_max;
        self.work += (1 + report.events.len()) * EVENT_WORK;
        let Some(host) = self.hosts.speaking(id, stream) else {
            let detail = "another stream of this host has replaced this one".to_owned();
            return Err(goodbye(v1::GoodbyeReason::Replaced, detail));
        };
        if let Some(detail) = broken(&report, host.reported, most) {
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
        let is_end = piece == SnapshotPiece::End;
        if self.take_events(now, id, report, is_end) {
            let at = now + self.policy().debounce;
            self.settle_at = Some(self.settle_at.map_or(at, |due| due.min(at)));
        }
        Ok(())
    }

    /// Processes the events of a report. Returns whether they need an order as an answer.
    fn take_events(&mut self, now: Time, id: HostId, report: Report, is_end: bool) -> bool {
        let Some(mut intake) = self.intake(now, id) else { return false };
        let mut refusal: Option<v1::Refusal> = None;
        let mut owed = is_end;
        for (index, event) in report.events.into_iter().enumerate() {
            // This release does not have the event's type, so the event is skipped.
            let Some(event) = event.event else { continue };
            match intake.take_event(event) {
                Ok(answer) => owed |= answer,
                Err((reason, detail)) => {
                    let first = refusal.get_or_insert(v1::Refusal {
                        report: report.sequence,
                        event: index as u32,
                        reason: reason as i32,
                        detail,
                        count: 0,
                    });
                    first.count += 1;
                }
            }
        }
        if is_end {
            self.work += self.entries_of(id);
            if let Some(mut intake) = self.intake(now, id) {
                intake.sweep();
            }
        }
        self.hosts.unconsidered.insert(id);
        let Some(host) = self.hosts.get_mut(id) else { return owed };
        if is_end {
            host.in_snapshot = false;
            host.complete = true;
            host.outbox.demand_full();
        }
        host.owed |= owed;
        if let Some(refusal) = refusal {
            host.counters.refused_events += u64::from(refusal.count);
            host.refused_at = Some(now);
            host.outbox.write(Message::Refusal(refusal));
            self.hosts.list(id);
        }
        owed
    }
}

impl ReportIntake<'_> {
    pub(super) fn host(&self) -> Result<&Host, Refused> {
        self.hosts.get(self.id).ok_or_else(|| unknown("host", 0))
    }

    /// Stores the host's configuration. Lists and words are cut to what honest hosts say.
    fn host_settings(&mut self, mut said: v1::HostSettings) {
        said.level_dscp.truncate(Level::ROWS);
        for word in [&mut said.marking, &mut said.mode] {
            *word = word.chars().take(SETTING_CHARS_MAX).collect();
        }
        if let Some(host) = self.hosts.get_mut(self.id) {
            host.settings = Some(said);
        }
    }

    fn take_event(&mut self, event: Event) -> IntakeResult {
        match event {
            Event::BatchArrived(said) => return self.batch_arrived(&said),
            Event::BatchFinished(said) => return self.batch_finished(said.batch),
            Event::BatchStarted(said) => {
                if let Some(key) = self.owned_batch(said.batch)? {
                    self.workload.start(self.now, key);
                }
            }
            Event::BatchProgress(said) => {
                if let Some(key) = self.owned_batch(said.batch)? {
                    self.workload.start(self.now, key);
                    if let Some(batch) = self.workload.batches.get_mut(key) {
                        batch.layer = said.layer;
                    }
                }
            }
            Event::RequestEnded(said) => self.request_ended(said.request)?,
            Event::BytesCompleted(said) => self.bytes_completed(&said)?,
            Event::PortLoad(said) => self.port_load(said)?,
            Event::FetchWanted(said) => self.fetch_wanted(&said)?,
            Event::FetchFinished(said) => self.close_fetch(self.id, said.fetch),
            Event::HostSettings(said) => self.host_settings(said),
        }
        Ok(false)
    }

    pub(super) fn batch_of(&self, name: u64) -> Result<Key, Refused> {
        let key = self.workload.batch_named(self.tenant, name);
        let key = key.ok_or_else(|| unknown("batch", name))?;
        if self.host()?.batches.contains_key(&key) {
            Ok(key)
        } else {
            Err(not_yours(format!("this host takes no part in batch {name}; announce it first")))
        }
    }

    /// Returns a batch that the host owns. Returns `None` if the host only takes part in the batch,
    /// or if the batch has ended. A daemon can't know either, so its event is ignored and not
    /// refused.
    pub(super) fn owned_batch(&self, name: u64) -> Result<Option<Key>, Refused> {
        match self.batch_of(name) {
            Ok(key) => Ok(Some(key).filter(|&key| self.workload.owns(self.id, key))),
            Err((RefusalReason::Unknown, _)) => Ok(None),
            Err(refused) => Err(refused),
        }
    }

    /// Returns the request with this name and whether the host takes part in its batch.
    pub(super) fn request_of(&self, name: u64) -> Option<(Key, bool)> {
        let key = self.workload.request_named(self.tenant, name)?;
        let batch = self.workload.requests.get(key)?.batch;
        Some((key, self.workload.takes_part(self.id, batch)))
    }

    /// Ignores a refused event if the request has ended or the host takes part in its batch.
    /// Otherwise the event stays refused.
    pub(super) fn excuse(&self, name: u64, refused: Refused) -> Result<(), Refused> {
        match self.request_of(name) {
            Some((_, false)) => Err(refused),
            _ => Ok(()),
        }
    }

    /// Reports whether the host may add requests with deadlines to a batch.
    pub(super) fn may_add_requests(&self, key: Key) -> bool {
        self.workload.owns(self.id, key) || self.settings.tenants.trusts_members(self.tenant)
    }

    /// Returns a request that is charged to the host, or whose batch the host owns.
    pub(super) fn request_by(&self, name: u64) -> Result<Key, Refused> {
        let key = self.workload.request_named(self.tenant, name);
        let key = key.ok_or_else(|| unknown("request", name))?;
        let request = self.workload.requests.get(key);
        let request = request.ok_or_else(|| unknown("request", name))?;
        if request.by == self.id || self.workload.owns(self.id, request.batch) {
            Ok(key)
        } else {
            Err(not_yours(format!("another host told of request {name}")))
        }
    }
}
