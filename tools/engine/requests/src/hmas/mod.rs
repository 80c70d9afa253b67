//! H-MAS: orders of a replica's queue by predicted costs, and a memory limit for admission (§3 and
//! Appendices B, C and E).
//!
//! | layer | module |
//! |---|---|
//! | perception, prediction (§3.2) | [`cognition`]: [`perception`], [`prediction`] |
//! | control (§3.4) | one order of [`pool`]; [`statera`] sets the memory limit and other limits |
//! | execution (§3.5) | [`Agent`], a [`crate::discipline::Discipline`] |
//!
//! The paper's Meta controller exchanges the policy while requests run. An implementation with five
//! ways to choose was no better than the best fixed policy. It was removed together with the views
//! of §3.3. `docs/requests/hmas.md` has the figures.
//!
//! # Departures from the paper
//!
//! * The paper's scheduler is in front of an engine and passes requests to it. Here it is part of
//!   the engine, and its decisions apply to the next iteration. "Admit" means that the first chunk
//!   of a prompt may be planned.
//! * Objectives are a field of the request ([`crate::request::Slo`]) and aren't read from its text.
//!   Perception returns the task and the length of the answer.
//! * `V_sys` (eq. 5) is a delay in one place of the paper and a virtual time in another. Both are
//!   equal for all requests, so ranks omit it.
//! * The fence of Algorithm 2 compares a sum of output tokens with bytes of memory, without
//!   prompts. Here it sums KV blocks of prompt and bound, as eq. 11 does.

mod agent;
pub mod cognition;
pub mod perception;
pub mod pool;
pub mod prediction;
pub mod statera;

pub use agent::{Agent, Config, Journal, Log};

use crate::job::Job;
use crate::{Span, Time};

/// The estimate of a request: `x_r` and its cost (§3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// The type of the task, `τ_r`. With `None` the task is *unknown* and the other fields come
    /// from statistics.
    pub task: Option<u16>,
    /// Number of tokens that the request will generate, `l_pred`.
    pub length: u32,
    /// Time to compute the prompt, without waits.
    pub ttft: Span,
    /// Time for each token after the first.
    pub tpot: Span,
    /// The deadline `D_r = a_r + SLO_ttft + SLO_tpot · l_pred` (§3.5), or that of a batch request.
    pub due: Time,
}

impl Estimate {
    /// Returns the total time, `T_tot = t_ttft + t_tpot · l_pred` (§3.2).
    pub const fn total(&self) -> Span {
        Span(self.ttft.0.saturating_add(self.tpot.0.saturating_mul(self.length as u64)))
    }

    pub const fn remaining(&self, job: &Job) -> Span {
        let target = if job.target == 0 { 1 } else { job.target as u64 };
        let prompt = (self.ttft.0 as u128 * job.prefill_left() as u128 / target as u128) as u64;
        let left = self.length.saturating_sub(job.generated);
        // A request that exceeds its estimated length has at least one more token.
        let left = if left == 0 { 1 } else { left };
        Span(prompt.saturating_add(self.tpot.0.saturating_mul(left as u64)))
    }
}
