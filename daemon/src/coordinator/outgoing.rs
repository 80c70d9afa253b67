//! Reports to the coordinator, and their limits.

use laxity_policy::Time;
use laxity_wire::v1::{Event, SnapshotPiece, event::Event as Kind};

/// Maximum number of events of a report, even if the coordinator allows more.
pub const EVENTS_MAX: usize = 256;
/// Maximum number of requests in a report.
const REQUESTS_MAX: usize = 1024;

#[derive(Clone, Debug, PartialEq)]
pub struct OutgoingReport {
    /// When the report was made. Spans in the report count from this time.
    pub at: Time,
    pub piece: SnapshotPiece,
    /// The events, in the order in which they happened.
    pub events: Vec<Event>,
}

impl OutgoingReport {
    /// Changes spans to count from `now`.
    pub fn age_to(&mut self, now: Time) {
        let aged = now.since(self.at).0;
        self.at = now;
        for event in &mut self.events {
            if let Some(Kind::BatchArrived(batch)) = &mut event.event {
                if batch.started {
                    batch.compute_ns = batch.compute_ns.saturating_sub(aged);
                }
                for request in &mut batch.requests {
                    if let Some(left) = &mut request.remaining_ns {
                        *left = left.saturating_sub_unsigned(aged);
                    }
                }
            }
        }
    }
}

/// A report that is not complete yet.
#[derive(Debug)]
pub(super) struct Draft {
    pub(super) events: Vec<Event>,
    events_max: usize,
    pub(super) requests: usize,
}

impl Draft {
    /// Makes an empty draft. The coordinator's limit holds for events and for requests in them.
    pub(super) fn new(events_max: usize) -> Self {
        Self {
            events: Vec::new(),
            events_max: events_max.clamp(1, EVENTS_MAX),
            requests: REQUESTS_MAX.min(events_max.max(1)),
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.events.len() >= self.events_max
    }

    /// Adds an event. Returns false if it does not fit.
    pub(super) fn push(&mut self, kind: Kind) -> bool {
        let fits = !self.is_full();
        if fits {
            self.events.push(Event { event: Some(kind) });
        }
        fits
    }
}
