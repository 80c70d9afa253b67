//! One step of Algorithm 1: which waiting requests an instance takes. [`super::dispatcher`] has the
//! rules.

use super::budget::{self, InstanceLoad};
use super::dispatcher::DispatcherOptions;
use crate::dispatch::Role;
use crate::ledger::{Row, Targets};
use crate::request::{RequestId, Spec};
use crate::{Span, Time};

/// Least admission probability (`θ`). Up to 0.2 it changed nothing.
const THETA: f64 = 0.05;

#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub(super) spec: Spec,
    pub(super) targets: Targets,
}

impl Waiting {
    pub(super) fn deadline(&self) -> Time {
        self.spec.arrival + Span(self.targets.ttft)
    }

    pub(super) fn tokens(&self) -> u32 {
        let tokens = self.spec.prompt.saturating_add(self.spec.generated);
        tokens.saturating_sub(self.spec.ready).max(1)
    }
}

pub(super) struct Scan<'a> {
    options: &'a DispatcherOptions,
    now: Time,
    pub(super) standing: InstanceLoad,
    room: f64,
    utilization: f64,
    /// Remaining time of the running step, ns.
    pub(super) residual: f64,
    ttft: f64,
    pub(super) idle: bool,
}

pub(super) struct Taken {
    pub(super) requests: Vec<RequestId>,
    pub(super) standing: InstanceLoad,
    tokens: f64,
    ttft: f64,
}

impl Taken {
    pub(super) const fn new(standing: InstanceLoad) -> Self {
        Self { requests: Vec::new(), standing, tokens: 0.0, ttft: f64::INFINITY }
    }

    pub(super) fn push(&mut self, waiting: &Waiting) {
        let tokens = waiting.tokens();
        self.standing = self.standing.with_prompt(tokens, waiting.targets.tpot);
        self.tokens += f64::from(tokens);
        self.ttft = self.ttft.min(waiting.targets.ttft as f64);
        self.requests.push(waiting.spec.id);
    }
}

impl<'a> Scan<'a> {
    /// Makes a scan of an instance. `ttfts` are those of recent requests, the shortest first.
    pub(super) fn new(options: &'a DispatcherOptions, ttfts: &[u64], now: Time, row: &Row) -> Self {
        let standing = InstanceLoad { pauses: options.pauses, ..InstanceLoad::of(row) };
        let step = if row.role == Role::Prefill {
            0.0
        } else {
            options.model.decode_ns(standing.decoding, standing.context)
        };
        let since = now.since(row.at).0 as f64;
        Self {
            options,
            now,
            standing,
            room: row.room(options.block_tokens, options.headroom),
            utilization: row.occupancy().max(step / standing.tpot).min(1.0),
            residual: if step > 0.0 { (step - since).max(0.0) } else { 0.0 },
            ttft: ttfts.first().map_or(f64::INFINITY, |ttft| *ttft as f64) * options.ttft_share,
            idle: row.is_idle(),
        }
    }

    /// Reports whether the request would be late even on an idle instance.
    pub(super) fn is_hopeless(&self, waiting: &Waiting) -> bool {
        let tokens = f64::from(waiting.tokens());
        let alone = self.options.model.prefill_ns(tokens, tokens * tokens);
        waiting.deadline() < self.now + Span(alone as u64)
    }

    /// Reports whether eq. 5 permits no more tokens.
    pub(super) fn is_spent(&self, taken: &Taken) -> bool {
        let standing = &taken.standing;
        let decode = standing.decode_ns(&self.options.model);
        let ttft = self.ttft.min(taken.ttft * self.options.ttft_share);
        if ttft.is_infinite() || standing.tpot.is_infinite() || !standing.pauses {
            return false;
        }
        budget::tokens(&self.options.model, ttft, standing.tpot, decode) <= standing.prompts.tokens
    }

    pub(super) fn fits(&self, taken: &Taken, waiting: &Waiting, ttft: f64) -> Option<InstanceLoad> {
        let tokens = waiting.tokens();
        if taken.tokens + f64::from(tokens) > self.room {
            return None;
        }
        let with = taken.standing.with_prompt(tokens, waiting.targets.tpot);
        with.fits(&self.options.model, ttft).then_some(with)
    }

    /// Takes a request if it can be in time and no other objective is missed.
    pub(super) fn offer(&self, taken: &mut Taken, waiting: &Waiting) {
        let own = waiting.targets.ttft as f64;
        let share = self.options.ttft_share;
        let ttft = self.ttft.min(taken.ttft.min(own) * share);
        let Some(with) = self.fits(taken, waiting, ttft) else { return };
        let expected = self.residual + with.prefill_ns(&self.options.model);
        let remaining = waiting.deadline().remaining_ns(self.now) as f64 - expected;
        let p = budget::probability(remaining, own, self.utilization);
        if p >= THETA {
            taken.push(waiting);
        }
    }

    /// Takes a best-effort request if no other objective is missed.
    pub(super) fn take_late(&self, taken: &mut Taken, waiting: &Waiting) -> bool {
        let fits = self.fits(taken, waiting, self.ttft).is_some();
        if fits {
            taken.push(waiting);
        }
        fits
    }
}
