//! The coefficients of the compute-time model, one file per GPU (`fits/*.toml`). What they mean is
//! said in `operator`; `fits/fit.py` makes them from recorded profiles.
//!
//! Rates are shares of what the GPU can do at best, so none can be above 1: no operator is ever
//! faster than the roofline.

use serde::{Deserialize, Serialize};
use toml::Value;

use crate::model::{Document, FileError};

/// All coefficients of one GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Coefficients {
    /// Matrix products.
    pub gemm: Gemm,
    /// Operators that only read and write.
    pub stream: Streams,
    /// All-reduce over NVLink.
    pub all_reduce: AllReduce,
    /// Attention over all tokens. From published figures, not from profiles.
    pub attention: Attention,
    /// Gated DeltaNet. From published figures, not from profiles.
    pub linear_attention: LinearAttention,
}

/// Coefficients of matrix products: a product of `rows` × `depth` by `depth` × `columns`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gemm {
    /// Time besides the work, µs.
    pub overhead_us: f64,
    /// Share of the peak that large products reach.
    pub compute: f64,
    /// Share of the memory rate that reading weights reaches.
    pub memory: f64,
    /// Rows that are computed on top, as tiles are seldom full.
    pub rows: f64,
    /// Columns likewise.
    pub columns: f64,
    /// Depth likewise, as the pipeline must fill.
    pub depth: f64,
}

/// Coefficients of an operator that only reads and writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stream {
    /// Time besides the work, µs.
    pub overhead_us: f64,
    /// Share of the memory rate.
    pub memory: f64,
}

/// Coefficients of the operators that only read and write.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Streams {
    /// Looking tokens up in the embedding.
    pub embedding: Stream,
    /// `RMSNorm`.
    pub norm: Stream,
    /// Rotary position embedding of queries and keys.
    pub rope: Stream,
    /// `SiLU(gate) · up`.
    pub activation: Stream,
    /// Adding to the residual stream.
    pub add: Stream,
}

/// Coefficients of all-reduce: two ways to do it, of which the faster one counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllReduce {
    /// Soon done, slow per byte.
    pub small: Ring,
    /// Late to start, fast per byte.
    pub large: Ring,
}

/// Coefficients of one way to do an all-reduce.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ring {
    /// Time besides the bytes, µs.
    pub latency_us: f64,
    /// More of it for each GPU beyond the first, µs.
    pub hop_us: f64,
    /// Share of the NVLink rate of one direction.
    pub nvlink: f64,
}

/// Coefficients of attention over all tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attention {
    /// Share of the peak that attention to long contexts reaches.
    pub compute: f64,
    /// Tokens of context that are computed on top for each token.
    pub context: f64,
}

/// Coefficients of Gated DeltaNet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearAttention {
    /// Time besides the work, µs.
    pub overhead_us: f64,
    /// Time per token however few the heads, ns: chunks of a request come one after the other.
    pub token_ns: f64,
    /// Bytes per token and value head that take the memory rate's time.
    pub bytes_per_head: f64,
}

const BUILT_IN: [(&str, &str); 2] = [
    ("a100", include_str!("../../fits/a100.toml")),
    ("h100", include_str!("../../fits/h100.toml")),
];

impl Coefficients {
    /// Built-in coefficients, or those of a TOML file if `name` is a path (has a `/` or ends in
    /// `.toml`).
    ///
    /// # Errors
    /// See [`FileError`].
    pub fn named(name: &str) -> Result<Self, FileError> {
        let document = Document::named("coefficients", name, &BUILT_IN)?;
        let read: Self = document.parse()?;
        let tree = Value::try_from(&read).expect("coefficients are numbers");
        check(&document, "", &tree)?;
        Ok(read)
    }
}

/// Whether every number of a tree is within its bounds: shares, and what comes on top.
fn check(document: &Document, field: &str, tree: &Value) -> Result<(), FileError> {
    let Value::Table(table) = tree else {
        let value = tree.as_float().unwrap_or(f64::NAN);
        let name = field.rsplit('.').next().unwrap_or(field);
        let (allowed, said) = match name {
            "compute" | "memory" | "nvlink" => {
                (1e-3..=1.0, "a share of the GPU's rate, 0.001 to 1")
            }
            _ => (0.0..=1e6, "0 to 1000000"),
        };
        return match allowed.contains(&value) {
            true => Ok(()),
            false => Err(document.wrong(field, said)),
        };
    };
    for (name, inner) in table {
        let field = if field.is_empty() {
            name.clone()
        } else {
            format!("{field}.{name}")
        };
        check(document, &field, inner)?;
    }
    Ok(())
}
