//! Operator profiles as Vidur records them (microsoft/vidur, `data/profiling`), kept as csv with
//! the median of each operator: `<gpu>_<model>_linear.csv` and `<gpu>_<system>_all_reduce.csv`.

use std::path::{Path, PathBuf};
use std::{fs, io};

use csv::StringRecord;
use laxity_files::ReadError;

/// Profiles that cannot be fitted to.
#[derive(Debug, thiserror::Error)]
pub enum FitError {
    /// A file or the folder cannot be read: check the path.
    #[error("cannot read {path}: {cause}")]
    Read {
        /// Which one.
        path: PathBuf,
        /// Why. Not a source: the text says it.
        cause: ReadError,
    },
    /// The folder lacks a profile.
    #[error("{folder}: expected a file {expected}")]
    Missing {
        /// Which folder.
        folder: PathBuf,
        /// What should be in it.
        expected: String,
    },
    /// A file lacks a column.
    #[error("{path}, line 1: expected a column `{column}`")]
    Column {
        /// Which file.
        path: PathBuf,
        /// Which column.
        column: String,
    },
    /// A line is not as it should be: correct it or leave it out.
    #[error("{path}, line {line}: `{column}`: expected {expected}, found `{found}`")]
    Value {
        /// Which file.
        path: PathBuf,
        /// Which line, from 1.
        line: u64,
        /// Which column.
        column: String,
        /// What was expected there.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// A file has too little to fit to.
    #[error("{path}: expected 10 lines or more to fit to, found {found}")]
    Short {
        /// Which file.
        path: PathBuf,
        /// Lines that count.
        found: usize,
    },
    /// The file is no csv.
    #[error("{path}: {cause}")]
    Csv {
        /// Which file.
        path: PathBuf,
        /// Why; says the line.
        cause: csv::Error,
    },
}

/// One measured time of one operator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sample {
    /// Tokens; bytes in an all-reduce.
    pub(super) size: u64,
    /// What else the operator depends on: columns and depth of a product; bytes per token of one
    /// that only reads and writes; GPUs of an all-reduce, in all and in a server.
    pub(super) shape: [f64; 2],
    /// GPUs that heads and columns were split over; 1 in an all-reduce.
    pub(super) tp: u32,
    /// The time.
    pub(super) ns: f64,
}

/// What an operator is, as far as its coefficients go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Gemm,
    Embedding,
    Norm,
    Rope,
    Activation,
    Add,
    AllReduce,
}

/// The measured times of one operator in one profile, a sample per line of the file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Series {
    /// The profile's file, without `.csv`.
    pub(super) profile: String,
    /// The operator, as Vidur calls it.
    pub(super) operator: &'static str,
    pub(super) kind: Kind,
    pub(super) samples: Vec<Sample>,
}

/// Longest profile that is read, in bytes; Vidur's longest, as it is kept here, has 1 MB.
const PROFILE_BYTES_MAX: u64 = 256 << 20;

/// Lines that a profile must have, more than there are coefficients.
const LEAST_LINES: usize = 10;

/// Bytes of a value in the profiles.
pub(super) const BYTES: f64 = 2.0;

/// Files of the folder whose names start and end like this, in order.
pub(super) fn files(folder: &Path, start: &str, end: &str) -> Result<Vec<PathBuf>, FitError> {
    let failed = |cause: io::Error| FitError::Read {
        path: folder.to_owned(),
        cause: cause.into(),
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(start) && name.ends_with(end) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// A csv file with a header.
struct Table {
    path: PathBuf,
    headers: StringRecord,
    lines: Vec<StringRecord>,
}

impl Table {
    fn read(path: &Path) -> Result<Self, FitError> {
        let failed = |cause| FitError::Csv {
            path: path.to_owned(),
            cause,
        };
        let text = laxity_files::read(path, PROFILE_BYTES_MAX).map_err(|cause| FitError::Read {
            path: path.to_owned(),
            cause,
        })?;
        let mut reader = csv::Reader::from_reader(text.as_slice());
        Ok(Self {
            path: path.to_owned(),
            headers: reader.headers().map_err(failed)?.clone(),
            lines: reader.records().collect::<Result<_, _>>().map_err(failed)?,
        })
    }

    /// All positive numbers of a column.
    fn column(&self, column: &str) -> Result<Vec<f64>, FitError> {
        let Some(index) = self.headers.iter().position(|header| header == column) else {
            return Err(FitError::Column {
                path: self.path.clone(),
                column: column.to_owned(),
            });
        };
        let number = |line: &StringRecord| {
            let found = line.get(index).unwrap_or_default();
            let number: Option<f64> = found.trim().parse().ok();
            number
                .filter(|number| *number > 0.0 && number.is_finite())
                .ok_or_else(|| FitError::Value {
                    path: self.path.clone(),
                    line: line.position().map_or(0, csv::Position::line),
                    column: column.to_owned(),
                    expected: "a positive number",
                    found: found.to_owned(),
                })
        };
        self.lines.iter().map(number).collect()
    }

    fn short(&self, found: usize) -> FitError {
        FitError::Short {
            path: self.path.clone(),
            found,
        }
    }

    fn name(&self) -> String {
        let stem = self.path.file_stem().unwrap_or_default();
        stem.to_string_lossy().into_owned()
    }

    /// The times of an operator; `sample` has the rest of the sample of a line.
    fn series(
        &self,
        operator: &'static str,
        kind: Kind,
        sample: impl Fn(usize) -> Sample,
    ) -> Result<Series, FitError> {
        let ms = self.column(&format!("{operator}_ms_median"))?;
        let samples = ms.iter().enumerate().map(|(line, ms)| Sample {
            ns: ms * 1e6,
            ..sample(line)
        });
        if ms.len() < LEAST_LINES {
            return Err(self.short(ms.len()));
        }
        Ok(Series {
            profile: self.name(),
            operator,
            kind,
            samples: samples.collect(),
        })
    }
}

/// The operators of a profile of a model. Vidur splits heads and columns over
/// `num_tensor_parallel_workers` and times one of them.
pub(super) fn linear(path: &Path) -> Result<Vec<Series>, FitError> {
    let table = Table::read(path)?;
    let tokens = table.column("num_tokens")?;
    let tp = table.column("num_tensor_parallel_workers")?;
    let heads = table.column("n_head")?;
    let kv_heads = table.column("n_kv_head")?;
    let hidden = table.column("n_embd")?;
    let inner = table.column("n_expanded_embd")?;
    let keys = |i: usize| kv_heads[i] * hidden[i] / heads[i];
    let series = |operator, kind, shape: &dyn Fn(usize) -> [f64; 2]| {
        table.series(operator, kind, |i| Sample {
            size: tokens[i] as u64,
            shape: shape(i),
            tp: tp[i] as u32,
            ns: 0.0,
        })
    };
    let product = |operator, columns: &dyn Fn(usize) -> f64, depth: &dyn Fn(usize) -> f64| {
        series(operator, Kind::Gemm, &|i| [columns(i), depth(i)])
    };
    let moved = |operator, kind, values: &dyn Fn(usize) -> f64| {
        series(operator, kind, &|i| [values(i) * BYTES, 0.0])
    };
    let (whole, split) = (|i: usize| hidden[i], |i: usize| hidden[i] / tp[i]);
    Ok(vec![
        moved("emb", Kind::Embedding, &|i| 2.0 * hidden[i])?,
        moved("input_layernorm", Kind::Norm, &|i| 2.0 * hidden[i])?,
        product(
            "attn_pre_proj",
            &|i| (hidden[i] + 2.0 * keys(i)) / tp[i],
            &whole,
        )?,
        moved("attn_rope", Kind::Rope, &|i| {
            2.0 * (hidden[i] + keys(i)) / tp[i]
        })?,
        product("attn_post_proj", &whole, &split)?,
        moved("post_attention_layernorm", Kind::Norm, &|i| 2.0 * hidden[i])?,
        product("mlp_up_proj", &|i| 2.0 * inner[i] / tp[i], &whole)?,
        moved("mlp_act", Kind::Activation, &|i| 3.0 * inner[i] / tp[i])?,
        product("mlp_down_proj", &whole, &|i| inner[i] / tp[i])?,
        moved("add", Kind::Add, &|i| 3.0 * hidden[i])?,
    ])
}

/// All-reduce within one server: those lines in which all workers are in one.
pub(super) fn all_reduce(path: &Path) -> Result<Series, FitError> {
    let table = Table::read(path)?;
    let bytes = table.column("size")?;
    let gpus = table.column("num_workers")?;
    let per_node = table.column("devices_per_node")?;
    let mut series = table.series("all_reduce", Kind::AllReduce, |i| Sample {
        size: bytes[i] as u64,
        shape: [gpus[i], per_node[i]],
        tp: 1,
        ns: 0.0,
    })?;
    series
        .samples
        .retain(|sample| sample.shape[0] <= sample.shape[1] && sample.shape[0] > 1.0);
    if series.samples.len() < LEAST_LINES {
        return Err(table.short(series.samples.len()));
    }
    Ok(series)
}
