//! The Prediction Agent (H-MAS §3.2): what a request costs, from what it is.
//!
//! `T_tot` is what orders lines, so `t_ttft` here is the time to *compute* the prompt. Waiting is
//! left out: it is the same for all that come at one time, and would rank a request by when it came
//! rather than by what it is.
//!
//! The paper trains CatBoost on LLM-Pilot. Here a model of the machine's latency is asked
//! ([`Modelled`]), or rates are measured as they come ([`Measured`]).

use crate::Span;
use crate::latency::{Composition, Latency};

/// Cost of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// To compute the prompt.
    pub ttft: Span,
    /// For each token.
    pub tpot: Span,
}

/// An iteration that was run, as far as a discipline sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ran {
    /// Prompt tokens.
    pub prefill_tokens: u32,
    /// Decodes.
    pub decodes: u32,
    /// Tokens that those attended to.
    pub decode_context: u64,
    /// Time it took, ns.
    pub took: u64,
}

/// Predicts costs.
pub trait Prediction: Send {
    /// The cost of a request with such a prompt and answer while so many run.
    fn cost(&self, prompt: u32, length: u32, running: u32) -> Cost;

    /// An iteration was run.
    fn learn(&mut self, ran: &Ran) {
        let _ = ran;
    }
}

/// From a model of the machine: the prompt in chunks, tokens in a batch with those that run, each
/// as long as this one.
#[derive(Clone, Debug)]
pub struct Modelled<L> {
    latency: L,
    chunk: u32,
}

impl<L: Latency> Modelled<L> {
    /// With chunks of so many tokens.
    #[must_use]
    pub fn new(latency: L, chunk: u32) -> Self {
        Self {
            latency,
            chunk: chunk.max(1),
        }
    }
}

impl<L: Latency + Send> Prediction for Modelled<L> {
    fn cost(&self, prompt: u32, length: u32, running: u32) -> Cost {
        let mut ttft = Span::ZERO;
        let mut done = 0;
        while done < prompt {
            let tokens = self.chunk.min(prompt - done);
            let chunk = Composition::default().with_chunk(done, tokens);
            ttft = ttft + self.latency.iteration(&chunk);
            done += tokens;
        }
        let others = running.max(1);
        let context = u64::from(prompt) + u64::from(length / 2);
        let batch = Composition {
            decodes: others,
            decode_context: context * u64::from(others),
            ..Composition::default()
        };
        Cost {
            ttft,
            tpot: self.latency.iteration(&batch),
        }
    }
}

/// Rates as they are measured: the mean time of a prompt token, and of an iteration that decodes.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    prefill_ns: f64,
    decode_ns: f64,
}

impl Measured {
    /// Weight of the latest iteration in the mean.
    const WEIGHT: f64 = 0.02;
}

impl Default for Measured {
    fn default() -> Self {
        // Before anything was measured: some machine of today. Only ratios decide orders.
        Self {
            prefill_ns: 100_000.0,
            decode_ns: 20_000_000.0,
        }
    }
}

impl Prediction for Measured {
    fn cost(&self, prompt: u32, _: u32, _: u32) -> Cost {
        Cost {
            ttft: Span((self.prefill_ns * f64::from(prompt)) as u64),
            tpot: Span(self.decode_ns as u64),
        }
    }

    fn learn(&mut self, ran: &Ran) {
        let took = ran.took as f64;
        if ran.decodes > 0 {
            self.decode_ns += Self::WEIGHT * (took - self.decode_ns);
        } else if ran.prefill_tokens > 0 {
            let each = took / f64::from(ran.prefill_tokens);
            self.prefill_ns += Self::WEIGHT * (each - self.prefill_ns);
        }
    }
}
