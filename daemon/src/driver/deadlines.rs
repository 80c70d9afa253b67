//! The deadlines of requests, and the batches that they belong to.
//!
//! A request keeps the deadline that it was given first, or the configured objective from its first
//! sight, until it or its batch ends. What is remembered is bounded.

use std::collections::{HashMap, HashSet, VecDeque};

use laxity_policy::{BatchId, RequestId, Span, Time};

/// Requests whose deadlines are remembered; the oldest are forgotten.
const REQUESTS_MAX: usize = 1 << 16;

/// See the module.
#[derive(Debug, Default)]
pub struct Deadlines {
    /// Objective for requests that have no deadline of their own.
    pub slo: Option<Span>,
    known: HashMap<RequestId, Known>,
    members: HashMap<BatchId, HashSet<RequestId>>,
    /// In the order of first sight; `Known::sight` says whether an entry still holds.
    ages: VecDeque<(RequestId, u64)>,
    sights: u64,
}

/// What is remembered of a request.
#[derive(Clone, Copy, Debug)]
struct Known {
    deadline: Time,
    /// Its batch, zero if none was named.
    batch: BatchId,
    sight: u64,
}

impl Deadlines {
    /// The deadline of a request, which may be new.
    pub fn of(&mut self, now: Time, request: RequestId) -> Time {
        if let Some(known) = self.known.get(&request) {
            return known.deadline;
        }
        let Some(slo) = self.slo else {
            return Time::NEVER;
        };
        self.remember(request, BatchId(0), now + slo);
        now + slo
    }

    /// The deadline of a request, [`Time::NEVER`] if none is known.
    #[must_use]
    pub fn known(&self, request: RequestId) -> Time {
        let known = self.known.get(&request);
        known.map_or(Time::NEVER, |known| known.deadline)
    }

    /// The batch of a request, zero if none is known.
    #[must_use]
    pub fn batch_of(&self, request: RequestId) -> BatchId {
        let known = self.known.get(&request);
        known.map_or(BatchId(0), |known| known.batch)
    }

    /// Takes note of a request, instead of what was known of it before.
    pub fn remember(&mut self, request: RequestId, batch: BatchId, deadline: Time) {
        self.forget(request);
        self.sights += 1;
        let sight = self.sights;
        let known = Known {
            deadline,
            batch,
            sight,
        };
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

    /// A request has ended: its id may come again, and is then another's.
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

    /// A batch has ended, and so have its requests.
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
        Deadlines {
            slo: Some(SLO),
            ..Deadlines::default()
        }
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
