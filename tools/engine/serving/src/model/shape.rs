//! The sizes of a model, as a configuration gives them, and their checks.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Sizes of a decoder-only model. The comments give Hugging Face's names where they differ.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelShape {
    pub name: String,
    /// Number of layers (`num_hidden_layers`).
    pub layers: usize,
    /// Width of the model (`hidden_size`).
    pub hidden: usize,
    /// Number of attention heads (`num_attention_heads`).
    pub heads: usize,
    /// Number of heads of keys and values (`num_key_value_heads`). `heads` must be a multiple of
    /// it. Default: `heads`.
    pub kv_heads: Option<usize>,
    /// Width of a head (`head_dim`). Default: `hidden / heads`.
    pub head_dim: Option<usize>,
    /// Width of the feed-forward network, or of one expert (`intermediate_size`).
    pub ffn: usize,
    /// Number of different tokens (`vocab_size`).
    pub vocab: usize,
    /// Maximum number of tokens of prompt and answer together (`max_position_embeddings`).
    pub context: usize,
    #[serde(default = "rope_theta")]
    pub rope_theta: f64,
    /// Number that is added to the variance in RMSNorm.
    #[serde(default = "norm_eps")]
    pub norm_eps: f64,
    /// Whether the output matrix is that of the embedding (`tie_word_embeddings`).
    #[serde(default)]
    pub tied_embeddings: bool,
    /// Experts that replace the feed-forward network, if any.
    pub moe: Option<Moe>,
    #[serde(default)]
    pub weights: WeightsSource,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moe {
    /// Number of experts of a layer (`num_local_experts`).
    pub experts: usize,
    /// Number of experts for each token (`num_experts_per_tok`).
    pub per_token: usize,
}

/// The weights, which are drawn from a seed, the same on every machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightsSource {
    pub seed: u64,
}

impl Default for WeightsSource {
    fn default() -> Self {
        Self { seed: 1 }
    }
}

const fn rope_theta() -> f64 {
    10_000.0
}

const fn norm_eps() -> f64 {
    1e-5
}

#[derive(Clone, Debug, Error, PartialEq)]
pub enum ShapeError {
    #[error("model.{0} is 0; it must be at least 1")]
    Zero(&'static str),
    #[error("model.{what} is {value}, which is no multiple of model.{of} ({by})")]
    NoMultiple { what: &'static str, value: usize, of: &'static str, by: usize },
    #[error(
        "a head is {0} wide; rotary embeddings turn pairs, so it must be even (set model.head_dim)"
    )]
    OddHead(usize),
    #[error("model.moe.per_token is {per_token}, but there are only {experts} experts")]
    TooManyExperts { per_token: usize, experts: usize },
    #[error("model.{0} is {1}; it must be a positive number")]
    NotPositive(&'static str, f64),
}

impl ModelShape {
    pub fn kv_heads(&self) -> usize {
        self.kv_heads.unwrap_or(self.heads)
    }

    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden / self.heads.max(1))
    }

    /// Returns the count of numbers in a token's keys in a layer, which is also that of its values.
    pub fn kv_width(&self) -> usize {
        self.kv_heads() * self.head_dim()
    }

    /// Returns the bytes of a token's keys and values in one layer.
    pub fn kv_bytes(&self) -> usize {
        2 * self.kv_width() * size_of::<f32>()
    }

    pub fn check(&self) -> Result<(), ShapeError> {
        let sizes = [
            ("layers", self.layers),
            ("hidden", self.hidden),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads()),
            ("ffn", self.ffn),
            ("vocab", self.vocab),
            ("context", self.context),
        ];
        let experts =
            self.moe.map(|moe| [("moe.experts", moe.experts), ("moe.per_token", moe.per_token)]);
        let mut sizes = sizes.into_iter().chain(experts.into_iter().flatten());
        if let Some((name, _)) = sizes.find(|(_, size)| *size == 0) {
            return Err(ShapeError::Zero(name));
        }
        let (heads, kv_heads) = (self.heads, self.kv_heads());
        let no_multiple = |what, value, of, by| ShapeError::NoMultiple { what, value, of, by };
        if self.head_dim.is_none() && !self.hidden.is_multiple_of(heads) {
            return Err(no_multiple("hidden", self.hidden, "heads", heads));
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(no_multiple("heads", heads, "kv_heads", kv_heads));
        }
        if self.head_dim() == 0 || !self.head_dim().is_multiple_of(2) {
            return Err(ShapeError::OddHead(self.head_dim()));
        }
        for (name, value) in [("rope_theta", self.rope_theta), ("norm_eps", self.norm_eps)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(ShapeError::NotPositive(name, value));
            }
        }
        match self.moe {
            Some(Moe { experts, per_token }) if per_token > experts => {
                Err(ShapeError::TooManyExperts { per_token, experts })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::model::Piece;

    pub(crate) fn tiny(moe: bool) -> ModelShape {
        ModelShape {
            name: "tiny".to_owned(),
            layers: 3,
            hidden: 48,
            heads: 4,
            kv_heads: Some(2),
            head_dim: Some(16),
            ffn: 80,
            vocab: 260,
            context: 512,
            rope_theta: 10_000.0,
            norm_eps: 1e-5,
            tied_embeddings: false,
            moe: moe.then_some(Moe { experts: 4, per_token: 2 }),
            weights: WeightsSource { seed: 7 },
        }
    }

    pub(crate) fn piece(tokens: &[u32], start: usize, blocks: &[u32]) -> Piece {
        Piece { tokens: tokens.to_vec(), start, blocks: blocks.to_vec(), wants_output: true }
    }

    #[test]
    fn sizes_that_do_not_fit_are_named() {
        assert_eq!(tiny(true).check(), Ok(()));
        let said = |change: fn(&mut ModelShape)| {
            let mut shape = tiny(true);
            change(&mut shape);
            shape.check().unwrap_err().to_string()
        };
        assert!(said(|s| s.layers = 0).contains("model.layers is 0"));
        assert!(said(|s| s.kv_heads = Some(3)).contains("no multiple of model.kv_heads (3)"));
        assert!(said(|s| s.head_dim = Some(7)).contains("must be even"));
        assert!(said(|s| s.rope_theta = f64::NAN).contains("rope_theta"));
        let many = said(|s| s.moe = Some(Moe { experts: 2, per_token: 3 }));
        assert!(many.contains("only 2 experts"));
    }
}
