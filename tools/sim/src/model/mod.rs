//! The model catalogue: the sizes of transformers that determine computing times and traffic.
//!
//! Eight models are built in (`models/*.toml`, each with its source). The path of a TOML file of
//! the same form works wherever a model's name does. Sizes per token and layer:
//!
//! * *KV cache* ([`Model::kv_bytes_per_token`]): keys and values of all heads, what stage 1 fetches
//!   and stage 3 sends (MFS §3.1).
//! * *Hidden state* ([`Model::activation_bytes`]): what expert parallelism dispatches and combines
//!   (stage 2), once per copy, see [`ExpertRouting`].
//! * *State of linear attention* ([`Model::state_bytes`]): a Gated DeltaNet layer keeps no KV
//!   cache. It keeps a matrix per value head and the last inputs of its convolution, whose size
//!   does not depend on the prompt's length. Stage 3 sends this state once per request and layer. A
//!   prefix that another unit holds costs one such state instead of bytes per token. The model
//!   assumes that serving keeps a state at every block boundary.

mod document;
mod linear;
mod routing;

use serde::{Deserialize, Serialize};

pub(crate) use document::Document;
pub use document::FileError;
pub use linear::LinearAttention;
pub use routing::ExpertRouting;

/// Sizes of a decoder-only transformer. All MLPs and experts are gated (three matrices).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    pub name: String,
    pub layers: u16,
    pub hidden: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    #[serde(default)]
    pub query_gate: bool,
    pub ffn: u32,
    /// Experts of a layer. 1 means a dense MLP.
    #[serde(default = "one")]
    pub experts: u32,
    #[serde(default = "one")]
    pub top_k: u32,
    /// Inner width of the shared experts, which process every token. 0 means there are none.
    #[serde(default)]
    pub shared_ffn: u32,
    pub vocab: u32,
    #[serde(default = "two")]
    pub bytes_per_value: f64,
    #[serde(default = "two")]
    pub kv_bytes_per_value: f64,
    /// Distance between layers with full attention: every n-th layer has it, and the others have
    /// linear attention. 1 means that all layers have full attention.
    #[serde(default = "one_layer")]
    pub full_attention_every: u16,
    pub linear_attention: Option<LinearAttention>,
}

fn one() -> u32 {
    1
}

fn one_layer() -> u16 {
    1
}

fn two() -> f64 {
    2.0
}

/// Largest number of weights: a thousand times those of the largest models.
const WEIGHTS_MOST: u128 = 1_000_000_000_000_000;

const BUILT_IN: [(&str, &str); 8] = [
    ("dbrx", include_str!("../../models/dbrx.toml")),
    ("grok-2", include_str!("../../models/grok-2.toml")),
    ("llama-3-8b", include_str!("../../models/llama-3-8b.toml")),
    ("llama-3-70b", include_str!("../../models/llama-3-70b.toml")),
    ("mixtral-8x7b", include_str!("../../models/mixtral-8x7b.toml")),
    ("mixtral-8x22b", include_str!("../../models/mixtral-8x22b.toml")),
    ("qwen3-coder-480b", include_str!("../../models/qwen3-coder-480b.toml")),
    ("qwen3-coder-next", include_str!("../../models/qwen3-coder-next.toml")),
];

impl Model {
    /// Returns a built-in model, or reads one from a TOML file if `name` is a path (has a `/` or
    /// ends in `.toml`).
    /// Fails if there is no such model, or its file cannot be read or is invalid.
    pub fn named(name: &str) -> Result<Self, FileError> {
        let document = Document::named("model", name, &BUILT_IN)?;
        let model: Self = document.parse()?;
        model.check(&document)?;
        Ok(model)
    }

    pub fn built_in() -> Vec<Self> {
        BUILT_IN
            .iter()
            .map(|(name, _)| Self::named(name).expect("tests read every built-in model"))
            .collect()
    }

    fn check(&self, document: &Document) -> Result<(), FileError> {
        let sizes = [
            ("layers", u32::from(self.layers)),
            ("hidden", self.hidden),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("ffn", self.ffn),
            ("experts", self.experts),
            ("top_k", self.top_k),
            ("vocab", self.vocab),
            ("full_attention_every", u32::from(self.full_attention_every)),
        ];
        for (field, size) in sizes {
            // Larger sizes are mistakes.
            if !(1..=1 << 24).contains(&size) {
                return Err(document.wrong(field, "1 to 16777216"));
            }
        }
        if self.shared_ffn > 1 << 24 {
            return Err(document.wrong("shared_ffn", "0 to 16777216"));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let expected = format!("a divisor of `heads`, {}", self.heads);
            return Err(document.wrong("kv_heads", &expected));
        }
        if self.top_k > self.experts {
            let expected = format!("at most `experts`, {}", self.experts);
            return Err(document.wrong("top_k", &expected));
        }
        for (field, bytes) in [
            ("bytes_per_value", self.bytes_per_value),
            ("kv_bytes_per_value", self.kv_bytes_per_value),
        ] {
            if !(0.25..=8.0).contains(&bytes) {
                return Err(document.wrong(field, "0.25 to 8"));
            }
        }
        match &self.linear_attention {
            Some(linear) => linear.check(document)?,
            None if self.full_attention_every > 1 => {
                let expected = "1, or a table [linear_attention] for the other layers";
                return Err(document.wrong("full_attention_every", expected));
            }
            None => {}
        }
        if self.count(self.experts) > WEIGHTS_MOST {
            let expected = format!("sizes with at most {WEIGHTS_MOST} weights together");
            return Err(document.wrong("layers", &expected));
        }
        Ok(())
    }

    /// Reports whether a layer (counted from 0) has full attention and therefore a KV cache.
    pub fn is_full_attention(&self, layer: u16) -> bool {
        (u32::from(layer) + 1).is_multiple_of(u32::from(self.full_attention_every))
    }

    pub fn has_experts(&self) -> bool {
        self.experts > 1
    }

    /// Returns the bytes of KV cache per token in a layer (counted from 0), for keys and values of
    /// all heads. Returns 0 for a layer with linear attention.
    pub fn kv_bytes_per_token(&self, layer: u16) -> u64 {
        if !self.is_full_attention(layer) {
            return 0;
        }
        let values = 2 * u64::from(self.kv_heads) * u64::from(self.head_dim);
        (values as f64 * self.kv_bytes_per_value) as u64
    }

    /// Returns the bytes of state that a request of any length leaves in a layer (counted from 0).
    /// Returns 0 for a layer with a KV cache.
    pub fn state_bytes(&self, layer: u16) -> u64 {
        match &self.linear_attention {
            Some(linear) if !self.is_full_attention(layer) => {
                linear.state_bytes(self.bytes_per_value)
            }
            _ => 0,
        }
    }

    pub fn activation_bytes(&self) -> u64 {
        (f64::from(self.hidden) * self.bytes_per_value) as u64
    }

    /// Returns the number of weights, without norms.
    pub fn parameters(&self) -> u64 {
        self.count(self.experts) as u64
    }

    /// Returns the number of weights that are used for one token, without norms.
    pub fn active_parameters(&self) -> u64 {
        self.count(self.top_k) as u64
    }

    /// Returns the number of weights. It fits 64 bits in a model that was checked.
    fn count(&self, experts: u32) -> u128 {
        let hidden = u128::from(self.hidden);
        let attention = |layer| match &self.linear_attention {
            Some(linear) if !self.is_full_attention(layer) => {
                u128::from(linear.parameters(u64::from(self.hidden)))
            }
            _ => {
                let queries = u128::from(self.heads) * (1 + u128::from(self.query_gate));
                let columns = queries + 2 * u128::from(self.kv_heads) + u128::from(self.heads);
                hidden * columns * u128::from(self.head_dim)
            }
        };
        let inner = u128::from(experts) * u128::from(self.ffn) + u128::from(self.shared_ffn);
        let router = if self.has_experts() { self.experts } else { 0 };
        let mlp = 3 * hidden * inner + hidden * u128::from(router);
        let layers: u128 = (0..self.layers).map(|layer| attention(layer) + mlp).sum();
        layers + 2 * u128::from(self.vocab) * hidden
    }
}

#[cfg(test)]
mod tests;
