//! Outcomes of runs, by request and as a summary.

use laxity_requests::request::{Importance, Slo, Spec};
use laxity_requests::{Span, Time};
use serde::Serialize;

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The request as it arrived.
    pub spec: Spec,
    /// Tokens that the request should generate.
    pub output: u32,
    /// Tokens that were generated so far.
    pub generated: u32,
    /// Time of the first token.
    pub first: Option<Time>,
    /// Time of the latest token.
    pub last: Option<Time>,
    /// Tokens that came after their own deadline. For a batch request, after the request's
    /// deadline.
    pub late_tokens: u32,
    /// Gaps between tokens that were longer than the TBT objective.
    pub long_gaps: u32,
    /// Whether the request was rejected.
    pub refused: bool,
    /// Instances that generated the first and the last token.
    pub instances: [Option<u32>; 2],
}

impl Record {
    /// Creates the record of a request that has just arrived.
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

    /// Reports whether all tokens were generated.
    pub const fn complete(&self) -> bool {
        self.generated >= self.output
    }

    /// Reports whether the request is complete and met its objective.
    pub fn met(&self) -> bool {
        if !self.complete() || self.refused {
            return false;
        }
        match self.spec.slo {
            Slo::Interactive { .. } => self.late_tokens == 0,
            // Only the last token of a batch request has a deadline.
            Slo::Batch { .. } => self.last.is_some_and(|last| last <= self.spec.deadline(0)),
        }
    }

    /// Reports whether the first token met its deadline.
    pub fn met_first(&self) -> bool {
        self.first.is_some_and(|first| first <= self.spec.first_deadline())
    }

    /// Returns the time to the first token.
    pub fn ttft(&self) -> Option<Span> {
        self.first.map(|first| first.since(self.spec.arrival))
    }

    /// Returns the time to the last token.
    pub fn ttlt(&self) -> Option<Span> {
        let last = self.last.filter(|_| self.complete())?;
        Some(last.since(self.spec.arrival))
    }

    /// Returns the mean time between tokens.
    pub fn tpot(&self) -> Option<Span> {
        let span = self.last?.since(self.first?);
        (self.generated > 1).then(|| Span(span.0 / u64::from(self.generated - 1)))
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Records of all requests, in order of arrival.
    pub records: Vec<Record>,
    /// Time of the last event.
    pub ended: Time,
    /// Sum of the times that instances were running.
    pub instance_time: Span,
    /// Number of iterations of all instances.
    pub iterations: u64,
    /// Number of preemptions that released a request's blocks.
    pub drops: u64,
}

impl Outcome {
    /// Returns the percentage of the selected requests that met their objective, or `None` if there
    /// are none.
    pub fn met(&self, of: impl Fn(&Record) -> bool) -> Option<f64> {
        let mut count = 0_u64;
        let mut met = 0_u64;
        for record in self.records.iter().filter(|record| of(record)) {
            count += 1;
            met += u64::from(record.met());
        }
        (count > 0).then(|| met as f64 / count as f64 * 100.0)
    }

    /// Returns quantile `q` (0 to 1) of the durations that `of` returns, in milliseconds. Requests
    /// for which it returns `None` are ignored.
    pub fn quantile_ms(&self, q: f64, of: impl Fn(&Record) -> Option<Span>) -> Option<f64> {
        let mut all: Vec<u64> = self.records.iter().filter_map(of).map(|s| s.0).collect();
        all.sort_unstable();
        let last = all.len().checked_sub(1)?;
        Some(all[(q * last as f64).round() as usize] as f64 / 1e6)
    }

    /// Returns the summary of the run.
    pub fn summary(&self) -> Summary {
        let span = self.records.last().map_or(0.0, |r| r.spec.arrival.0 as f64 / 1e9);
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

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    pub requests: usize,
    /// Percentage of requests that met their objective.
    pub met: f64,
    /// Percentage of important requests that met their objective.
    pub met_important: Option<f64>,
    /// Percentage of requests that met their objective, by class.
    pub met_by_class: Vec<Option<f64>>,
    /// Requests that met their objective, per second of arrivals.
    pub goodput: f64,
    /// Median time to first token, in milliseconds.
    pub ttft_p50_ms: Option<f64>,
    /// 95th percentile of the time to first token, in milliseconds.
    pub ttft_p95_ms: Option<f64>,
    /// 99th percentile of the time to first token, in milliseconds.
    pub ttft_p99_ms: Option<f64>,
    /// 95th percentile of a request's mean time between tokens, in milliseconds.
    pub tpot_p95_ms: Option<f64>,
    /// Number of requests that were incomplete at the end of the run.
    pub incomplete: usize,
    /// Number of requests that were rejected.
    pub refused: usize,
    /// Instance-seconds per request that met its objective.
    pub instance_seconds_per_met: Option<f64>,
    /// Number of preemptions that released a request's blocks.
    pub drops: u64,
}
