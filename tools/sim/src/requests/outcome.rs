//! What came out, request by request, and in sum.

use laxity_requests::request::{Importance, Slo, Spec};
use laxity_requests::{Span, Time};
use serde::Serialize;

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// As it arrived.
    pub spec: Spec,
    /// Tokens that it was to generate.
    pub output: u32,
    /// Tokens that it did.
    pub generated: u32,
    /// When the first came.
    pub first: Option<Time>,
    /// When the last came so far.
    pub last: Option<Time>,
    /// Tokens that came after their own deadline (of a batch request: after that of all).
    pub late_tokens: u32,
    /// Gaps between tokens that were longer than TBT.
    pub long_gaps: u32,
    /// It was turned away.
    pub refused: bool,
    /// Where it got its first token, and its last.
    pub instances: [Option<u32>; 2],
}

impl Record {
    /// A request of which nothing is known but that it came.
    #[must_use]
    pub const fn new(spec: Spec, output: u32) -> Self {
        Self {
            spec,
            output,
            generated: 0,
            first: None,
            last: None,
            late_tokens: 0,
            long_gaps: 0,
            refused: false,
            instances: [None; 2],
        }
    }

    /// A token came.
    pub fn token(&mut self, now: Time, instance: u32) {
        if now > self.spec.deadline(self.generated) {
            self.late_tokens += 1;
        }
        if let (Some(last), Slo::Interactive { tbt, .. }) = (self.last, self.spec.slo)
            && now.since(last).0 > tbt
        {
            self.long_gaps += 1;
        }
        if self.first.is_none() {
            self.first = Some(now);
            self.instances[0] = Some(instance);
        }
        self.instances[1] = Some(instance);
        self.last = Some(now);
        self.generated += 1;
    }

    /// All its tokens came.
    #[must_use]
    pub const fn complete(&self) -> bool {
        self.generated >= self.output
    }

    /// It met its objective: complete, and no token that counts was late.
    #[must_use]
    pub fn met(&self) -> bool {
        if !self.complete() || self.refused {
            return false;
        }
        match self.spec.slo {
            Slo::Interactive { .. } => self.late_tokens == 0,
            // Those before the last have no deadline of their own.
            Slo::Batch { .. } => self.last.is_some_and(|last| last <= self.spec.deadline(0)),
        }
    }

    /// Its first token came in time.
    #[must_use]
    pub fn met_first(&self) -> bool {
        self.first
            .is_some_and(|first| first <= self.spec.first_deadline())
    }

    /// Time to its first token.
    #[must_use]
    pub fn ttft(&self) -> Option<Span> {
        self.first.map(|first| first.since(self.spec.arrival))
    }

    /// Time to its last token.
    #[must_use]
    pub fn ttlt(&self) -> Option<Span> {
        let last = self.last.filter(|_| self.complete())?;
        Some(last.since(self.spec.arrival))
    }

    /// Mean time between its tokens.
    #[must_use]
    pub fn tpot(&self) -> Option<Span> {
        let span = self.last?.since(self.first?);
        (self.generated > 1).then(|| Span(span.0 / u64::from(self.generated - 1)))
    }
}

/// What a run gave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// All requests, in order of arrival.
    pub records: Vec<Record>,
    /// When the last event was.
    pub ended: Time,
    /// Time that instances were up, summed.
    pub instance_time: Span,
    /// Iterations of all instances.
    pub iterations: u64,
    /// How often blocks were taken from a request.
    pub drops: u64,
}

impl Outcome {
    /// Share of such requests that met their objective, in percent; `None` if there are none.
    #[must_use]
    pub fn met(&self, of: impl Fn(&Record) -> bool) -> Option<f64> {
        let mut count = 0_u64;
        let mut met = 0_u64;
        for record in self.records.iter().filter(|record| of(record)) {
            count += 1;
            met += u64::from(record.met());
        }
        (count > 0).then(|| met as f64 / count as f64 * 100.0)
    }

    /// A quantile, 0 to 1, of what `of` says, in milliseconds; requests of which it says nothing
    /// are left out.
    #[must_use]
    pub fn quantile_ms(&self, q: f64, of: impl Fn(&Record) -> Option<Span>) -> Option<f64> {
        let mut all: Vec<u64> = self.records.iter().filter_map(of).map(|s| s.0).collect();
        all.sort_unstable();
        let last = all.len().checked_sub(1)?;
        Some(all[(q * last as f64).round() as usize] as f64 / 1e6)
    }

    /// In sum.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let span = self
            .records
            .last()
            .map_or(0.0, |r| r.spec.arrival.0 as f64 / 1e9);
        let met = self.records.iter().filter(|record| record.met()).count();
        let classes = self.records.iter().map(|r| r.spec.class.0).max();
        Summary {
            requests: self.records.len(),
            met: self.met(|_| true).unwrap_or(100.0),
            met_important: self.met(|r| r.spec.importance == Importance::Important),
            met_by_class: (0..=classes.unwrap_or(0))
                .map(|class| self.met(|r| r.spec.class.0 == class))
                .collect(),
            goodput: if span > 0.0 { met as f64 / span } else { 0.0 },
            ttft_p50_ms: self.quantile_ms(0.5, Record::ttft),
            ttft_p95_ms: self.quantile_ms(0.95, Record::ttft),
            ttft_p99_ms: self.quantile_ms(0.99, Record::ttft),
            tpot_p95_ms: self.quantile_ms(0.95, Record::tpot),
            incomplete: self.records.iter().filter(|r| !r.complete()).count(),
            refused: self.records.iter().filter(|r| r.refused).count(),
            instance_seconds_per_met: (met > 0)
                .then(|| self.instance_time.0 as f64 / 1e9 / met as f64),
            drops: self.drops,
        }
    }
}

/// A run in sum.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Requests that came.
    pub requests: usize,
    /// Those that met their objective, %.
    pub met: f64,
    /// Of the important ones, %.
    pub met_important: Option<f64>,
    /// Of each class, %.
    pub met_by_class: Vec<Option<f64>>,
    /// Requests that met their objective, per second of arrivals.
    pub goodput: f64,
    /// Time to first token, ms.
    pub ttft_p50_ms: Option<f64>,
    /// Its 95th percentile.
    pub ttft_p95_ms: Option<f64>,
    /// Its 99th percentile.
    pub ttft_p99_ms: Option<f64>,
    /// Mean time between tokens of a request, 95th percentile, ms.
    pub tpot_p95_ms: Option<f64>,
    /// Requests that did not end before the run did.
    pub incomplete: usize,
    /// Requests that were turned away.
    pub refused: usize,
    /// Seconds of instances for each request that met its objective.
    pub instance_seconds_per_met: Option<f64>,
    /// How often blocks were taken from a request.
    pub drops: u64,
}
