//! The batches and requests of this host, and which changes the coordinator has not received.
//!
//! The scheduler thread uses this module. It has no queue of events. It marks what changed, and
//! makes an [`OutgoingReport`] of the marks when the last report has been taken. So a slow
//! coordinator gets the newest values, not every change. A snapshot marks everything.
//!
//! Loads are those of admission. Completed bytes and layers come in coarse steps (MFS §4.4.2).

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use laxity_policy::{Span, Time};
use laxity_wire::v1::{
    BatchArrived, BatchFinished, BatchProgress, BatchStarted, BytesCompleted, FetchFinished,
    PortBytes, RequestEnded, RequestLoad, SnapshotPiece, event::Event as Kind,
};

use super::fetch_reports::FetchReports;
use super::outgoing::{Draft, OutgoingReport};
use crate::driver::fetches;

/// Maximum number of batches. Beyond that, the oldest are removed here and at the coordinator.
pub const BATCHES_MAX: usize = 1 << 12;
/// Maximum number of requests. Beyond that, the oldest batches are removed.
pub const REQUESTS_MAX: usize = 1 << 16;
/// Maximum number of unreported ends. Beyond that, a snapshot is sent instead, without what has
/// ended.
const PARTING_MAX: usize = 1 << 12;
/// Number of equal parts of a batch's layers. The end of a part is reported.
const STEPS: u32 = 4;

/// How soon a report is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// No report is needed.
    #[default]
    Nothing,
    /// The change goes with the next report, or alone after a while.
    Later,
    /// The change may change the order.
    Now,
}

#[derive(Debug, Default)]
struct ReportedBatch {
    id: u64,
    compute: Span,
    layers: u16,
    started: Option<Time>,
    layer: u16,
    behind: u64,
    requests: BTreeSet<u64>,
    told: bool,
    /// Whether the batch has to be announced, perhaps again.
    changed: bool,
    start_told: bool,
    step_told: u32,
    /// Requests that are new or changed.
    fresh: BTreeSet<u64>,
    /// Requests with completed bytes that were not reported.
    moved: BTreeSet<u64>,
}

#[derive(Debug)]
struct ReportedRequest {
    batch: u64,
    deadline: Time,
    left: u64,
    /// Completed bytes that were not reported.
    untold: u64,
    told: bool,
}

/// The batches and requests of this host, with marks of what to report.
#[derive(Debug, Default)]
pub struct ReportState {
    /// The port whose completed bytes count for requests.
    port: u32,
    /// Batches by arrival, so that the oldest are reported first.
    batches: BTreeMap<u64, ReportedBatch>,
    names: HashMap<u64, u64>,
    requests: HashMap<u64, ReportedRequest>,
    arrivals: u64,
    /// Arrivals of batches with something to report.
    stirred: BTreeSet<u64>,
    parting: VecDeque<Kind>,
    fetches: FetchReports,
    /// Whether there is a stream to report to.
    attended: bool,
    restating: bool,
    /// Whether a part of a snapshot was sent, but not its end.
    in_parts: bool,
    /// Whether that snapshot has to be ended before another begins.
    ends_first: bool,
    urgency: Urgency,
}

impl ReportState {
    pub fn new(port: u32) -> Self {
        Self { port, ..Self::default() }
    }

    /// Returns how soon [`ReportState::next_report`] has to be called.
    pub const fn urgency(&self) -> Urgency {
        self.urgency
    }

    /// Begins reporting to a new stream.
    pub fn attend(&mut self) {
        self.mute();
        self.restate();
    }

    /// Marks everything to be reported again.
    pub fn restate(&mut self) {
        self.attended = true;
        self.ends_first = self.in_parts;
        self.restating = true;
        self.parting.clear();
        self.stirred = self.batches.keys().copied().collect();
        for batch in self.batches.values_mut() {
            (batch.told, batch.changed) = (false, true);
            // An arrival says nothing of layers.
            batch.step_told = 0;
            batch.fresh.clone_from(&batch.requests);
            batch.moved.clear();
        }
        for request in self.requests.values_mut() {
            (request.told, request.untold) = (false, 0);
        }
        self.fetches.restate();
        self.urgency = Urgency::Now;
    }

    pub fn mute(&mut self) {
        self.attended = false;
        self.restating = false;
        (self.in_parts, self.ends_first) = (false, false);
        self.stirred.clear();
        self.parting.clear();
        self.urgency = Urgency::Nothing;
    }

    /// Adds a batch that was announced, perhaps again.
    pub fn batch_began(&mut self, id: u64, layers: u16, layer_time: Span) {
        if id == 0 {
            return;
        }
        let compute = layer_time.times(u64::from(layers));
        let known = self.names.get(&id).copied();
        let arrival = known.unwrap_or_else(|| self.open(id));
        if let Some(batch) = self.batches.get_mut(&arrival) {
            let same = (batch.compute, batch.layers) == (compute, layers);
            if known.is_none() || !same {
                (batch.compute, batch.layers, batch.changed) = (compute, layers, true);
                self.stir(arrival, Urgency::Now);
            }
        }
    }

    /// Adds a request to a batch, with `bytes` bytes to move.
    pub fn joined(&mut self, batch: u64, request: u64, deadline: Time, bytes: u64) {
        let Some(&arrival) = self.names.get(&batch) else { return };
        if request == 0 {
            return;
        }
        // Chunked prefill moves a request to another batch, which does not end the request.
        let told = self.forget_request(request).is_some_and(|old| old.told);
        while self.requests.len() >= REQUESTS_MAX {
            match self.batches.first_key_value() {
                Some((&oldest, _)) if oldest != arrival => self.close(oldest),
                _ => return,
            }
        }
        let entry = ReportedRequest { batch, deadline, left: bytes, untold: 0, told };
        self.requests.insert(request, entry);
        if let Some(batch) = self.batches.get_mut(&arrival) {
            batch.requests.insert(request);
            batch.fresh.insert(request);
        }
        self.stir(arrival, Urgency::Now);
    }

    /// Removes a request that has its first token or was aborted.
    pub fn ended(&mut self, request: u64) {
        if self.forget_request(request).is_some_and(|old| old.told) {
            self.part(Kind::RequestEnded(RequestEnded { request }));
        }
    }

    /// Records that `batch` computes after the batch `ahead`.
    pub fn queued(&mut self, batch: u64, ahead: u64) {
        let (Some(&arrival), true) = (self.names.get(&batch), self.names.contains_key(&ahead))
        else {
            return;
        };
        if let Some(batch) = self.batches.get_mut(&arrival)
            && batch.behind != ahead
        {
            (batch.behind, batch.changed) = (ahead, true);
            self.stir(arrival, Urgency::Now);
        }
    }

    pub fn layer(&mut self, now: Time, batch: u64, layer: u16) {
        let Some(&arrival) = self.names.get(&batch) else { return };
        let Some(batch) = self.batches.get_mut(&arrival) else { return };
        batch.layer = layer;
        if batch.started.is_none() {
            batch.started = Some(now);
            self.stir(arrival, Urgency::Now);
        } else if batch.step() > batch.step_told {
            self.stir(arrival, Urgency::Later);
        }
    }

    pub fn batch_ended(&mut self, batch: u64) {
        if let Some(&arrival) = self.names.get(&batch) {
            self.close(arrival);
        }
    }

    #[inline]
    pub fn completed(&mut self, request: u64, port: u32, bytes: u64) {
        if port != self.port {
            return;
        }
        let Some(known) = self.requests.get_mut(&request) else { return };
        let bytes = bytes.min(known.left);
        if bytes == 0 {
            return;
        }
        known.left -= bytes;
        let first = known.untold == 0;
        known.untold += bytes;
        if first && self.attended {
            let batch = known.batch;
            if let Some(&arrival) = self.names.get(&batch)
                && let Some(batch) = self.batches.get_mut(&arrival)
            {
                batch.moved.insert(request);
                self.stir(arrival, Urgency::Later);
            }
        }
    }

    /// Adds a flow of `bytes` bytes to a fetch, which may be new.
    pub fn fetches(&mut self, number: u64, name: fetches::FetchName, bytes: u64) {
        if self.fetches.add(number, name, bytes) && self.attended {
            self.fetches.announce(number);
            if self.names.contains_key(&name.batch) {
                self.urgency = Urgency::Now;
            }
        }
    }

    pub fn fetched(&mut self, number: u64) {
        if self.fetches.end(number) {
            self.part(Kind::FetchFinished(FetchFinished { fetch: number }));
        }
    }

    /// Returns the next report with at most `events_max` events, or `None` if nothing changed.
    pub fn next_report(&mut self, now: Time, events_max: usize) -> Option<OutgoingReport> {
        if !self.attended || self.urgency == Urgency::Nothing {
            return None;
        }
        if core::mem::take(&mut self.ends_first) {
            self.in_parts = false;
            return Some(OutgoingReport { at: now, piece: SnapshotPiece::End, events: Vec::new() });
        }
        let mut draft = Draft::new(events_max);
        while !draft.is_full()
            && let Some(kind) = self.parting.pop_front()
        {
            draft.push(kind);
        }
        while !draft.is_full()
            && draft.requests > 0
            && let Some(&arrival) = self.stirred.first()
            && self.tell(now, arrival, &mut draft)
        {
            self.stirred.remove(&arrival);
        }
        // The batches of the fetches have to come first.
        let knows = |batch| self.names.contains_key(&batch);
        let is_all = self.parting.is_empty()
            && self.stirred.is_empty()
            && self.fetches.tell(knows, &mut draft);
        let piece = match (self.restating, is_all) {
            (false, _) => SnapshotPiece::Unspecified,
            (true, false) => SnapshotPiece::Part,
            (true, true) => SnapshotPiece::End,
        };
        self.in_parts = piece == SnapshotPiece::Part;
        if is_all {
            self.restating = false;
            self.urgency = Urgency::Nothing;
        }
        let events = draft.events;
        let empty = events.is_empty() && piece == SnapshotPiece::Unspecified;
        (!empty).then_some(OutgoingReport { at: now, piece, events })
    }

    /// Adds one batch to `draft`, which has room for at least one event and one request. Returns
    /// whether all of the batch fits.
    fn tell(&mut self, now: Time, arrival: u64, draft: &mut Draft) -> bool {
        let Some(batch) = self.batches.get_mut(&arrival) else { return true };
        if batch.changed || !batch.fresh.is_empty() {
            let waits = batch.behind != 0 && batch.started.is_none();
            let waits = waits && self.names.contains_key(&batch.behind);
            let mut loads = Vec::new();
            while draft.requests > 0
                && let Some(id) = batch.fresh.pop_first()
            {
                batch.moved.remove(&id);
                if let Some(request) = self.requests.get_mut(&id) {
                    (request.told, request.untold) = (true, 0);
                    loads.push(request.load(now, id, self.port));
                    draft.requests -= 1;
                }
            }
            let elapsed = batch.started.map_or(Span::ZERO, |at| now.since(at));
            draft.push(Kind::BatchArrived(BatchArrived {
                batch: batch.id,
                compute_ns: batch.compute.0.saturating_sub(elapsed.0),
                requests: loads,
                queued_behind: waits.then_some(batch.behind),
                started: batch.started.is_some(),
                layers: u32::from(batch.layers),
            }));
            (batch.told, batch.changed) = (true, false);
            batch.start_told = batch.started.is_some();
            if !batch.fresh.is_empty() {
                return false;
            }
        }
        if batch.started.is_some() && !batch.start_told {
            batch.start_told = draft.push(Kind::BatchStarted(BatchStarted { batch: batch.id }));
        }
        if batch.step() > batch.step_told {
            let layer = u32::from(batch.layer);
            if !draft.push(Kind::BatchProgress(BatchProgress { batch: batch.id, layer })) {
                return false;
            }
            batch.step_told = batch.step();
        }
        while let Some(&id) = batch.moved.first() {
            if draft.is_full() {
                return false;
            }
            batch.moved.pop_first();
            if let Some(request) = self.requests.get_mut(&id) {
                draft.push(Kind::BytesCompleted(BytesCompleted {
                    request: id,
                    port: self.port,
                    bytes: core::mem::take(&mut request.untold),
                }));
            }
        }
        batch.started.is_none() || batch.start_told
    }

    fn open(&mut self, id: u64) -> u64 {
        while self.batches.len() >= BATCHES_MAX
            && let Some((&oldest, _)) = self.batches.first_key_value()
        {
            self.close(oldest);
        }
        self.arrivals += 1;
        let batch = ReportedBatch { id, changed: true, ..ReportedBatch::default() };
        self.batches.insert(self.arrivals, batch);
        self.names.insert(id, self.arrivals);
        self.arrivals
    }

    fn close(&mut self, arrival: u64) {
        let Some(batch) = self.batches.remove(&arrival) else { return };
        self.names.remove(&batch.id);
        self.stirred.remove(&arrival);
        let mut ends = Vec::new();
        for &request in &batch.requests {
            let known = self.requests.remove(&request);
            // The request came from another batch, and its move was not reported. So at the
            // coordinator the end of this batch would not end it.
            if known.is_some_and(|known| known.told) && batch.fresh.contains(&request) {
                ends.push(request);
            }
        }
        for request in ends {
            self.part(Kind::RequestEnded(RequestEnded { request }));
        }
        // A batch that was not reported needs no end.
        if batch.told {
            self.part(Kind::BatchFinished(BatchFinished { batch: batch.id }));
        }
    }

    fn forget_request(&mut self, id: u64) -> Option<ReportedRequest> {
        let request = self.requests.remove(&id)?;
        let arrival = self.names.get(&request.batch);
        if let Some(batch) = arrival.and_then(|arrival| self.batches.get_mut(arrival)) {
            batch.requests.remove(&id);
            batch.fresh.remove(&id);
            batch.moved.remove(&id);
        }
        Some(request)
    }

    fn part(&mut self, end: Kind) {
        if !self.attended {
            return;
        }
        if self.parting.len() >= PARTING_MAX {
            return self.restate();
        }
        self.parting.push_back(end);
        self.urgency = Urgency::Now;
    }

    fn stir(&mut self, arrival: u64, urgency: Urgency) {
        if self.attended {
            self.stirred.insert(arrival);
            self.urgency = self.urgency.max(urgency);
        }
    }
}

impl ReportedBatch {
    /// Returns how many of [`STEPS`] parts of its layers the batch has finished.
    fn step(&self) -> u32 {
        u32::from(self.layer) * STEPS / u32::from(self.layers.max(1))
    }
}

impl ReportedRequest {
    fn load(&self, now: Time, request: u64, port: u32) -> RequestLoad {
        let left = |deadline: Time| i128::from(deadline.0) - i128::from(now.0);
        RequestLoad {
            request,
            remaining_ns: (self.deadline != Time::NEVER).then(|| {
                let left = left(self.deadline);
                i64::try_from(left).unwrap_or(if left < 0 { i64::MIN } else { i64::MAX })
            }),
            loads: (self.left > 0)
                .then_some(PortBytes { port, bytes: self.left })
                .into_iter()
                .collect(),
        }
    }
}

#[cfg(test)]
#[path = "reports_tests.rs"]
mod tests;
