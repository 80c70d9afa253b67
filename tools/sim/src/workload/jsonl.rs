//! What Mooncake's and Qwen-Bailian's jsonl have in common: one object per line with `timestamp`,
//! `input_length`, `output_length` and `hash_ids`. Fields that are not needed are passed over.
//!
//! A line is parsed at once into what is wanted; only if that fails is it taken apart field by
//! field, which is slower and tells which one is wrong.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::draft::Draft;
use super::input::Lines;
use super::number::{count, nanoseconds, times, unfit};
use super::{Requests, WorkloadError};

/// What sets one jsonl format apart from another.
pub(super) struct Format {
    /// Tokens of a block.
    pub(super) block_tokens: u32,
    /// Seconds of a unit of `timestamp`.
    pub(super) unit_s: f64,
    /// What such a unit is called.
    pub(super) unit: &'static str,
}

#[derive(Deserialize)]
struct TraceLine {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// Reads a file of the format.
pub(super) fn read(path: &Path, format: &Format) -> Result<Requests, WorkloadError> {
    let mut draft = Draft::new(format.block_tokens);
    let mut lines = Lines::open(path)?;
    while let Some((_, text)) = lines.next()? {
        let pushed = take(text, format).and_then(|(at_ns, line)| {
            let hashes = Some(line.hash_ids.as_slice());
            draft.push(at_ns, line.input_length, line.output_length, hashes)
        });
        pushed.map_err(|problem| lines.wrong(problem))?;
    }
    draft.finish(path)
}

/// A line and its time in nanoseconds.
fn take(text: &str, format: &Format) -> Result<(i64, TraceLine), String> {
    serde_json::from_str::<TraceLine>(text)
        .ok()
        .filter(|line| line.input_length > 0)
        .and_then(|line| Some((nanoseconds(line.timestamp, format.unit_s)?, line)))
        .map_or_else(|| take_apart(text, format), Ok)
}

const FIELDS: &str = "an object with `timestamp`, `input_length`, `output_length` and `hash_ids`";

fn take_apart(text: &str, format: &Format) -> Result<(i64, TraceLine), String> {
    let line = match serde_json::from_str(text) {
        Ok(Value::Object(line)) => line,
        Ok(other) => return Err(format!("is {}; expected {FIELDS}", written(&other))),
        Err(error) => {
            let reason = error.to_string().replace(" at line 1 column", " at column");
            return Err(format!("is not JSON ({reason}); expected {FIELDS}"));
        }
    };
    let field = |name: &str| {
        let found = line.get(name);
        found.ok_or_else(|| format!("`{name}` is missing; expected {FIELDS}"))
    };
    let found = field("timestamp")?;
    let time = found.as_f64().and_then(|n| nanoseconds(n, format.unit_s));
    let at_ns = time.ok_or_else(|| {
        let expected = times(format.unit_s, format.unit);
        unfit("timestamp", &written(found), &expected)
    })?;
    let tokens = |name, least| count(name, &written(field(name)?), least);
    let line = TraceLine {
        timestamp: 0.0,
        input_length: tokens("input_length", 1)?,
        output_length: tokens("output_length", 0)?,
        hash_ids: hashes(field("hash_ids")?)?,
    };
    Ok((at_ns, line))
}

fn hashes(found: &Value) -> Result<Vec<u64>, String> {
    let list = found.as_array().ok_or_else(|| {
        let expected = "a list of whole numbers";
        unfit("hash_ids", &written(found), expected)
    })?;
    let ids = list.iter().enumerate().map(|(index, id)| {
        id.as_u64().ok_or_else(|| {
            let field = format!("hash_ids[{index}]");
            unfit(&field, &written(id), "a whole number from 0 to 2^64-1")
        })
    });
    ids.collect()
}

/// A value as it is written, but lists and objects only named: their text can be long.
fn written(value: &Value) -> String {
    match value {
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
        other => other.to_string(),
    }
}
