//! H-MAS: one of several orders for a replica's line, by predicted costs, and admission behind a
//! fence on memory (§3 and Appendices B, C and E).
//!
//! | layer | here |
//! |---|---|
//! | perception, prediction (§3.2) | [`cognition`]: [`perception`], [`prediction`], [`regressor`] |
//! | control (§3.4) | one structure of [`pool`]; [`statera`] sets fence and limits |
//! | execution (§3.5) | [`Agent`], a [`crate::discipline::Discipline`] |
//!
//! The paper's Meta controller exchanges the structure while requests run. It was built here with
//! five ways to choose, gained nothing above the best fixed structure, and was removed with the
//! views that it needs (§3.3). `docs/requests/hmas.md` has the figures.
//!
//! # Departures
//!
//! * The paper's scheduler sits before an engine and hands it requests. Here it is the engine's
//!   own: what it decides holds in the next iteration. "Admit" is: the first chunk of a prompt may
//!   be planned.
//! * Objectives come with the request ([`crate::request::Slo`]) rather than being read out of its
//!   text; perception gives the task and the length of the answer.
//! * `V_sys` (eq. 5) is a delay in one place of the paper and a virtual time in another. Either is
//!   the same for all requests, so ranks leave it out.
//! * The fence of Algorithm 2 sums output tokens and compares them with bytes of memory, prompts
//!   forgotten. Here it sums KV blocks of prompt and bound, as eq. 11 does.

mod agent;
pub mod cognition;
pub mod journal;
pub mod perception;
pub mod pool;
pub mod prediction;
pub mod regressor;
pub mod statera;

pub use agent::{Agent, Config};
pub use journal::{Journal, Log};

use crate::job::Job;
use crate::{Span, Time};

/// What is believed of a request: `x_r` and its cost (§3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// The type of its task, `τ_r`; `None` if it is *unknown*: then the rest is a prior from
    /// statistics.
    pub task: Option<u16>,
    /// Tokens that it will generate, `l_pred`.
    pub length: u32,
    /// Time to compute its prompt, without waiting.
    pub ttft: Span,
    /// Time for each token after it.
    pub tpot: Span,
    /// `D_r = a_r + SLO_ttft + SLO_tpot · l_pred` (§3.5); of a batch request, its deadline.
    pub due: Time,
}

impl Estimate {
    /// `T_tot = t_ttft + t_tpot · l_pred` (§3.2).
    #[must_use]
    pub const fn total(&self) -> Span {
        Span(
            self.ttft
                .0
                .saturating_add(self.tpot.0.saturating_mul(self.length as u64)),
        )
    }

    /// The part of it that is left.
    #[must_use]
    pub const fn remaining(&self, job: &Job) -> Span {
        let target = if job.target == 0 {
            1
        } else {
            job.target as u64
        };
        let prompt = (self.ttft.0 as u128 * job.prefill_left() as u128 / target as u128) as u64;
        let left = self.length.saturating_sub(job.generated);
        // One that outlived its estimate has a token to go, at least.
        let left = if left == 0 { 1 } else { left };
        Span(prompt.saturating_add(self.tpot.0.saturating_mul(left as u64)))
    }
}
