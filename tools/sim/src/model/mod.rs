//! The model catalogue: the sizes of a transformer that decide what it computes and what it sends.
//!
//! Eight models are built in (`models/*.toml`, each with its source); a path to a TOML file of the
//! same form works everywhere a name does. What counts per token and layer:
//!
//! * *KV cache* ([`Model::kv_bytes_per_token`]): keys and values of all heads, what stage 1 fetches
//!   and stage 3 sends (MFS §3.1).
//! * *Hidden state* ([`Model::activation_bytes`]): what expert parallelism dispatches and combines
//!   (stage 2), once per copy, see [`Routing`].
//! * *State of linear attention* ([`Model::state_bytes`]): a layer of Gated DeltaNet keeps no KV
//!   cache but a matrix per value head and the last inputs of its convolution, of the same size
//!   however long the prompt. It is counted per request and layer: stage 3 sends it once to the
//!   decode rank, and a prefix that another unit holds costs one such state (that of the end of the
//!   prefix) instead of bytes per token. That assumes that serving keeps a state at every block
//!   boundary, as engines with prefix caching for hybrids do at some of them.

mod document;
mod linear;
mod routing;

use serde::{Deserialize, Serialize};

pub(crate) use document::Document;
pub use document::FileError;
pub use linear::LinearAttention;
pub use routing::Routing;

/// Sizes of a decoder-only transformer. All MLPs and experts are gated (three matrices).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Its name.
    pub name: String,
    /// Layers.
    pub layers: u16,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Query heads of an attention layer.
    pub heads: u32,
    /// Heads that have keys and values.
    pub kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Attention's output is gated per value, so that the query projection is twice as wide.
    #[serde(default)]
    pub query_gate: bool,
    /// Inner width of the MLP, or of one expert.
    pub ffn: u32,
    /// Experts of a layer; 1: a dense MLP.
    #[serde(default = "one")]
    pub experts: u32,
    /// Experts that a token goes to.
    #[serde(default = "one")]
    pub top_k: u32,
    /// Inner width of what all tokens pass beside the experts; 0: nothing.
    #[serde(default)]
    pub shared_ffn: u32,
    /// Tokens of the vocabulary.
    pub vocab: u32,
    /// Bytes of a weight and of a value of the hidden state, computed with and sent.
    #[serde(default = "two")]
    pub bytes_per_value: f64,
    /// Bytes of a value in the KV cache.
    #[serde(default = "two")]
    pub kv_bytes_per_value: f64,
    /// The last layer of so many has attention over all tokens, the others have linear attention.
    /// 1: all layers have attention over all tokens.
    #[serde(default = "one_layer")]
    pub full_attention_every: u16,
    /// Sizes of the linear attention, where there is some.
    #[serde(default)]
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

const BUILT_IN: [(&str, &str); 8] = [
    ("dbrx", include_str!("../../models/dbrx.toml")),
    ("grok-2", include_str!("../../models/grok-2.toml")),
    ("llama-3-8b", include_str!("../../models/llama-3-8b.toml")),
    ("llama-3-70b", include_str!("../../models/llama-3-70b.toml")),
    (
        "mixtral-8x7b",
        include_str!("../../models/mixtral-8x7b.toml"),
    ),
    (
        "mixtral-8x22b",
        include_str!("../../models/mixtral-8x22b.toml"),
    ),
    (
        "qwen3-coder-480b",
        include_str!("../../models/qwen3-coder-480b.toml"),
    ),
    (
        "qwen3-coder-next",
        include_str!("../../models/qwen3-coder-next.toml"),
    ),
];

impl Model {
    /// A built-in model, or one from a TOML file if `name` is a path (has a `/` or ends in
    /// `.toml`).
    ///
    /// # Errors
    /// See [`FileError`].
    pub fn named(name: &str) -> Result<Self, FileError> {
        let document = Document::named("model", name, &BUILT_IN)?;
        let model: Self = document.parse()?;
        model.check(&document)?;
        Ok(model)
    }

    /// All built-in models, by name.
    #[must_use]
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
            // What is beyond this is a slip, and sums of sizes below it can't overflow.
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
        Ok(())
    }

    /// Whether a layer (from 0) has attention over all tokens, and so a KV cache.
    #[must_use]
    pub fn is_full_attention(&self, layer: u16) -> bool {
        (u32::from(layer) + 1).is_multiple_of(u32::from(self.full_attention_every))
    }

    /// Whether layers have experts rather than one MLP.
    #[must_use]
    pub fn has_experts(&self) -> bool {
        self.experts > 1
    }

    /// Bytes of KV cache that a token leaves in a layer (from 0), keys and values of all heads; 0
    /// in a layer of linear attention, which keeps [`Self::state_bytes`] instead.
    #[must_use]
    pub fn kv_bytes_per_token(&self, layer: u16) -> u64 {
        if !self.is_full_attention(layer) {
            return 0;
        }
        let values = 2 * u64::from(self.kv_heads) * u64::from(self.head_dim);
        (values as f64 * self.kv_bytes_per_value) as u64
    }

    /// Bytes that a request leaves in a layer (from 0) whatever its length; 0 in a layer with KV
    /// cache.
    #[must_use]
    pub fn state_bytes(&self, layer: u16) -> u64 {
        match &self.linear_attention {
            Some(linear) if !self.is_full_attention(layer) => {
                linear.state_bytes(self.bytes_per_value)
            }
            _ => 0,
        }
    }

    /// Bytes of one token's hidden state on the wire.
    #[must_use]
    pub fn activation_bytes(&self) -> u64 {
        (f64::from(self.hidden) * self.bytes_per_value) as u64
    }

    /// Weights in all, norms left out.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        self.count(self.experts)
    }

    /// Weights that one token meets, norms left out.
    #[must_use]
    pub fn active_parameters(&self) -> u64 {
        self.count(self.top_k)
    }

    /// Bytes of the weights of a rank that shares out the experts with `ep − 1` others, norms left
    /// out.
    #[must_use]
    pub fn weight_bytes(&self, ep: u32) -> u64 {
        let (dense, all) = (self.count(0), self.count(self.experts));
        let rank = dense + (all - dense) / u64::from(ep.max(1));
        (rank as f64 * self.bytes_per_value) as u64
    }

    fn count(&self, experts: u32) -> u64 {
        let hidden = u64::from(self.hidden);
        let attention = |layer| match &self.linear_attention {
            Some(linear) if !self.is_full_attention(layer) => linear.parameters(hidden),
            _ => {
                let queries = u64::from(self.heads) * (1 + u64::from(self.query_gate));
                let columns = queries + 2 * u64::from(self.kv_heads) + u64::from(self.heads);
                hidden * columns * u64::from(self.head_dim)
            }
        };
        let inner = u64::from(experts) * u64::from(self.ffn) + u64::from(self.shared_ffn);
        let router = if self.has_experts() { self.experts } else { 0 };
        let mlp = 3 * hidden * inner + hidden * u64::from(router);
        let layers: u64 = (0..self.layers).map(|layer| attention(layer) + mlp).sum();
        layers + 2 * u64::from(self.vocab) * hidden
    }
}

#[cfg(test)]
mod tests;
