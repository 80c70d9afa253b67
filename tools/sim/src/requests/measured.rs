//! Measured iterations for training a predictor (`laxity sim train-latency`). They are read from a
//! CSV table, or from a record of the real engine (`laxity-engine --record`, one JSON object per
//! line).
//!
//! A table has a header with these columns:
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
//! In a record, an iteration is a plan and the event of its end. Iterations with a cancelled member
//! are skipped, as in the engine's own predictor. A failed iteration cancels all members, and its
//! time is meaningless.

use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use laxity_files::ReadError;
use laxity_requests::iteration::{Event, Plan};
use laxity_requests::latency::Composition;
use laxity_requests::request::RequestId;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::predictor::Timed;

/// Measured iterations that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MeasuredError {
    /// The file cannot be read.
    #[error("{}: {cause}", .file.display())]
    File {
        /// Path of the file.
        file: PathBuf,
        /// Reason why the file cannot be read.
        cause: ReadError,
    },
    /// A column is missing or unknown.
    #[error("{}: {wrong}; a table begins with a header that names prefill_tokens, prefix, decodes, \
        context and ms, and may name chunks and pairs", .file.display())]
    Header {
        /// Path of the file.
        file: PathBuf,
        /// What is wrong with the header.
        wrong: String,
    },
    /// A line of the file is invalid.
    #[error("{}, line {line}: {wrong}", .file.display())]
    Line {
        /// Path of the file.
        file: PathBuf,
        /// Line number, counted from 1.
        line: u64,
        /// What is wrong, and what is expected.
        wrong: String,
    },
}

/// One hour in nanoseconds, the longest valid iteration. A larger number probably has another unit.
const LONGEST_NS: u64 = 3_600_000_000_000;

/// Largest token count of an iteration's prompts, of a prefix, or of a context. No model supports
/// more, and products of larger numbers would overflow.
const TOKENS_MAX: u32 = 1 << 24;

/// Checks that a token count is within its bound.
fn bounded(what: &str, tokens: u64) -> Result<(), String> {
    if tokens > TOKENS_MAX.into() {
        return Err(format!("{what} is {tokens}; expected at most {TOKENS_MAX}"));
    }
    Ok(())
}

/// A row of a table: one measured iteration.
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
                "neither prefill_tokens nor decodes: an iteration computes something".into()
            );
        }
        bounded("prefill_tokens", self.prefill_tokens.into())?;
        bounded("prefix", self.prefix.into())?;
        let ns = self.ms * 1e6;
        // This also rejects NaN.
        if !(1.0..=LONGEST_NS as f64).contains(&ns) {
            return Err(format!(
                "ms is {}; expected milliseconds, above 0 and below an hour",
                self.ms
            ));
        }
        if self.context < u64::from(self.decodes) {
            return Err(format!(
                "context is {} of {} decodes; each attends to itself at least, and context is the \
                 sum",
                self.context, self.decodes
            ));
        }
        let chunks = self.chunks.unwrap_or(1);
        let mut of = Composition::default();
        if self.prefill_tokens > 0 {
            if chunks == 0 || chunks > self.prefill_tokens {
                return Err(format!(
                    "{chunks} chunks of {} tokens; expected one for each prompt that tokens were \
                     of",
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

/// Reads measured iterations from a CSV table.
///
/// # Errors
/// Returns an error if the file cannot be read or a line is invalid.
pub fn table(file: &Path) -> Result<Vec<Timed>, MeasuredError> {
    let opened = open(file)?;
    let mut reader =
        csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(BufReader::new(opened));
    let header = |wrong: String| MeasuredError::Header { file: file.to_owned(), wrong };
    let named = reader.headers().map_err(|cause| header(cause.to_string()))?.clone();
    for needed in ["prefill_tokens", "prefix", "decodes", "context", "ms"] {
        if !named.iter().any(|name| name == needed) {
            return Err(header(format!("no column {needed}")));
        }
    }
    let mut rows = Vec::new();
    let mut record = csv::StringRecord::new();
    loop {
        let line = reader.position().line();
        let wrong = |wrong: String| MeasuredError::Line { file: file.to_owned(), line, wrong };
        let more = reader.read_record(&mut record);
        if !more.map_err(|cause| wrong(plain(&cause)))? {
            return Ok(rows);
        }
        let line = record.position().map_or(line, csv::Position::line);
        let wrong = |wrong: String| MeasuredError::Line { file: file.to_owned(), line, wrong };
        let row: Row =
            record.deserialize(Some(&named)).map_err(|cause| wrong(cell(&cause, &named)))?;
        rows.push(row.timed().map_err(wrong)?);
    }
}

/// Describes an error of a row as a whole.
fn plain(error: &csv::Error) -> String {
    match error.kind() {
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
            format!("{len} columns; the header has {expected_len}")
        }
        csv::ErrorKind::Utf8 { .. } => "no text".to_owned(),
        _ => error.to_string(),
    }
}

/// Describes an error in a cell.
fn cell(error: &csv::Error, header: &csv::StringRecord) -> String {
    match error.kind() {
        csv::ErrorKind::Deserialize { err, .. } => {
            let column = err.field().and_then(|field| header.get(usize::try_from(field).ok()?));
            format!("{}: {}", column.unwrap_or("a column"), err.kind())
        }
        _ => plain(error),
    }
}

/// Longest table or record that is read, in bytes. A busy engine writes 10 GB in a week.
const BYTES_MAX: u64 = 10_000_000_000;
/// Longest line of a record, in bytes. The first line has the engine's settings and its forest.
const LINE_BYTES_MAX: u64 = 64 << 20;

fn open(file: &Path) -> Result<impl Read + use<>, MeasuredError> {
    let opened = laxity_files::open(file)
        .map_err(|cause| MeasuredError::File { file: file.to_owned(), cause })?;
    Ok(laxity_files::limited(opened, BYTES_MAX))
}

/// The used fields of a record's line.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum RecordLine {
    Begin(IgnoredAny),
    Event { event: Event },
    Reserve(IgnoredAny),
    Plan { plan: Option<Plan> },
    Refusal(IgnoredAny),
    Dispatch(IgnoredAny),
    Place(IgnoredAny),
}

/// Returns the composition of a plan, if its numbers are valid.
fn composition(plan: &Plan) -> Result<Composition, String> {
    let mut tokens = 0_u64;
    for chunk in &plan.chunks {
        bounded("the prefix of a chunk", chunk.prefix.into())?;
        tokens += u64::from(chunk.tokens);
    }
    bounded("the sum of the chunks' tokens", tokens)?;
    for step in &plan.steps {
        bounded("the context of a step", step.context.into())?;
    }
    Ok(plan.composition())
}

/// Reports whether a plan computes anything of a request.
fn computes(plan: &Plan, request: RequestId) -> bool {
    let mut chunks = plan.chunks.iter();
    let mut steps = plan.steps.iter();
    chunks.any(|chunk| chunk.request == request) || steps.any(|step| step.request == request)
}

/// Reads a record of the real engine. Iterations that are incomplete at its end are skipped.
///
/// # Errors
/// Returns an error if the file cannot be read or a line is invalid.
pub fn record(file: &Path) -> Result<Vec<Timed>, MeasuredError> {
    let opened = BufReader::new(open(file)?);
    let mut rows = Vec::new();
    let mut planned: Option<(Plan, Composition)> = None;
    for (line, text) in (1_u64..).zip(laxity_files::lines(opened, LINE_BYTES_MAX)) {
        let wrong = |wrong: String| MeasuredError::Line { file: file.to_owned(), line, wrong };
        let text = text.map_err(|cause| wrong(cause.to_string()))?;
        let parsed = serde_json::from_str(&text).map_err(|cause| {
            wrong(format!(
                "{cause}; expected a line of a record as laxity-engine --record keeps it"
            ))
        })?;
        match parsed {
            RecordLine::Begin(_) if line > 1 => {
                return Err(wrong("a record begins once".to_owned()));
            }
            RecordLine::Begin(_) => (),
            _ if line == 1 => {
                return Err(wrong("a record begins with its settings".to_owned()));
            }
            RecordLine::Plan { plan } => {
                if let Some(plan) = plan {
                    let of = composition(&plan).map_err(wrong)?;
                    planned = (!of.is_empty()).then_some((plan, of));
                }
            }
            RecordLine::Event { event: Event::Done { took, .. } } => {
                // An event without a plan belongs to an iteration that only released blocks or that
                // failed.
                if let Some((_, of)) = planned.take() {
                    if !(1..=LONGEST_NS).contains(&took.0) {
                        return Err(wrong(format!(
                            "took is {}; expected nanoseconds, above 0 and below an hour",
                            took.0
                        )));
                    }
                    rows.push(Timed { of, ns: took.0 });
                }
            }
            RecordLine::Event { event: Event::Cancelled(request) } => {
                planned.take_if(|(plan, _)| computes(plan, request));
            }
            RecordLine::Event { .. }
            | RecordLine::Reserve(_)
            | RecordLine::Refusal(_)
            | RecordLine::Dispatch(_)
            | RecordLine::Place(_) => (),
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
    fn what_has_no_end_is_refused() {
        for read in [table, record] {
            let error = read(Path::new("/dev/zero")).expect_err("no file").to_string();
            assert!(error.contains("it is a device"), "{error}");
        }
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
            (
                "4294967295,4294967295,0,0,1\n",
                "line 3: prefill_tokens is 4294967295; expected at most 16777216",
            ),
            ("5,16777217,0,0,1\n", "line 3: prefix is 16777217; expected at most 16777216"),
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
        assert!(missing.to_string().starts_with("/no/such/table.csv: "), "{missing}");
    }

    const RECORD: &str = concat!(
        r#"{"begin":{"settings":{"policy":"fcfs"},"room":{"blocks":9,"block_tokens":16}}}"#,
        "\n",
        r#"{"dispatch":{"at":0,"event":{"up":{"instance":0,"role":"decode"}}}}"#,
        "\n",
        r#"{"dispatch":{"at":1,"event":{"load":{"instance":0,"load":{"waiting":0,"running":1,"#,
        r#""decoding":1,"prefill_tokens":0,"decode_context":9,"blocks":9,"blocks_free":8},"#,
        r#""took":1500}}}}"#,
        "\n",
        r#"{"place":{"at":1,"decision":{"place":{"request":2,"instance":0}}}}"#,
        "\n",
        r#"{"place":{"at":1,"decision":null}}"#,
        "\n",
        r#"{"plan":{"at":1,"plan":null}}"#,
        "\n",
        r#"{"plan":{"at":2,"plan":{"drops":[],"chunks":[{"request":1,"prefix":8,"tokens":4,"#,
        r#""last":true}],"steps":[{"request":2,"context":9}]}}}"#,
        "\n",
        r#"{"reserve":{"at":3,"request":7,"tokens":3,"granted":true}}"#,
        "\n",
        r#"{"event":{"at":4,"event":{"cancelled":7}}}"#,
        "\n",
        r#"{"event":{"at":5,"event":{"done":{"took":1500,"finished":[1]}}}}"#,
        "\n",
        r#"{"plan":{"at":6,"plan":{"drops":[],"chunks":[],"steps":[{"request":2,"#,
        r#""context":10}]}}}"#,
        "\n",
    );

    #[test]
    fn a_record_of_the_engine_gives_the_iterations_that_ended() {
        let of = Composition::default().with_chunk(8, 4).with_decode(9);
        let timed = Timed { of, ns: 1_500 };
        assert_eq!(record(file(RECORD).path()).expect("sound"), [timed]);
    }

    #[test]
    fn an_iteration_that_failed_gives_nothing_and_the_one_after_it_does() {
        let failed = RECORD
            .replace(r#"{"cancelled":7}"#, r#"{"cancelled":2}"#)
            .replace(r#""took":1500,"finished":[1]"#, r#""took":30000000000,"finished":[]"#);
        let again = r#"{"event":{"at":7,"event":{"done":{"took":900,"finished":[]}}}}"#;
        let timed = Timed { of: Composition::default().with_decode(10), ns: 900 };
        assert_eq!(record(file(&[&failed, again].concat()).path()).expect("sound"), [timed]);
    }

    #[test]
    fn numbers_of_a_record_that_no_iteration_has_are_said_with_their_line() {
        for (number, put, says) in [
            ("\"took\":1500,\"f", "\"took\":0,\"f", "line 10: took is 0; expected nanoseconds"),
            ("\"took\":1500,\"f", "\"took\":3600000000001,\"f", "below an hour"),
            ("\"tokens\":4,", "\"tokens\":4294967295,", "line 7: the sum of the chunks' tokens"),
            ("\"prefix\":8,", "\"prefix\":16777217,", "line 7: the prefix of a chunk"),
            ("\"context\":9}", "\"context\":16777217}", "line 7: the context of a step"),
        ] {
            assert!(RECORD.contains(number), "{number}");
            let text = RECORD.replace(number, put);
            let error = record(file(&text).path()).expect_err(says).to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn what_is_no_record_is_said_with_its_line() {
        let twice = format!("{RECORD}{RECORD}");
        let begun = RECORD.split_once('\n').expect("lines").1;
        for (text, says) in [
            (begun, "line 1: a record begins with its settings"),
            (&twice, "line 12: a record begins once"),
            ("5,0,0\n", "line 1: "),
        ] {
            let error = record(file(text).path()).expect_err(says).to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
