//! Coefficients of the compute-time model, one file per GPU (`fits/*.toml`). The module `operator`
//! defines their meaning, and `fits/fit.py` computes them from recorded profiles.
//!
//! Rates are shares of the GPU's peak rates, at most 1. No operator is therefore faster than the
//! roofline.

use serde::{Deserialize, Serialize};
use toml::Value;

use crate::model::{Document, FileError};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Coefficients {
    pub gemm: GemmCoefficients,
    pub stream: Streams,
    pub all_reduce: AllReduceCoefficients,
    /// Coefficients of full attention. Based on published figures, not on profiles.
    pub attention: AttentionCoefficients,
    /// Coefficients of Gated DeltaNet. Based on published figures, not on profiles.
    pub linear_attention: LinearAttentionCoefficients,
}

/// Coefficients of a matrix product of `rows` × `depth` by `depth` × `columns`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmCoefficients {
    /// Fixed time per product, in microseconds.
    pub overhead_us: f64,
    /// Share of the peak rate that large products reach.
    pub compute: f64,
    /// Share of the memory rate that is reached when weights are read.
    pub memory: f64,
    /// Rows added to each product, because tiles are seldom full.
    pub rows: f64,
    /// Columns added to each product, because tiles are seldom full.
    pub columns: f64,
    /// Depth added to each product, because the pipeline must fill.
    pub depth: f64,
}

/// Coefficients of an operator that only reads and writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamCoefficients {
    /// Fixed time per operator, in microseconds.
    pub overhead_us: f64,
    /// Share of the memory rate that the operator reaches.
    pub memory: f64,
}

/// Coefficients of the operators that only read and write.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Streams {
    pub embedding: StreamCoefficients,
    /// Normalisation (`RMSNorm`).
    pub norm: StreamCoefficients,
    pub rope: StreamCoefficients,
    pub activation: StreamCoefficients,
    pub add: StreamCoefficients,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllReduceCoefficients {
    pub small: Ring,
    pub large: Ring,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ring {
    /// Fixed time of an all-reduce, in microseconds.
    pub latency_us: f64,
    /// Additional time for each GPU beyond the first, in microseconds.
    pub hop_us: f64,
    /// Share of the NVLink rate of one direction that the method reaches.
    pub nvlink: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionCoefficients {
    /// Share of the peak rate that attention to long contexts reaches.
    pub compute: f64,
    pub context: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearAttentionCoefficients {
    /// Fixed time per operator, in microseconds.
    pub overhead_us: f64,
    /// Time per token in nanoseconds, because chunks of a request run one after another.
    pub token_ns: f64,
    pub bytes_per_head: f64,
}

const BUILT_IN: [(&str, &str); 2] = [
    ("a100", include_str!("../../fits/a100.toml")),
    ("h100", include_str!("../../fits/h100.toml")),
];

impl Coefficients {
    /// Returns built-in coefficients, or reads a TOML file if `name` is a path (has a `/` or ends
    /// in `.toml`).
    /// Fails if the name is unknown, or the file cannot be read or is invalid.
    pub fn named(name: &str) -> Result<Self, FileError> {
        let document = Document::named("coefficients", name, &BUILT_IN)?;
        let read: Self = document.parse()?;
        let tree = Value::try_from(&read).expect("coefficients are numbers");
        check(&document, "", &tree)?;
        Ok(read)
    }
}

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
        let field = if field.is_empty() { name.clone() } else { format!("{field}.{name}") };
        check(document, &field, inner)?;
    }
    Ok(())
}
