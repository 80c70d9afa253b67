//! The deadlines of requests, and the batches that they belong to.
//!
//! A request keeps its deadline until the request or its batch ends, or until it joins a batch with
//! another deadline. Without a deadline of its own, it has the configured objective, which counts
//! from the request's first record. The number of requests here is bounded.

use std::collections::{HashMap, HashSet, VecDeque};

use laxity_policy::{BatchId, RequestId, Span, Time};

/// Maximum number of requests with a deadline here. Older ones are removed.
const REQUESTS_MAX: usize = 1 << 16;

#[derive(Debug, Default)]
pub struct Deadlines {
    /// The objective for requests that have no deadline of their own.
    pub slo: Option<Span>,
    known: HashMap<RequestId, KnownDeadline>,
    members: HashMap<BatchId, HashSet<RequestId>>,
    /// Requests, those that were stored first in front. An entry is outdated if
    /// `KnownDeadline::sight` differs.
    ages: VecDeque<(RequestId, u64)>,
    sights: u64,
}

#[derive(Clone, Copy, Debug)]
struct KnownDeadline {
    deadline: Time,
    batch: BatchId,
    sight: u64,
}

#[derive(Debug, Default)]
pub struct RequestTraces {
    new: HashMap<RequestId, TraceOfRequest>,
    /// The entries that `new` had when it was last full. The next time they are dropped, so that
    /// requests that never end don't stay for ever.
    old: HashMap<RequestId, TraceOfRequest>,
}

/// The id of a trace, its upper half first, and the id of the span that called the engine.
pub type TraceOfRequest = ([u64; 2], u64);

impl RequestTraces {
    pub fn of(&self, request: RequestId) -> Option<TraceOfRequest> {
        self.new.get(&request).or_else(|| self.old.get(&request)).copied()
    }

    pub fn remember(&mut self, request: RequestId, trace: TraceOfRequest) {
        if self.new.len() >= REQUESTS_MAX / 2 {
            self.old = core::mem::take(&mut self.new);
        }
        self.new.insert(request, trace);
    }

    pub fn forget(&mut self, request: RequestId) {
        self.new.remove(&request);
        self.old.remove(&request);
    }
}

/// Returns the id of a trace as text, which is empty without one.
pub fn trace_id(trace: Option<TraceOfRequest>) -> String {
    trace.map_or_else(String::new, |([high, low], _)| format!("{high:016x}{low:016x}"))
}

impl Deadlines {
    /// Returns the deadline of a request, which may be new.
    pub fn of(&mut self, now: Time, request: RequestId) -> Time {
        if let Some(known) = self.known.get(&request) {
            return known.deadline;
        }
        let Some(slo) = self.slo else { return Time::NEVER };
        self.remember(request, BatchId(0), now + slo);
        now + slo
    }

    pub fn known(&self, request: RequestId) -> Time {
        let known = self.known.get(&request);
        known.map_or(Time::NEVER, |known| known.deadline)
    }

    pub fn batch_of(&self, request: RequestId) -> BatchId {
        let known = self.known.get(&request);
        known.map_or(BatchId(0), |known| known.batch)
    }

    /// Stores a request in place of its earlier state.
    pub fn remember(&mut self, request: RequestId, batch: BatchId, deadline: Time) {
        self.forget(request);
        self.sights += 1;
        let sight = self.sights;
        let known = KnownDeadline { deadline, batch, sight };
        self.known.insert(request, known);
        if batch != BatchId(0) {
            self.members.entry(batch).or_default().insert(request);
        }
        self.ages.push_back((request, sight));
        if self.ages.len() > REQUESTS_MAX
            && let Some((oldest, sight)) = self.ages.pop_front()
            && (self.known.get(&oldest)).is_some_and(|known| known.sight == sight)
        {
            self.forget(oldest);
        }
    }

    /// Removes a request that has ended. Another request may get its id.
    pub fn forget(&mut self, request: RequestId) {
        if let Some(known) = self.known.remove(&request)
            && let Some(members) = self.members.get_mut(&known.batch)
        {
            members.remove(&request);
            if members.is_empty() {
                self.members.remove(&known.batch);
            }
        }
    }

    /// Removes a batch that has ended, with its requests.
    pub fn forget_batch(&mut self, batch: BatchId) {
        for request in self.members.remove(&batch).unwrap_or_default() {
            self.known.remove(&request);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLO: Span = Span::from_millis(100);

    fn deadlines() -> Deadlines {
        Deadlines { slo: Some(SLO), ..Deadlines::default() }
    }

    #[test]
    fn a_deadline_is_forgotten_with_its_request_and_with_its_batch() {
        let mut deadlines = deadlines();
        let (first, later) = (Time(1000), Time(5_000_000_000));
        let (alone, member) = (RequestId(7), RequestId(8));
        assert_eq!(deadlines.of(first, alone), first + SLO);
        assert_eq!(deadlines.of(later, alone), first + SLO);
        deadlines.forget(alone);
        assert_eq!(deadlines.of(later, alone), later + SLO);

        deadlines.remember(member, BatchId(3), first + SLO);
        assert_eq!(deadlines.of(later, member), first + SLO);
        assert_eq!(deadlines.batch_of(member), BatchId(3));
        deadlines.forget_batch(BatchId(3));
        assert_eq!(deadlines.of(later, member), later + SLO);
        assert!(deadlines.members.is_empty());
    }

    #[test]
    fn traces_of_requests_are_forgotten_with_them_and_the_oldest_for_lack_of_room() {
        let mut traces = RequestTraces::default();
        for request in 1..=2 * REQUESTS_MAX as u64 {
            traces.remember(RequestId(request), ([0xa, request], 3));
            assert!(traces.new.len() + traces.old.len() <= REQUESTS_MAX);
        }
        let latest = RequestId(2 * REQUESTS_MAX as u64);
        assert_eq!(trace_id(traces.of(latest)), "000000000000000a0000000000020000");
        assert_eq!(trace_id(traces.of(RequestId(1))), "");
        traces.forget(latest);
        assert_eq!(traces.of(latest), None);
    }

    #[test]
    fn what_is_remembered_of_requests_is_bounded_though_they_end_and_return() {
        let mut deadlines = deadlines();
        for round in 0..3 * REQUESTS_MAX as u64 {
            let request = RequestId(1 + round % 100);
            deadlines.of(Time(round), request);
            deadlines.forget(request);
            deadlines.of(Time(round), RequestId(1_000_000 + round));
        }
        assert!(deadlines.ages.len() <= REQUESTS_MAX && deadlines.known.len() <= REQUESTS_MAX);
    }
}
