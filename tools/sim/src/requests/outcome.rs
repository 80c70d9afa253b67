//! Outcomes of runs, by request.

use laxity_requests::request::{Slo, Spec};
use laxity_requests::{Span, Time};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    pub spec: Spec,
    pub output: u32,
    pub generated: u32,
    pub first: Option<Time>,
    pub last: Option<Time>,
    /// Tokens that came after their own deadline. For a batch request, after the request's
    /// deadline.
    pub late_tokens: u32,
    pub refused: bool,
    pub instances: [Option<u32>; 2],
}

impl Record {
    pub fn new(spec: Spec, output: u32) -> Self {
        Self { spec, output, ..Self::default() }
    }

    pub fn token(&mut self, now: Time, instance: u32) {
        if now > self.spec.deadline(self.generated) {
            self.late_tokens += 1;
        }
        if self.first.is_none() {
            self.first = Some(now);
            self.instances[0] = Some(instance);
        }
        self.instances[1] = Some(instance);
        self.last = Some(now);
        self.generated += 1;
    }

    pub const fn complete(&self) -> bool {
        self.generated >= self.output
    }

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

    pub fn met_first(&self) -> bool {
        self.first.is_some_and(|first| first <= self.spec.first_deadline())
    }

    pub fn ttft(&self) -> Option<Span> {
        self.first.map(|first| first.since(self.spec.arrival))
    }

    pub fn ttlt(&self) -> Option<Span> {
        let last = self.last.filter(|_| self.complete())?;
        Some(last.since(self.spec.arrival))
    }

    pub fn tpot(&self) -> Option<Span> {
        let span = self.last?.since(self.first?);
        (self.generated > 1).then(|| Span(span.0 / u64::from(self.generated - 1)))
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterOutcome {
    pub records: Vec<Record>,
    pub ended: Time,
    pub instance_time: Span,
    pub iterations: u64,
    pub drops: u64,
}

impl ClusterOutcome {
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
}
