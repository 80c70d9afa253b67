//! GPUs: their peak rates and memory sizes, and the coefficients that relate operators to these
//! rates.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::coefficients::Coefficients;
use crate::model::{Document, FileError};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gpu {
    pub name: String,
    /// Peak rate of dense 16-bit floating-point operations, per second.
    pub peak_flops: f64,
    pub memory_bytes: u64,
    /// Peak rate of the memory, in bytes per second.
    pub memory_bytes_per_second: f64,
    /// Peak rate of NVLink in each direction, in bytes per second.
    pub nvlink_bytes_per_second: f64,
    pub coefficients: Coefficients,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GpuFile {
    name: String,
    peak_tflops: f64,
    memory_gbytes: f64,
    memory_gbytes_per_second: f64,
    nvlink_gbytes_per_second: f64,
    /// Name or path of the coefficients. They are shares of the peak rates, so a GPU without
    /// measurements can use those of a similar one.
    fit: String,
}

const BUILT_IN: [(&str, &str); 3] = [
    ("a100", include_str!("../../gpus/a100.toml")),
    ("h100", include_str!("../../gpus/h100.toml")),
    ("rtx3090", include_str!("../../gpus/rtx3090.toml")),
];

impl Gpu {
    /// Returns a built-in GPU, or reads one from a TOML file if `name` is a path (has a `/` or ends
    /// in `.toml`).
    /// Fails if there is no such GPU, or its file cannot be read or is invalid.
    pub fn named(name: &str) -> Result<Self, FileError> {
        let document = Document::named("GPU", name, &BUILT_IN)?;
        let file: GpuFile = document.parse()?;
        for (field, value) in [
            ("peak_tflops", file.peak_tflops),
            ("memory_gbytes", file.memory_gbytes),
            ("memory_gbytes_per_second", file.memory_gbytes_per_second),
            ("nvlink_gbytes_per_second", file.nvlink_gbytes_per_second),
        ] {
            if !(1.0..=1e6).contains(&value) {
                return Err(document.wrong(field, "1 to 1000000"));
            }
        }
        Ok(Self {
            coefficients: Coefficients::named(&file.fit)?,
            name: file.name,
            peak_flops: file.peak_tflops * 1e12,
            memory_bytes: (file.memory_gbytes * 1e9) as u64,
            memory_bytes_per_second: file.memory_gbytes_per_second * 1e9,
            nvlink_bytes_per_second: file.nvlink_gbytes_per_second * 1e9,
        })
    }

    pub fn built_in() -> Vec<Self> {
        BUILT_IN
            .iter()
            .map(|(name, _)| Self::named(name).expect("tests read every built-in GPU"))
            .collect()
    }

    pub(crate) fn coefficients_file(name: &str) -> Option<PathBuf> {
        if !Document::is_path(name) {
            return None;
        }
        let file: GpuFile = Document::named("GPU", name, &[]).ok()?.parse().ok()?;
        Document::is_path(&file.fit).then(|| file.fit.into())
    }
}
