//! Measurements that a run's outcome is computed from.

use laxity_policy::{Span, Time};

use super::request::RequestState;
use super::sketch::Sketch;
use crate::outcome::{Distribution, Outcome, StageBytes, Waiting};

#[derive(Debug, Default)]
pub(super) struct Measure {
    from: Time,
    ttft_ms: Vec<f64>,
    over_slo: Vec<f64>,
    earliness_ms: Vec<f64>,
    lateness_ms: Vec<f64>,
    waiting: Waiting,
    collective_ms: Sketch,
    stretch: Sketch,
    reused: f64,
    prompts: u64,
    reused_tokens: u64,
    fetched_tokens: u64,
    pruned: u64,
    pub(super) relegated: u64,
    pub(super) served: u64,
    pub(super) bytes: StageBytes,
    pub(super) events: u64,
    computed_ns: u64,
    busy_ns: u64,
    in_own_time: u64,
    batches: u64,
    seats: u64,
    counts: bool,
}

impl Measure {
    pub(super) fn after(from: Time) -> Self {
        Self { from, ..Self::default() }
    }

    pub(super) fn at(&mut self, now: Time) {
        self.counts |= now >= self.from;
    }

    pub(super) fn collective(&mut self, took: Span, alone: Span) {
        if self.counts && alone.0 > 0 {
            self.collective_ms.add(took.0 as f64 / 1e6);
            self.stretch.add(took.0 as f64 / alone.0 as f64);
        }
    }

    pub(super) fn batch(&mut self, members: usize) {
        self.batches += 1;
        self.seats += members as u64;
    }

    pub(super) fn finished(&mut self, busy: Span, computed_ns: u64) {
        self.busy_ns += busy.0;
        self.computed_ns += computed_ns;
    }

    /// Counts a request whose prefill and first token ended at these times.
    pub(super) fn served(&mut self, request: &RequestState, prefilled: Time, first_token: Time) {
        self.served += 1;
        if request.arrival < self.from {
            return;
        }
        let ms = |span: Span| span.0 as f64 / 1e6;
        let ttft = first_token.since(request.arrival);
        let slo = request.deadline.since(request.arrival);
        self.ttft_ms.push(ms(ttft));
        self.in_own_time += u64::from(ttft <= request.own_objective);
        self.over_slo.push(ttft.0 as f64 / slo.0.max(1) as f64);
        if ttft <= slo {
            self.earliness_ms.push(ms(Span(slo.0 - ttft.0)));
        } else {
            self.lateness_ms.push(ms(Span(ttft.0 - slo.0)));
        }
        self.waiting.queue += ms(request.started.since(request.arrival));
        self.waiting.kv_reuse += ms(Span(request.stalled_ns));
        self.waiting.collective += ms(Span(request.collective_ns));
        self.waiting.compute += ms(Span(request.computed_ns));
        self.waiting.p2d += ms(first_token.since(prefilled));
        self.reused += f64::from(request.reused) / f64::from(request.prompt);
        self.prompts += u64::from(request.prompt);
        self.reused_tokens += u64::from(request.reused);
        self.fetched_tokens += u64::from(request.fetched);
        self.pruned += u64::from(request.pruned);
    }

    pub(super) fn outcome(&self, units: u32, virtual_ns: u64) -> Outcome {
        let requests = self.ttft_ms.len() as f64;
        let mean = |sum: f64| if requests > 0.0 { sum / requests } else { 0.0 };
        let per = |part: u64, all: u64| {
            if all > 0 { part as f64 / all as f64 } else { 0.0 }
        };
        Outcome {
            requests: self.ttft_ms.len() as u64,
            requests_in_all: self.served,
            attainment: mean(self.earliness_ms.len() as f64),
            attainment_own: mean(self.in_own_time as f64),
            ttft_ms: Distribution::of(self.ttft_ms.clone()),
            ttft_over_slo: Distribution::of(self.over_slo.clone()),
            collective_ms: self.collective_ms.distribution(),
            collective_stretch: self.stretch.distribution(),
            earliness_ms: Distribution::of(self.earliness_ms.clone()),
            lateness_ms: Distribution::of(self.lateness_ms.clone()),
            waiting_ms: Waiting {
                queue: mean(self.waiting.queue),
                kv_reuse: mean(self.waiting.kv_reuse),
                collective: mean(self.waiting.collective),
                compute: mean(self.waiting.compute),
                p2d: mean(self.waiting.p2d),
            },
            pruned: self.pruned,
            relegated: self.relegated,
            bytes: self.bytes,
            events: self.events,
            reused: per(self.reused_tokens, self.prompts),
            fetched: per(self.fetched_tokens, self.reused_tokens),
            compute_busy: per(self.computed_ns, virtual_ns * u64::from(units)),
            units_busy: per(self.busy_ns, virtual_ns * u64::from(units)),
            batch_size: per(self.seats, self.batches),
            virtual_s: virtual_ns as f64 / 1e9,
            ..Outcome::default()
        }
    }
}
