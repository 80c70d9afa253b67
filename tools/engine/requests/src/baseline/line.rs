//! Continuous batching with a fixed token budget: vLLM's and Sarathi's, under three orders.
//!
//! The budget counts decodes too, as in Sarathi-Serve: chunks fill up what they leave. QoServe's
//! baselines (§4) take 256 under a strict TBT and 2048 without.

use crate::Time;
use crate::discipline::{Discipline, Rank, View};
use crate::job::Job;

/// Who is first in line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineOrder {
    /// Whoever came first.
    Fcfs,
    /// The earliest deadline: of the first token, or of the last for batch requests.
    Edf,
    /// The fewest prompt tokens left.
    Srpf,
}

/// A fixed budget under an order.
#[derive(Clone, Copy, Debug)]
pub struct Fixed {
    /// The order.
    pub order: LineOrder,
    /// Tokens of an iteration, decodes included.
    pub tokens: u32,
}

impl Discipline for Fixed {
    fn name(&self) -> &'static str {
        match self.order {
            LineOrder::Fcfs => "fcfs",
            LineOrder::Edf => "edf",
            LineOrder::Srpf => "srpf",
        }
    }

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
        // Under an order by urgency, the most urgent goes on; a prompt that was begun keeps its
        // blocks and waits.
        self.order == LineOrder::Fcfs
    }
}
