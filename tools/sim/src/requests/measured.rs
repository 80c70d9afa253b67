//! Iterations that were measured, to train a predictor on (`laxity sim train-latency`): from a table (CSV), or from the record that
//! the real engine keeps (`laxity-engine --record`, one JSON object a line).
//!
//! A table has a header. Columns:
//!
//! | column | what it is |
//! |---|---|
//! | `prefill_tokens` | prompt tokens that were computed |
//! | `prefix` | tokens before them whose KV was there |
//! | `decodes` | requests that computed one token each |
//! | `context` | tokens that those attended to, in all |
//! | `ms` | how long it took, host work included |
//! | `chunks` | optional: prompts that the tokens were of, 1 if left out |
//! | `pairs` | optional: pairs of prompt tokens and tokens that each attends to, where there were several chunks; else from `prefix` |
//!
//! In a record, an iteration is a plan and the event that it is done. What was cancelled meanwhile was computed all the same.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader};
use std::path::{Path, PathBuf};

use laxity_requests::iteration::{Event, Plan};
use laxity_requests::latency::Composition;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::predictor::Timed;

/// Measured iterations that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MeasuredError {
    /// The file cannot be read.
    #[error("{}: {cause}", .file.display())]
    File {
        /// Which.
        file: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// A column is missing, or there are too many.
    #[error("{}: {wrong}; a table begins with a header that names prefill_tokens, prefix, decodes, context and ms, and may name chunks and pairs", .file.display())]
    Header {
        /// Which.
        file: PathBuf,
        /// What is wrong.
        wrong: String,
    },
    /// A line makes no sense.
    #[error("{}, line {line}: {wrong}", .file.display())]
    Line {
        /// Which file.
        file: PathBuf,
        /// Which line of it, from 1.
        line: u64,
        /// What is wrong, and what is expected.
        wrong: String,
    },
}

/// A row of a table.
#[derive(Deserialize)]
struct Row {
    prefill_tokens: u32,
    prefix: u32,
    decodes: u32,
    context: u64,
    ms: f64,
    chunks: Option<u32>,
    pairs: Option<u64>,
}

impl Row {
    fn timed(&self) -> Result<Timed, String> {
        if self.prefill_tokens == 0 && self.decodes == 0 {
            return Err(
                "neither prefill_tokens nor decodes: an iteration computes something".into(),
            );
        }
        let ns = self.ms * 1e6;
        // Not a number isn't either. An hour is no iteration: most likely another unit.
        if !(1.0..=3.6e12).contains(&ns) {
            return Err(format!(
                "ms is {}; expected milliseconds, above 0 and below an hour",
                self.ms
            ));
        }
        if self.context < u64::from(self.decodes) {
            return Err(format!(
                "context is {} of {} decodes; each attends to itself at least, and context is the sum",
                self.context, self.decodes
            ));
        }
        let chunks = self.chunks.unwrap_or(1);
        let mut of = Composition::default();
        if self.prefill_tokens > 0 {
            if chunks == 0 || chunks > self.prefill_tokens {
                return Err(format!(
                    "{chunks} chunks of {} tokens; expected one for each prompt that tokens were of",
                    self.prefill_tokens
                ));
            }
            of = of.with_chunk(self.prefix, self.prefill_tokens);
            of.chunks = chunks;
            of.prefill_pairs = self.pairs.unwrap_or(of.prefill_pairs);
        }
        of.decodes = self.decodes;
        of.decode_context = self.context;
        Ok(Timed { of, ns: ns as u64 })
    }
}

/// Reads a table.
///
/// # Errors
/// If it cannot be read, or a line makes no sense.
pub fn table(file: &Path) -> Result<Vec<Timed>, MeasuredError> {
    let opened = File::open(file).map_err(|cause| unreadable(file, cause))?;
    let mut reader = csv::ReaderBuilder::new()
        .trim(csv::Trim::All)
        .from_reader(BufReader::new(opened));
    let header = |wrong: String| MeasuredError::Header {
        file: file.to_owned(),
        wrong,
    };
    let named = reader
        .headers()
        .map_err(|cause| header(cause.to_string()))?
        .clone();
    for needed in ["prefill_tokens", "prefix", "decodes", "context", "ms"] {
        if !named.iter().any(|name| name == needed) {
            return Err(header(format!("no column {needed}")));
        }
    }
    let mut rows = Vec::new();
    let mut record = csv::StringRecord::new();
    loop {
        let line = reader.position().line();
        let wrong = |wrong: String| MeasuredError::Line {
            file: file.to_owned(),
            line,
            wrong,
        };
        let more = reader.read_record(&mut record);
        if !more.map_err(|cause| wrong(plain(&cause)))? {
            return Ok(rows);
        }
        let line = record.position().map_or(line, csv::Position::line);
        let wrong = |wrong: String| MeasuredError::Line {
            file: file.to_owned(),
            line,
            wrong,
        };
        let row: Row = record
            .deserialize(Some(&named))
            .map_err(|cause| wrong(cell(&cause, &named)))?;
        rows.push(row.timed().map_err(wrong)?);
    }
}

/// What is wrong with a row as such.
fn plain(error: &csv::Error) -> String {
    match error.kind() {
        csv::ErrorKind::UnequalLengths {
            expected_len, len, ..
        } => format!("{len} columns; the header has {expected_len}"),
        csv::ErrorKind::Utf8 { .. } => "no text".to_owned(),
        _ => error.to_string(),
    }
}

/// What is wrong with a cell.
fn cell(error: &csv::Error, header: &csv::StringRecord) -> String {
    match error.kind() {
        csv::ErrorKind::Deserialize { err, .. } => {
            let column = err
                .field()
                .and_then(|field| header.get(usize::try_from(field).ok()?));
            format!("{}: {}", column.unwrap_or("a column"), err.kind())
        }
        _ => plain(error),
    }
}

fn unreadable(file: &Path, cause: io::Error) -> MeasuredError {
    MeasuredError::File {
        file: file.to_owned(),
        cause,
    }
}

/// A line of a record, as far as it matters here.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Begin(IgnoredAny),
    Event { event: Event },
    Reserve(IgnoredAny),
    Plan { plan: Option<Plan> },
    Refusal(IgnoredAny),
}

/// Reads a record of the real engine. What was under way when it ends is left out.
///
/// # Errors
/// If it cannot be read, or a line is none of a record.
pub fn record(file: &Path) -> Result<Vec<Timed>, MeasuredError> {
    let opened = File::open(file).map_err(|cause| unreadable(file, cause))?;
    let mut rows = Vec::new();
    let mut planned: Option<Composition> = None;
    for (line, text) in (1_u64..).zip(BufReader::new(opened).lines()) {
        let text = text.map_err(|cause| unreadable(file, cause))?;
        let wrong = |wrong: String| MeasuredError::Line {
            file: file.to_owned(),
            line,
            wrong,
        };
        let parsed = serde_json::from_str(&text).map_err(|cause| {
            wrong(format!(
                "{cause}; expected a line of a record as laxity-engine --record keeps it"
            ))
        })?;
        match parsed {
            Line::Begin(_) if line > 1 => {
                return Err(wrong("a record begins once".to_owned()));
            }
            Line::Begin(_) => (),
            _ if line == 1 => {
                return Err(wrong("a record begins with its settings".to_owned()));
            }
            Line::Plan { plan } => {
                if let Some(plan) = plan {
                    let of = plan.composition();
                    planned = (!of.is_empty()).then_some(of);
                }
            }
            Line::Event {
                event: Event::Done { took, .. },
            } => {
                // Without a plan it was one that gave blocks back only.
                if let Some(of) = planned.take() {
                    rows.push(Timed { of, ns: took.0 });
                }
            }
            Line::Event { .. } | Line::Reserve(_) | Line::Refusal(_) => (),
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        std::fs::write(file.path(), text).expect("written");
        file
    }

    #[test]
    fn a_table_of_iterations_is_read_with_and_without_the_columns_that_may_be_left_out() {
        let of = Composition::default().with_chunk(100, 50).with_decode(9);
        let text = "prefill_tokens,prefix,decodes,context,ms\n50,100,1,10,2.5\n";
        let timed = Timed { of, ns: 2_500_000 };
        assert_eq!(table(file(text).path()).expect("sound"), [timed]);
        let text = "ms, chunks, pairs, decodes, context, prefix, prefill_tokens, note\n\
                    1, 3, 777, 0, 0, 0, 50, x\n0.5,,,2,64,0,0,\n";
        let read = table(file(text).path()).expect("sound");
        assert_eq!((read[0].of.chunks, read[0].of.prefill_pairs), (3, 777));
        assert_eq!((read[1].of.chunks, read[1].of.decode_context), (0, 64));
    }

    #[test]
    fn a_line_that_makes_no_sense_is_answered_with_its_place_and_what_is_expected() {
        const HEADER: &str = "prefill_tokens,prefix,decodes,context,ms\n5,0,0,0,1\n";
        for (text, says) in [
            ("prefill_tokens,prefix,decodes,ms\n", "no column context"),
            ("", "no column prefill_tokens"),
            ("5,0,0,0,fast\n", "line 3: ms: "),
            ("-5,0,0,0,1\n", "line 3: prefill_tokens: "),
            ("5,0,0,1\n", "line 3: 4 columns; the header has 5"),
            ("0,0,0,0,1\n", "line 3: neither prefill_tokens nor decodes"),
            ("5,0,0,0,0\n", "line 3: ms is 0; expected milliseconds"),
            ("5,0,0,0,NaN\n", "line 3: ms is NaN"),
            ("5,0,0,0,5e9\n", "below an hour"),
            ("5,0,4,3,1\n", "line 3: context is 3 of 4 decodes"),
        ] {
            let whole = if says.starts_with("no column") {
                text.to_owned()
            } else {
                format!("{HEADER}{text}")
            };
            let error = table(file(&whole).path()).expect_err(says).to_string();
            assert!(error.contains(says), "{error}");
        }
        let missing = table(Path::new("/no/such/table.csv")).expect_err("there is none");
        assert!(
            missing.to_string().starts_with("/no/such/table.csv: "),
            "{missing}"
        );
    }

    const RECORD: &str = r#"{"begin":{"settings":{"policy":"fcfs"},"room":{"blocks":9,"block_tokens":16}}}
{"plan":{"at":1,"plan":null}}
{"plan":{"at":2,"plan":{"drops":[],"chunks":[{"request":1,"prefix":8,"tokens":4,"last":true}],"steps":[{"request":2,"context":9}]}}}
{"reserve":{"at":3,"request":7,"tokens":3,"granted":true}}
{"event":{"at":4,"event":{"cancelled":1}}}
{"event":{"at":5,"event":{"done":{"took":1500,"finished":[1]}}}}
{"plan":{"at":6,"plan":{"drops":[],"chunks":[],"steps":[{"request":2,"context":10}]}}}
"#;

    #[test]
    fn a_record_of_the_engine_gives_the_iterations_that_ended() {
        let of = Composition::default().with_chunk(8, 4).with_decode(9);
        let timed = Timed { of, ns: 1_500 };
        assert_eq!(record(file(RECORD).path()).expect("sound"), [timed]);
    }

    #[test]
    fn what_is_no_record_is_said_with_its_line() {
        let twice = format!("{RECORD}{RECORD}");
        let begun = RECORD.split_once('\n').expect("lines").1;
        for (text, says) in [
            (begun, "line 1: a record begins with its settings"),
            (&twice, "line 8: a record begins once"),
            ("5,0,0\n", "line 1: "),
        ] {
            let error = record(file(text).path()).expect_err(says).to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
