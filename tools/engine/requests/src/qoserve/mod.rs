//! QoServe (Goel et al., ASPLOS 2026): requests of several classes of service on one replica. §3.2
//! to §3.4 and Algorithm 1.
//!
//! Four parts, each an option, so that the ablations of §4.4 are settings and not other code:
//!
//! | part | paper | option |
//! |---|---|---|
//! | dynamic chunking | §3.3, `chunk` | [`Options::chunking`] |
//! | hybrid priority, eq. 4 and 5 | §3.4 | [`Options::alpha`] |
//! | eager relegation, with hints | §3.4 | [`Options::relegation`], [`Options::hints`] |
//! | selective preemption | §3.4 | [`Options::preemption`] |
//!
//! Where the paper contradicts itself or is silent:
//!
//! * α is a time in eq. 4 and multiplies tokens in Algorithm 1: here ns per token, times tokens (8
//!   ms by §3.6). Algorithm 1 takes the TTFT objective for all classes; eq. 5 takes TTLT for those
//!   without, and so does this.
//! * §3.6 adapts α to load without saying how: two levels, by how long the prompts in line would
//!   take at the largest chunk, with hysteresis.
//! * Algorithm 1 pushes a relegated job back and looks at the queue again: with an empty or a
//!   wholly relegated queue that never ends. Here each job is looked at once, when it is about to
//!   be served.
//! * "Is about to violate in the current iteration" is [`Relegation::Strict`].
//!   [`Relegation::LookAhead`], the default, adds what remains to be computed: whoever can't make
//!   it alone is given up before more is spent on it.
//! * What a relegated job had computed is dropped: its blocks are those that the others need.
//! * No rule is given for hints: while an important job at the head of the line has less than a
//!   share of its allowance left, unimportant ones among the next `WINDOW` are given up. They were
//!   the ones to be served next, the others need not be looked at yet.

mod chunk;
mod forest;
mod history;
pub mod latency_file;
mod linear;

pub use chunk::{Chunking, fitting, least_slack, slack};
pub use forest::{Forest, ForestError, Node};
pub use history::Lengths;
pub use latency_file::{Trained, TrainedError};
pub use linear::{FEATURES, LinearTerms, features};

use crate::discipline::{Discipline, Rank, Reranked, View};
use crate::iteration::Event;
use crate::job::{Job, Phase};
use crate::latency::{Composition, Latency};
use crate::request::{Importance, RequestId};
use crate::{Span, Time};

/// Jobs that hints are looked for in.
const WINDOW: usize = 64;

/// Prompt tokens below which an iteration says nothing about the pace of prompts.
const FEW: u32 = 64;

/// What a token that is left to compute counts, in ns of deadline (eq. 4 and 5).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Alpha {
    /// Always as much. Zero: earliest deadline first.
    Fixed(u64),
    /// More under load.
    Adaptive {
        /// Without load.
        low: u64,
        /// Under load.
        high: u64,
        /// Under load is: prompts in line for longer than this. Half of it ends it.
        busy: Span,
    },
}

/// Who is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relegation {
    /// Nobody.
    Off,
    /// Whose deadline is past or within an iteration.
    Strict,
    /// Who would be late even if served at once.
    LookAhead,
}

/// Whether a prompt that has begun may be left for a more urgent one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preemption {
    /// No.
    Never,
    /// Yes, but for one that would be late for it.
    Selective,
    /// Yes.
    Always,
}

/// Settings. The default is the whole of QoServe.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Prompt tokens of an iteration.
    pub chunking: Chunking,
    /// Hybrid priority.
    pub alpha: Alpha,
    /// Eager relegation.
    pub relegation: Relegation,
    /// Unimportant jobs are given up while an important one at the head of the line has less than
    /// this share of its allowance left. Nothing: importance is not looked at.
    pub hints: Option<f64>,
    /// Preemption of prompts.
    pub preemption: Preemption,
    /// An iteration is taken to last longer than predicted by this share (§3.6.1: err on the side
    /// of small chunks).
    pub margin: f64,
    /// A relegated job keeps its blocks.
    pub keep_blocks: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            chunking: Chunking::default(),
            alpha: Alpha::Fixed(8_000_000),
            relegation: Relegation::LookAhead,
            hints: Some(0.25),
            preemption: Preemption::Selective,
            margin: 0.05,
            keep_blocks: false,
        }
    }
}

impl Options {
    /// Dynamic chunking alone: "DC" of Table 5, under earliest deadline first.
    #[must_use]
    pub fn chunking_only() -> Self {
        Self {
            alpha: Alpha::Fixed(0),
            relegation: Relegation::Off,
            hints: None,
            ..Self::default()
        }
    }

    /// And eager relegation: "DC+ER" of Table 5.
    #[must_use]
    pub fn without_hybrid_priority() -> Self {
        Self {
            alpha: Alpha::Fixed(0),
            ..Self::default()
        }
    }

    /// α by load (§3.6): 1 and 8 ms a token.
    #[must_use]
    pub fn adaptive() -> Self {
        Self {
            alpha: Alpha::Adaptive {
                low: 1_000_000,
                high: 8_000_000,
                busy: Span::from_millis(10_000),
            },
            ..Self::default()
        }
    }
}

/// The policy, with a model of how long iterations take.
#[derive(Debug)]
pub struct QoServe<L> {
    options: Options,
    latency: L,
    lengths: Lengths,
    /// α at this time.
    alpha: u64,
    /// Time of a prompt token in the largest chunk, ns.
    best_pace: f64,
    /// Time of a prompt token in the last iteration that had a good many and as many as it might,
    /// ns.
    pace: f64,
    /// Time of the last iteration.
    last: Span,
    /// The last iteration's prompt tokens, as far as they were allowed.
    chunk: u32,
    /// Those of them that were computed.
    computed: u32,
    /// Prompts that the budget may go to: kept to save an allocation.
    line: Vec<(u32, u32)>,
}

impl<L: Latency> QoServe<L> {
    /// A policy with nothing learnt.
    #[must_use]
    pub fn new(options: Options, latency: L) -> Self {
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
            alpha: match options.alpha {
                Alpha::Fixed(alpha) => alpha,
                Alpha::Adaptive { low, .. } => low,
            },
            best_pace: pace,
            pace,
            last,
            chunk: 0,
            computed: 0,
            line: Vec::new(),
        }
    }

    /// What is known of the lengths of answers.
    #[must_use]
    pub fn lengths(&self) -> &Lengths {
        &self.lengths
    }

    /// When a job has to be through.
    fn deadline(job: &Job) -> Time {
        // Of the first token for interactive ones: later ones are the chunk's concern (§3.4).
        job.spec.first_deadline()
    }

    /// Time it still takes if served at once, ns: its prompt, and for a batch request its answer.
    fn remaining_ns(&self, job: &Job) -> i64 {
        let prefill = f64::from(job.prefill_left()) * self.pace;
        let decode = if job.spec.slo.is_interactive() {
            0.0
        } else {
            f64::from(self.lengths.left(job)) * self.last.0 as f64
        };
        (prefill + decode) as i64
    }

    fn laxity_ns(&self, now: Time, job: &Job) -> i64 {
        Self::deadline(job)
            .remaining_ns(now)
            .saturating_sub(self.remaining_ns(job))
    }

    /// `WILL_VIOLATE` of Algorithm 1.
    fn will_violate(&self, now: Time, job: &Job) -> bool {
        if !job.spec.slo.is_interactive() || job.generated == 0 {
            match self.options.relegation {
                Relegation::Off => false,
                Relegation::Strict => {
                    Self::deadline(job).remaining_ns(now) < self.last.0.min(i64::MAX as u64) as i64
                }
                Relegation::LookAhead => self.laxity_ns(now, job) < 0,
            }
        } else {
            // It has given its first token and was thrown back for want of memory: it has no
            // deadline left to miss here.
            false
        }
    }

    /// An important job is short of time.
    fn pressed(&self, now: Time, job: &Job, share: f64) -> bool {
        job.spec.importance == Importance::Important
            && (self.laxity_ns(now, job) as f64) < share * job.spec.first_allowance().0 as f64
    }

    /// How many prompt tokens an iteration has at most.
    fn most(&self, decodes: u32) -> u32 {
        match self.options.chunking {
            Chunking::Fixed(tokens) => tokens.saturating_sub(decodes),
            Chunking::Dynamic { least, most, .. } => most.saturating_sub(decodes).max(least),
        }
        .max(1)
    }
}

impl<L: Latency> Discipline for QoServe<L> {
    fn name(&self) -> &'static str {
        "qoserve"
    }

    /// Eq. 4 and 5.
    fn rank(&self, job: &Job) -> Rank {
        let answer = if job.spec.slo.is_interactive() {
            0
        } else {
            u64::from(self.lengths.left(job))
        };
        let left = u64::from(job.prefill_left()) + answer;
        let priority = Self::deadline(job)
            .0
            .saturating_add(self.alpha.saturating_mul(left));
        Rank(i64::try_from(priority).unwrap_or(i64::MAX))
    }

    fn observe(&mut self, _: Time, event: &Event, view: &dyn View) -> Reranked {
        if let Event::Done { took, .. } = event {
            self.last = *took;
            // What was computed follows: `progressed`.
            self.computed = 0;
        }
        let mut reranked = Reranked::None;
        if let Alpha::Adaptive { low, high, busy } = self.options.alpha {
            let (_, tokens) = view.backlog();
            let drain_ns = tokens as f64 * self.best_pace;
            let bound = if self.alpha == high { 0.5 } else { 1.0 } * busy.0 as f64;
            let alpha = if drain_ns > bound { high } else { low };
            if alpha != self.alpha {
                self.alpha = alpha;
                reranked = Reranked::All;
            }
        }
        if self.lengths.settle() {
            reranked = Reranked::All;
        }
        reranked
    }

    fn progressed(&mut self, _: Time, job: &Job, tokens: u32) {
        // A decode has one token, and is not the first. (The last token of a prompt that was
        // dropped looks alike: one too few then.)
        if tokens == 1 && job.phase == Phase::Decoding && job.generated > 1 {
            return;
        }
        self.computed += tokens;
        // An iteration that was mostly decodes says nothing about prompts, nor does one for which
        // there were too few of them: it is neither as fast as its budget would be (its time over
        // the budget) nor as slow as it looks (over what was computed).
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
            // Whoever might be served now is looked at; while somebody is pressed, as many more as
            // the window has.
            if tokens == 0 && !(pressed && at < WINDOW) {
                break;
            }
            let violates = tokens > 0 && self.will_violate(now, job);
            if let Some(share) = self.options.hints {
                if pressed && job.spec.importance == Importance::Low {
                    given_up.push(job.id());
                    continue;
                }
                // Also one that is given up itself: those like it that come next shall not be.
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

    fn relegated_keep_blocks(&self) -> bool {
        self.options.keep_blocks
    }

    fn budget(&mut self, now: Time, view: &dyn View) -> u32 {
        let decodes = view.decodes();
        let most = self.most(decodes.decodes);
        let Chunking::Dynamic { least, step, .. } = self.options.chunking else {
            self.chunk = most;
            return most;
        };
        let left = |job: &Job| self.lengths.left(job);
        self.chunk = match least_slack(now, view.decoding(), left) {
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
                fitting(
                    &self.latency,
                    self.options.margin,
                    decodes,
                    &self.line,
                    sizes,
                    slack_ns,
                )
            }
        };
        self.chunk
    }

    fn begun_first(&self) -> bool {
        self.options.preemption == Preemption::Never
    }

    fn goes_on(&mut self, now: Time, job: &Job) -> bool {
        if self.options.preemption != Preemption::Selective {
            return false;
        }
        debug_assert_eq!(job.phase, Phase::Prefilling);
        let laxity = self.laxity_ns(now, job);
        // Who is late anyway has nothing to lose.
        laxity >= 0 && laxity < self.last.0.min(i64::MAX as u64) as i64
    }
}

#[cfg(test)]
mod tests;
