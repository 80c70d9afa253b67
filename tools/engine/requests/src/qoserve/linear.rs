//! What a forest looks at, and the line that it corrects.

use serde::{Deserialize, Serialize};

use crate::latency::Composition;

/// Numbers that a forest looks at: see [`features`].
pub const FEATURES: usize = 6;

/// What a forest looks at.
#[must_use]
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

/// `fixed + max(floor, token · tokens) + pair · pairs + context · decode_context + request ·
/// (chunks + decodes)`, ns: what reading the weights takes, or computing with them, and attention.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearTerms {
    /// Of an iteration.
    pub fixed: f64,
    /// Of few tokens.
    pub floor: f64,
    /// Of a token.
    pub token: f64,
    /// Of a prompt token and a token that it attends to.
    pub pair: f64,
    /// Of a token that a decode attends to.
    pub context: f64,
    /// Of a request.
    pub request: f64,
}

impl LinearTerms {
    /// No line: the forest says all.
    pub const NONE: Self = Self {
        fixed: 1.0,
        floor: 0.0,
        token: 0.0,
        pair: 0.0,
        context: 0.0,
        request: 0.0,
    };

    /// What it says, ns.
    #[must_use]
    pub fn ns(&self, of: &[f64; FEATURES]) -> f64 {
        self.fixed
            + self.floor.max(self.token * of[0])
            + self.pair * of[2]
            + self.request * (of[3] + of[4])
            + self.context * of[5]
    }

    pub(super) fn is_sound(&self) -> bool {
        let all = [
            self.fixed,
            self.floor,
            self.token,
            self.pair,
            self.context,
            self.request,
        ];
        all.iter().all(|part| part.is_finite() && *part >= 0.0) && self.fixed + self.floor > 0.0
    }
}
