//! QoServe (Goel et al., ASPLOS 2026), which schedules requests of several classes of service on
//! one replica (§3.2 to §3.4 and Algorithm 1).
//!
//! Most parts are options, so that the ablations of §4.4 need no other code:
//!
//! | part | paper | option |
//! |---|---|---|
//! | dynamic chunking | §3.3, `chunk` | [`QoServeOptions::chunking`] |
//! | hybrid priority, eq. 4 and 5 | §3.4 | [`QoServeOptions::alpha`] |
//! | eager relegation | §3.4 | [`QoServeOptions::relegation`], [`QoServeOptions::hints`] |
//! | selective preemption | §3.4 | always |
//!
//! The paper contradicts itself or leaves open these points:
//!
//! * α is a time in eq. 4 and multiplies tokens in Algorithm 1. Here it is in ns per token (8 ms by
//!   §3.6). Algorithm 1 uses the TTFT objective for all classes. Eq. 5 uses TTLT for classes
//!   without a TTFT, and so does this code.
//! * §3.6 adapts α to load without a rule. Two levels by the backlog were worth nothing here, so α
//!   is constant.
//! * Algorithm 1 pushes a relegated job back and reads the queue again. With an empty or fully
//!   relegated queue that never ends. Here each job is checked once, before it is served.
//! * "Is about to violate in the current iteration" is [`Relegation::Strict`]. The default,
//!   [`Relegation::LookAhead`], adds the remaining work. It relegates a job that would be late even
//!   alone, before more work is spent.
//! * A relegated job loses its computed KV, because others need the blocks.
//! * The paper has no rule for hints. Here unimportant jobs among the next `WINDOW` are relegated
//!   while an important one at the head of the queue has less than a given share of its time left.

mod chunk;
mod history;

pub use chunk::Chunking;
use chunk::{fitting, slack};
pub use history::Lengths;

use crate::discipline::{Discipline, Rank, Reranked, View};
use crate::iteration::Event;
use crate::job::{Job, Phase};
use crate::latency::{Composition, Latency};
use crate::request::{Importance, RequestId};
use crate::{Span, Time};

/// Number of jobs in the queue that may be relegated for a hint.
const WINDOW: usize = 64;

/// Least prompt tokens of an iteration that is used to measure the pace of prompts.
const FEW: u32 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relegation {
    Off,
    /// Jobs whose deadline is past or within one iteration are relegated.
    Strict,
    /// Jobs that would be late even if served at once are relegated.
    LookAhead,
}

/// The options of QoServe. The default has all parts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QoServeOptions {
    pub chunking: Chunking,
    /// Weight of a remaining token in ns of deadline (eq. 4 and 5). Zero means earliest deadline
    /// first.
    pub alpha: u64,
    pub relegation: Relegation,
    /// Share of an important job's time until its deadline. While an important job at the head of
    /// the queue has less than this share left, unimportant jobs are relegated. With `None`,
    /// importance has no effect.
    pub hints: Option<f64>,
    /// Share that is added to each predicted time (§3.6.1: err on the side of small chunks).
    pub margin: f64,
}

impl Default for QoServeOptions {
    fn default() -> Self {
        Self {
            chunking: Chunking::default(),
            alpha: 8_000_000,
            relegation: Relegation::LookAhead,
            hints: Some(0.25),
            margin: 0.05,
        }
    }
}

impl QoServeOptions {
    /// Returns options with dynamic chunking only, under EDF: "DC" of Table 5.
    pub fn chunking_only() -> Self {
        Self { alpha: 0, relegation: Relegation::Off, hints: None, ..Self::default() }
    }

    /// Returns options with dynamic chunking and eager relegation: "DC+ER" of Table 5.
    pub fn without_hybrid_priority() -> Self {
        Self { alpha: 0, ..Self::default() }
    }
}

pub struct QoServe<L> {
    options: QoServeOptions,
    latency: L,
    lengths: Lengths,
    /// Time per prompt token, ns, in the last iteration that computed enough prompt tokens and used
    /// its whole budget.
    pace: f64,
    last: Span,
    /// Budget of prompt tokens of the last iteration.
    chunk: u32,
    computed: u32,
    /// Prompts that may get the budget. Kept to save an allocation.
    line: Vec<(u32, u32)>,
}

impl<L: Latency> QoServe<L> {
    pub fn new(options: QoServeOptions, latency: L) -> Self {
        let most = match options.chunking {
            Chunking::Fixed(tokens) => tokens,
            Chunking::Dynamic { most, .. } => most,
        }
        .max(1);
        let last = latency.iteration(&Composition::default().with_chunk(0, most));
        let pace = last.0 as f64 / f64::from(most);
        Self {
            options,
            latency,
            lengths: Lengths::default(),
            pace,
            last,
            chunk: 0,
            computed: 0,
            line: Vec::new(),
        }
    }

    fn deadline(job: &Job) -> Time {
        // Only the first token's deadline counts for interactive jobs. Chunking handles later ones
        // (§3.4).
        job.spec.first_deadline()
    }

    /// Returns the tokens of the answer that count: those of a batch request.
    fn answer(&self, job: &Job) -> u32 {
        if job.spec.slo.is_interactive() { 0 } else { self.lengths.left(job) }
    }

    /// Returns the remaining time of a job if served at once, in ns. For a batch request this
    /// includes the answer.
    fn remaining_ns(&self, job: &Job) -> i64 {
        let prefill = f64::from(job.prefill_left()) * self.pace;
        let decode = f64::from(self.answer(job)) * self.last.0 as f64;
        (prefill + decode) as i64
    }

    fn laxity_ns(&self, now: Time, job: &Job) -> i64 {
        Self::deadline(job).remaining_ns(now).saturating_sub(self.remaining_ns(job))
    }

    /// Implements `WILL_VIOLATE` of Algorithm 1.
    fn will_violate(&self, now: Time, job: &Job) -> bool {
        if job.spec.slo.is_interactive() && job.generated > 0 {
            // The job generated its first token and then lost its blocks. It has no deadline that
            // it could still miss here.
            return false;
        }
        match self.options.relegation {
            Relegation::Off => false,
            Relegation::Strict => {
                Self::deadline(job).remaining_ns(now) < self.last.0.min(i64::MAX as u64) as i64
            }
            Relegation::LookAhead => self.laxity_ns(now, job) < 0,
        }
    }

    /// Reports whether an important job has less than `share` of its time left.
    fn pressed(&self, now: Time, job: &Job, share: f64) -> bool {
        job.spec.importance == Importance::Important
            && (self.laxity_ns(now, job) as f64) < share * job.spec.first_allowance().0 as f64
    }

    /// Returns the most prompt tokens that an iteration may compute.
    fn most(&self, decodes: u32) -> u32 {
        match self.options.chunking {
            Chunking::Fixed(tokens) => tokens.saturating_sub(decodes),
            Chunking::Dynamic { least, most, .. } => most.saturating_sub(decodes).max(least),
        }
        .max(1)
    }
}

impl<L: Latency> Discipline for QoServe<L> {
    fn rank(&self, job: &Job) -> Rank {
        let left = u64::from(job.prefill_left()) + u64::from(self.answer(job));
        let priority =
            Self::deadline(job).0.saturating_add(self.options.alpha.saturating_mul(left));
        Rank(i64::try_from(priority).unwrap_or(i64::MAX))
    }

    fn observe(&mut self, _: Time, event: &Event, _: &dyn View) -> Reranked {
        if let Event::Done { took, .. } = event {
            self.last = *took;
            // `progressed` counts the computed tokens after this event.
            self.computed = 0;
        }
        if self.lengths.settle() { Reranked::All } else { Reranked::None }
    }

    fn progressed(&mut self, _: Time, job: &Job, tokens: u32) {
        // A decode computes one token that isn't the first. The last token of a dropped prompt
        // looks the same, so the count can be one too low.
        if tokens == 1 && job.phase == Phase::Decoding && job.generated > 1 {
            return;
        }
        self.computed += tokens;
        // Iterations with few prompt tokens or many decodes don't measure the pace of prompts.
        // Their time over the budget is too small, and their time over the computed tokens is too
        // large.
        if self.computed >= self.chunk.max(FEW) {
            self.pace = self.last.0 as f64 / f64::from(self.computed);
        }
    }

    fn finished(&mut self, _: Time, job: &Job) {
        self.lengths.add(job.spec.application, job.generated);
    }

    fn relegate(&mut self, now: Time, view: &dyn View) -> Vec<RequestId> {
        let mut given_up = Vec::new();
        if self.options.relegation == Relegation::Off {
            return given_up;
        }
        let mut tokens = u64::from(self.most(0));
        let mut pressed = false;
        for (at, job) in view.in_line().enumerate() {
            // Only jobs that could be served now are checked. While an important job is short of
            // time, the check continues to the end of the window.
            if tokens == 0 && !(pressed && at < WINDOW) {
                break;
            }
            let violates = tokens > 0 && self.will_violate(now, job);
            if let Some(share) = self.options.hints {
                if pressed && job.spec.importance == Importance::Low {
                    given_up.push(job.id());
                    continue;
                }
                // This includes an important job that is itself relegated, so that later important
                // jobs get room.
                pressed |= tokens > 0 && self.pressed(now, job, share);
            }
            if violates {
                given_up.push(job.id());
                continue;
            }
            tokens = tokens.saturating_sub(u64::from(job.prefill_left()));
        }
        given_up
    }

    fn budget(&mut self, now: Time, view: &dyn View) -> u32 {
        let decodes = view.decodes();
        let most = self.most(decodes.decodes);
        let Chunking::Dynamic { least, step, .. } = self.options.chunking else {
            self.chunk = most;
            return most;
        };
        let slack_of = |job: &Job| slack(now, job, self.answer(job));
        self.chunk = match view.decoding().filter_map(slack_of).min() {
            None => most,
            Some(slack_ns) => {
                self.line.clear();
                let mut tokens = 0_u64;
                for job in view.in_line().chain(view.aside()) {
                    if tokens >= u64::from(most) {
                        break;
                    }
                    self.line.push((job.context, job.prefill_left()));
                    tokens += u64::from(job.prefill_left());
                }
                let sizes = [least.max(1), most, step];
                fitting(&self.latency, self.options.margin, decodes, &self.line, sizes, slack_ns)
            }
        };
        self.chunk
    }

    fn begun_first(&self) -> bool {
        false
    }

    fn goes_on(&mut self, now: Time, job: &Job) -> bool {
        debug_assert_eq!(job.phase, Phase::Prefilling);
        let laxity = self.laxity_ns(now, job);
        // A late job can't lose anything by preemption.
        laxity >= 0 && laxity < self.last.0.min(i64::MAX as u64) as i64
    }
}

#[cfg(test)]
mod tests;
