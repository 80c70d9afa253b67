//! The request scheduler of a unit as `serving.requests` chooses it, and the latency model for
//! those that plan ahead.

use laxity_policy::Span;
use laxity_requests::baseline::{Fixed, LineOrder, Relegating};
use laxity_requests::discipline::Discipline;
use laxity_requests::latency::{Composition, Latency};
use laxity_requests::qoserve::{Chunking, QoServe, QoServeOptions};

use super::batch::pairs;
use super::setup::Setup;
use crate::scenario::{RequestOrder, Serving};

/// Estimated time of a batch on an otherwise idle unit. Tokens are interpolated between points of
/// the roofline that are a factor of two apart. Each pair beyond those of a prompt without a prefix
/// adds a constant. Objectives assume the same, so a request that is relegated by it was doomed.
#[derive(Clone, Debug)]
pub(super) struct UnitLatency {
    /// Points of tokens and nanoseconds, ascending.
    points: Vec<(f64, f64)>,
    pair_ns: f64,
}

impl UnitLatency {
    pub(super) fn of(setup: &Setup<'_>) -> Self {
        const LONGEST: u32 = 17;
        let points = (0..=LONGEST)
            .map(|power| {
                let tokens = 1_u32 << power;
                let ns = setup.computing_alone(u64::from(tokens), pairs(tokens, 0));
                (f64::from(tokens), ns)
            })
            .collect();
        let (tokens, prefix) = (1 << 11, 1 << 16);
        let (without, with) = (pairs(tokens, 0), pairs(tokens, prefix));
        let [short, long] = [without, with].map(|p| setup.computing_alone(u64::from(tokens), p));
        Self { points, pair_ns: ((long - short) / (with - without) as f64).max(0.0) }
    }
}

impl Latency for UnitLatency {
    fn iteration(&self, of: &Composition) -> Span {
        let tokens = f64::from(of.prefill_tokens);
        if of.prefill_tokens == 0 {
            return Span::ZERO;
        }
        let above =
            self.points.partition_point(|point| point.0 < tokens).clamp(1, self.points.len() - 1);
        let ((x0, y0), (x1, y1)) = (self.points[above - 1], self.points[above]);
        let base = y0 + (y1 - y0) * (tokens - x0) / (x1 - x0);
        let more = of.prefill_pairs as f64 - pairs(of.prefill_tokens, 0) as f64;
        Span((base + more * self.pair_ns).max(0.0) as u64)
    }
}

pub(super) fn discipline(serving: &Serving, latency: &UnitLatency) -> Box<dyn Discipline + Send> {
    let fixed = |order| Fixed { order, tokens: serving.token_budget };
    match serving.requests {
        RequestOrder::Fcfs => Box::new(fixed(LineOrder::Fcfs)),
        RequestOrder::Edf => Box::new(fixed(LineOrder::Edf)),
        RequestOrder::Srpf => Box::new(fixed(LineOrder::Srpf)),
        RequestOrder::EdfRelegate => {
            Box::new(Relegating { inner: fixed(LineOrder::Edf), latency: latency.clone() })
        }
        RequestOrder::Qoserve => {
            // Without decodes there is no slack to fit chunks into. All have the budget's size.
            let chunking = Chunking::Fixed(serving.token_budget);
            let options = QoServeOptions { chunking, ..QoServeOptions::default() };
            Box::new(QoServe::new(options, latency.clone()))
        }
    }
}
