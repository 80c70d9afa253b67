//! Request files: Mooncake's jsonl (`timestamp` ms, `input_length`, `hash_ids` of 512-token
//! blocks) and Azure's csv (`TIMESTAMP,ContextTokens,GeneratedTokens`), gzipped or not.
//!
//! An hour of a large cluster is fitted to a lab run of seconds in three steps, which [`Fitting`]
//! reports. The first requests only warm the prefix cache up (MFS §6.2 also clips 512). Prompt
//! lengths are multiplied by one factor, so the distribution keeps its shape and gets the mean of
//! the lab's model. Arrival times are multiplied by one factor, so the rate is as configured and
//! bursts remain.

use std::collections::HashSet;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use laxity_files::ReadError;
use serde::{Deserialize, Serialize};

use crate::workload::Request;

#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("cannot read {path}: {cause}")]
    Read {
        path: PathBuf,
        /// The error of the read. It is no source because the text includes it.
        cause: ReadError,
    },
    #[error("{path}, line {line}: {problem}")]
    Line { path: PathBuf, line: usize, problem: String },
    #[error("{path}: holds {found} requests; at least 2 are needed")]
    TooShort { path: PathBuf, found: usize },
}

#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    /// Seconds since the first request.
    pub at_s: f64,
    pub tokens: u32,
    /// Prefix blocks, first to last. Empty if the format has none.
    pub blocks: Vec<u64>,
}

const BYTES_MAX: u64 = 1 << 30;
/// Maximum number of bytes of a line of a recording. Real ones have about 60 kB.
const LINE_BYTES_MAX: u64 = 16 << 20;
const MOONCAKE_BLOCK_TOKENS: u32 = 512;

/// Maximum number of requests at the start of a recording that only warm the prefix cache up.
const WARM_UP_REQUESTS: usize = 512;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fitting {
    pub recorded: usize,
    /// Number of requests that only warmed the prefix cache up.
    pub warm_up: usize,
    pub token_factor: f64,
    pub time_factor: f64,
    pub clipped: usize,
}

/// Reads a request file. Its first line determines the format, and its first bytes the compression.
pub fn read(path: &Path) -> Result<Vec<Recorded>, TraceError> {
    let unreadable = |cause| TraceError::Read { path: path.to_owned(), cause };
    let failed = |cause: io::Error| unreadable(cause.into());
    let mut raw = BufReader::new(laxity_files::open(path).map_err(unreadable)?);
    let gzipped = raw.fill_buf().map_err(failed)?.starts_with(&[0x1f, 0x8b]);
    let plain: Box<dyn Read> =
        if gzipped { Box::new(flate2::read::MultiGzDecoder::new(raw)) } else { Box::new(raw) };
    let mut text = BufReader::new(laxity_files::limited(plain, BYTES_MAX));
    let jsonl = text.fill_buf().map_err(failed)?.starts_with(b"{");
    let mut recorded = if jsonl { read_mooncake(path, text)? } else { read_azure(path, text)? };
    if recorded.len() < 2 {
        return Err(TraceError::TooShort { path: path.to_owned(), found: recorded.len() });
    }
    recorded.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    let first = recorded[0].at_s;
    for request in &mut recorded {
        request.at_s -= first;
    }
    Ok(recorded)
}

#[derive(Deserialize)]
struct MooncakeLine {
    timestamp: f64,
    input_length: u32,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

fn read_mooncake(path: &Path, text: impl BufRead) -> Result<Vec<Recorded>, TraceError> {
    let mut recorded = Vec::new();
    for (index, line) in laxity_files::lines(text, LINE_BYTES_MAX).enumerate() {
        let wrong = |problem| TraceError::Line { path: path.to_owned(), line: index + 1, problem };
        let line = line.map_err(|cause| wrong(cause.to_string()))?;
        if line.trim().is_empty() {
            continue;
        }
        let line: MooncakeLine = serde_json::from_str(&line)
            .map_err(|error| wrong(format!("not a Mooncake request: {error}")))?;
        recorded.push(Recorded {
            at_s: line.timestamp / 1000.0,
            tokens: line.input_length.max(1),
            blocks: line.hash_ids,
        });
    }
    Ok(recorded)
}

#[derive(Deserialize)]
struct AzureLine {
    #[serde(rename = "TIMESTAMP")]
    timestamp: String,
    #[serde(rename = "ContextTokens")]
    context_tokens: u32,
}

fn read_azure(path: &Path, text: impl Read) -> Result<Vec<Recorded>, TraceError> {
    let mut recorded = Vec::new();
    for (index, line) in csv::Reader::from_reader(text).deserialize().enumerate() {
        let wrong = |problem| TraceError::Line { path: path.to_owned(), line: index + 2, problem };
        let line: AzureLine =
            line.map_err(|error| wrong(format!("not an Azure request: {error}")))?;
        let at_s = seconds(&line.timestamp)
            .ok_or_else(|| wrong(format!("`{}` is no time", line.timestamp)))?;
        recorded.push(Recorded { at_s, tokens: line.context_tokens.max(1), blocks: Vec::new() });
    }
    Ok(recorded)
}

/// Returns the seconds since 1970-01-01 of `2023-11-16 18:17:03.9799600`, or of 2024's form, which
/// ends with `+00:00`.
fn seconds(timestamp: &str) -> Option<f64> {
    let instant = humantime::parse_rfc3339_weak(timestamp.trim().trim_end_matches("+00:00"));
    Some(instant.ok()?.duration_since(UNIX_EPOCH).ok()?.as_secs_f64())
}

pub fn fit(
    recorded: &[Recorded],
    requests_per_s: f64,
    duration_s: f64,
    tokens_mean: f64,
    tokens_max: u32,
) -> (Vec<Request>, Fitting) {
    let warm_up = WARM_UP_REQUESTS.min(recorded.len() / 4);
    let replayed = &recorded[warm_up..];
    let mean = |of: &dyn Fn(&Recorded) -> f64| {
        replayed.iter().map(of).sum::<f64>() / replayed.len().max(1) as f64
    };
    let token_factor = tokens_mean / mean(&|r| f64::from(r.tokens)).max(1.0);
    let first_s = replayed.first().map_or(0.0, |r| r.at_s);
    let span_s = (replayed.last().map_or(0.0, |r| r.at_s) - first_s).max(1e-9);
    let time_factor = (replayed.len().max(2) - 1) as f64 / span_s / requests_per_s;
    let mut fitting =
        Fitting { recorded: recorded.len(), warm_up, token_factor, time_factor, clipped: 0 };
    let mut known: HashSet<u64> = HashSet::new();
    for request in &recorded[..warm_up] {
        known.extend(&request.blocks);
    }
    let mut requests = Vec::new();
    for request in replayed {
        let arrival_s = (request.at_s - first_s) * time_factor;
        if arrival_s >= duration_s {
            break;
        }
        let hits = request.blocks.iter().take_while(|block| known.contains(block)).count();
        known.extend(&request.blocks);
        let reused_share =
            (hits as f64 * f64::from(MOONCAKE_BLOCK_TOKENS) / f64::from(request.tokens)).min(1.0);
        let scaled = (f64::from(request.tokens) * token_factor).round().max(16.0);
        fitting.clipped += usize::from(scaled > f64::from(tokens_max));
        let tokens = scaled.min(f64::from(tokens_max)) as u32;
        let reused = (f64::from(tokens) * reused_share) as u32;
        // Nearly all requests share the first block, a system prompt. The second block identifies a
        // conversation, whose blocks are in the same place.
        let prefix = request.blocks.get(usize::from(hits > 1)).copied().unwrap_or_default();
        requests.push(Request { arrival_s, tokens, reused: reused.min(tokens - 1), prefix });
    }
    (requests, fitting)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    fn file(name: &str, content: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        (folder, path)
    }

    const MOONCAKE: &str = r#"{"timestamp": 1000, "input_length": 1100, "output_length": 5}
{"timestamp": 3000, "input_length": 1600, "output_length": 5, "hash_ids": [0, 1, 3, 4]}
{"timestamp": 5000, "input_length": 512, "output_length": 5, "hash_ids": [9]}
"#;

    #[test]
    fn mooncake_is_read_gzipped_or_not() {
        let (_folder, plain) = file("t.jsonl", MOONCAKE.as_bytes());
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(MOONCAKE.as_bytes()).unwrap();
        let (_folder, gzipped) = file("t.jsonl.gz", &encoder.finish().unwrap());
        let recorded = read(&plain).unwrap();
        assert_eq!(recorded, read(&gzipped).unwrap());
        assert_eq!(recorded.len(), 3);
        assert_eq!(recorded[1].at_s, 2.0);
        assert_eq!(recorded[1].blocks, [0, 1, 3, 4]);
    }

    #[test]
    fn what_has_no_end_is_refused() {
        let device = read(Path::new("/dev/zero")).unwrap_err().to_string();
        assert!(device.contains("it is a device"), "{device}");
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(b"{").unwrap();
        for _ in 0..32 {
            encoder.write_all(&[b'7'; 1 << 20]).unwrap();
        }
        let (_folder, endless) = file("t.jsonl.gz", &encoder.finish().unwrap());
        let found = read(&endless).unwrap_err().to_string();
        assert!(found.contains("line 1") && found.contains("longer than"), "{found}");
    }

    #[test]
    fn azure_is_read_and_its_times_are_relative() {
        let (_folder, path) = file(
            "t.csv",
            b"TIMESTAMP,ContextTokens,GeneratedTokens\n\
              2023-11-16 23:59:59.5000000,4808,10\n2023-11-17 00:00:01.0000000,3180,8\n",
        );
        let recorded = read(&path).unwrap();
        assert_eq!(recorded[0].tokens, 4808);
        assert!((recorded[1].at_s - 1.5).abs() < 1e-3);
    }

    #[test]
    fn a_line_that_is_no_request_is_named() {
        let (_folder, path) = file("t.jsonl", b"{\"timestamp\": 1}\n");
        let message = read(&path).unwrap_err().to_string();
        assert!(message.contains("line 1"), "{message}");
        let (_folder, path) =
            file("t.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\nnever,1,1\n");
        assert!(read(&path).unwrap_err().to_string().contains("line 2"));
    }

    #[test]
    fn fitting_keeps_reuse_and_reaches_the_wanted_rate_and_mean() {
        let recorded: Vec<Recorded> = (0..400_u32)
            .map(|i| Recorded {
                at_s: f64::from(i) * 3.0,
                tokens: 5120,
                blocks: (0..5)
                    .map(|b| u64::from(i % 7) * 100 + b)
                    .chain((0..5).map(|b| 1_000_000 + u64::from(i) * 10 + b))
                    .collect(),
            })
            .collect();
        let (requests, fitting) = fit(&recorded, 10.0, 5.0, 2000.0, 8192);
        assert_eq!(fitting.warm_up, 100);
        assert!((48..=52).contains(&requests.len()), "{}", requests.len());
        assert!(requests.iter().all(|r| r.tokens == 2000 && r.reused == 1000));
        assert_eq!(requests[0].prefix, requests[7].prefix);
        assert_ne!(requests[0].prefix, requests[1].prefix);
    }
}
