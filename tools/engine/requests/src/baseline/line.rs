//! Continuous batching with a fixed token budget, as in vLLM and Sarathi, under three orders.
//!
//! Decodes count in the budget, as in Sarathi-Serve, and prompt chunks fill the rest. QoServe's
//! baselines (§4) use 256 tokens under a strict TBT and 2048 otherwise.

use crate::Time;
use crate::discipline::{Discipline, Rank, View};
use crate::job::Job;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineOrder {
    Fcfs,
    /// The earliest deadline first: of the first token, or of the last for batch requests.
    Edf,
    Srpf,
}

#[derive(Clone, Copy, Debug)]
pub struct Fixed {
    pub order: LineOrder,
    pub tokens: u32,
}

impl Discipline for Fixed {
    fn rank(&self, job: &Job) -> Rank {
        Rank(match self.order {
            // Ties are broken by arrival.
            LineOrder::Fcfs => 0,
            LineOrder::Edf => i64::try_from(job.spec.first_deadline().0).unwrap_or(i64::MAX),
            LineOrder::Srpf => i64::from(job.prefill_left()),
        })
    }

    fn budget(&mut self, _: Time, view: &dyn View) -> u32 {
        self.tokens.saturating_sub(view.decodes().decodes)
    }

    fn begun_first(&self) -> bool {
        // Under EDF and SRPF the most urgent prompt continues. A prompt that has begun keeps its
        // blocks while it waits.
        self.order == LineOrder::Fcfs
    }
}
