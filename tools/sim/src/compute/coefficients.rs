//! The coefficients of the compute-time model, one file per GPU (`fits/*.toml`). What they mean is
//! said in `operator`; `laxity sim fit DIR --write` makes them from recorded profiles.
//!
//! Rates are shares of what the GPU can do at best, so none can be above 1: no operator is ever
//! faster than the roofline.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::model::{Document, FileError};

/// Coefficients that cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum CoefficientsError {
    /// No such file among the built-in ones: take one of those named, or the path of a TOML file.
    #[error("no coefficients `{name}`: built in are {known}; or give the path of a TOML file")]
    Unknown {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// The file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
}

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
    /// See [`CoefficientsError`].
    pub fn named(name: &str) -> Result<Self, CoefficientsError> {
        if let Some((_, text)) = BUILT_IN.iter().find(|(known, _)| *known == name) {
            return Ok(Self::from_document(&Document::built_in(name, text))?);
        }
        if Document::is_path(name) {
            return Ok(Self::from_document(&Document::read(Path::new(name))?)?);
        }
        Err(CoefficientsError::Unknown {
            name: name.to_owned(),
            known: BUILT_IN.map(|(known, _)| known).join(", "),
        })
    }

    fn from_document(document: &Document) -> Result<Self, FileError> {
        let read: Self = document.parse()?;
        for (field, share) in read.shares() {
            if !(1e-3..=1.0).contains(&share) {
                return Err(document.wrong(field, "a share of the GPU's rate, 0.001 to 1"));
            }
        }
        for (field, amount) in read.amounts() {
            if !(0.0..=1e6).contains(&amount) {
                return Err(document.wrong(field, "0 to 1000000"));
            }
        }
        Ok(read)
    }

    fn shares(&self) -> [(&'static str, f64); 10] {
        [
            ("gemm.compute", self.gemm.compute),
            ("gemm.memory", self.gemm.memory),
            ("stream.embedding.memory", self.stream.embedding.memory),
            ("stream.norm.memory", self.stream.norm.memory),
            ("stream.rope.memory", self.stream.rope.memory),
            ("stream.activation.memory", self.stream.activation.memory),
            ("stream.add.memory", self.stream.add.memory),
            ("all_reduce.small.nvlink", self.all_reduce.small.nvlink),
            ("all_reduce.large.nvlink", self.all_reduce.large.nvlink),
            ("attention.compute", self.attention.compute),
        ]
    }

    fn amounts(&self) -> [(&'static str, f64); 17] {
        let (stream, reduce) = (&self.stream, &self.all_reduce);
        [
            ("gemm.overhead_us", self.gemm.overhead_us),
            ("gemm.rows", self.gemm.rows),
            ("gemm.columns", self.gemm.columns),
            ("gemm.depth", self.gemm.depth),
            ("stream.embedding.overhead_us", stream.embedding.overhead_us),
            ("stream.norm.overhead_us", stream.norm.overhead_us),
            ("stream.rope.overhead_us", stream.rope.overhead_us),
            (
                "stream.activation.overhead_us",
                stream.activation.overhead_us,
            ),
            ("stream.add.overhead_us", stream.add.overhead_us),
            ("all_reduce.small.latency_us", reduce.small.latency_us),
            ("all_reduce.small.hop_us", reduce.small.hop_us),
            ("all_reduce.large.latency_us", reduce.large.latency_us),
            ("all_reduce.large.hop_us", reduce.large.hop_us),
            ("attention.context", self.attention.context),
            (
                "linear_attention.overhead_us",
                self.linear_attention.overhead_us,
            ),
            ("linear_attention.token_ns", self.linear_attention.token_ns),
            (
                "linear_attention.bytes_per_head",
                self.linear_attention.bytes_per_head,
            ),
        ]
    }

    /// Every coefficient and its name, in a fixed order.
    #[must_use]
    pub fn all(&self) -> Vec<(&'static str, f64)> {
        self.shares().into_iter().chain(self.amounts()).collect()
    }
}
