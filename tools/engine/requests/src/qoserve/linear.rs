//! The features of a forest and the linear model that the forest corrects.

use crate::latency::Composition;

/// Number of features that [`features`] returns.
pub const FEATURES: usize = 6;

pub fn features(of: &Composition) -> [f64; FEATURES] {
    [
        f64::from(of.prefill_tokens) + f64::from(of.decodes),
        f64::from(of.prefill_tokens),
        of.prefill_pairs as f64,
        f64::from(of.chunks),
        f64::from(of.decodes),
        of.decode_context as f64,
    ]
}

/// A linear model in ns: `fixed + max(floor, token · tokens) + pair · pairs + context ·
/// decode_context + request · (chunks + decodes)`. The maximum is of the time to read the weights
/// and to compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearTerms {
    /// Time of each iteration, ns.
    pub fixed: f64,
    /// Least time for tokens, ns, which reading the weights takes.
    pub floor: f64,
    /// Time per token, ns.
    pub token: f64,
    /// Time per pair of a prompt token and a token that it attends to, ns.
    pub pair: f64,
    /// Time per token that a decode attends to, ns.
    pub context: f64,
    /// Time per request, ns.
    pub request: f64,
}

impl LinearTerms {
    /// A constant of 1 ns, with which the forest alone predicts the time.
    pub const NONE: Self =
        Self { fixed: 1.0, floor: 0.0, token: 0.0, pair: 0.0, context: 0.0, request: 0.0 };

    /// Returns the predicted time in ns.
    pub fn ns(&self, of: &[f64; FEATURES]) -> f64 {
        self.fixed
            + self.floor.max(self.token * of[0])
            + self.pair * of[2]
            + self.request * (of[3] + of[4])
            + self.context * of[5]
    }

    pub(super) fn is_sound(&self) -> bool {
        let all = [self.fixed, self.floor, self.token, self.pair, self.context, self.request];
        all.iter().all(|part| part.is_finite() && *part >= 0.0) && self.fixed + self.floor > 0.0
    }
}
