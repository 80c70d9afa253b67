//! The Prediction Agent (H-MAS §3.2), which predicts the cost of a request.
//!
//! Orders use `T_tot`, so `t_ttft` is the time to *compute* the prompt without waits. A wait is
//! about equal for all requests of one time. It would rank requests by arrival rather than by cost.
//!
//! The paper trains CatBoost on LLM-Pilot. Here a latency model of the machine predicts the cost.

use crate::Span;
use crate::latency::{Composition, Latency};

/// Predictions from a model of the machine. The prompt is computed in chunks. Tokens are decoded in
/// a batch of the running requests, all as long as this one.
pub struct Prediction {
    latency: Box<dyn Latency + Send>,
    chunk: u32,
}

impl Prediction {
    pub fn new(latency: impl Latency + Send + 'static, chunk: u32) -> Self {
        Self { latency: Box::new(latency), chunk: chunk.max(1) }
    }

    /// Returns the times to compute such a prompt, and of each token of such an answer while
    /// `running` requests run.
    pub fn cost(&self, prompt: u32, length: u32, running: u32) -> [Span; 2] {
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
        [ttft, self.latency.iteration(&batch)]
    }
}
