//! Traces with one JSON object per line: `timestamp`, `input_length`, `output_length` and
//! `hash_ids`. Other fields are ignored.
//!
//! * *Mooncake's traces* (kvcache-ai/Mooncake, `FAST25-release/traces`): times in ms, and an id for
//!   each 512 tokens of the prompt, which stands for the whole prefix. In the published
//!   conversation trace about ten requests arrive together every 3 s, due to sampling. `arrivals =
//!   "poisson"` avoids this effect.
//! * *The Qwen-Bailian traces* (alibaba-edu/qwen-bailian-usagetraces-anon; Wang et al., *KVCache
//!   Cache in the Wild*, ATC '25): times in seconds, and an id for each 16 tokens. A line covers
//!   its whole context, including earlier turns. An id is the hash of its 16 tokens alone, and
//!   `draft` distinguishes equal tokens after different prefixes.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::draft::TraceDraft;
use super::field::{count, nanoseconds};
use super::input::Lines;
use super::{Requests, WorkloadError};

pub(super) struct JsonlFormat {
    block_tokens: u32,
    /// Unit of `timestamp`, in seconds.
    unit_s: f64,
}

pub(super) const MOONCAKE: JsonlFormat = JsonlFormat { block_tokens: 512, unit_s: 1e-3 };

pub(super) const QWEN: JsonlFormat = JsonlFormat { block_tokens: 16, unit_s: 1.0 };

#[derive(Deserialize)]
struct TraceLine {
    timestamp: Value,
    input_length: Value,
    output_length: Value,
    hash_ids: Vec<u64>,
}

/// Reads a file. Arrivals are as recorded, counted from the first.
pub(super) fn read(path: &Path, format: &JsonlFormat) -> Result<Requests, WorkloadError> {
    let mut draft = TraceDraft::new(format.block_tokens);
    let mut lines = Lines::open(path)?;
    while let Some(text) = lines.next()? {
        let pushed = push(text, format, &mut draft);
        pushed.map_err(|problem| lines.wrong(problem))?;
    }
    draft.finish(path)
}

fn push(text: &str, format: &JsonlFormat, draft: &mut TraceDraft) -> Result<(), String> {
    let line: TraceLine = serde_json::from_str(text).map_err(|error| {
        let reason = error.to_string().replace(" at line 1 column", " at column");
        format!(
            "{reason}; expected an object with `timestamp`, `input_length`, `output_length` and \
             `hash_ids`"
        )
    })?;
    let at_ns = nanoseconds("timestamp", &line.timestamp.to_string(), format.unit_s)?;
    let prompt = count("input_length", &line.input_length.to_string(), 1)?;
    let output = count("output_length", &line.output_length.to_string(), 0)?;
    draft.push(at_ns, prompt, output, Some(&line.hash_ids))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{message, mooncake, qwen, reading};

    const LINES: &str = r#"
{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 3000.5, "input_length": 1600.0, "output_length": 0, "hash_ids": [0, 1, 3, 4]}

{"timestamp": 2000, "input_length": 512, "output_length": 7, "hash_ids": [9], "more": {}}
"#;

    #[test]
    fn lines_are_read_and_sorted_and_their_ids_made_dense() {
        let requests = reading(mooncake, LINES.as_bytes()).unwrap();
        assert_eq!(requests.block_tokens, 512);
        let arrivals: Vec<u64> = requests.list.iter().map(|r| r.arrival.0).collect();
        assert_eq!(arrivals, [0, 1_000_000_000, 2_000_500_000]);
        let blocks = |i: usize| requests.blocks_of(&requests.list[i]);
        assert_eq!(blocks(0), [0, 1, 2]);
        assert_eq!(blocks(1), [3]);
        assert_eq!(blocks(2), [0, 1, 4, 5]);
        assert_eq!(requests.distinct_blocks, 6);
        assert_eq!(requests.list[2].prompt_tokens, 1600);
        assert_eq!(requests.list[2].output_tokens, 1);
    }

    #[test]
    fn a_partial_block_may_lack_its_id_and_then_shares_nothing() {
        let line = r#"{"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [4]}"#;
        let requests = reading(mooncake, format!("{line}\n{line}").as_bytes()).unwrap();
        assert_eq!(requests.blocks, [0, 1, 0, 2]);
    }

    #[test]
    fn ids_of_qwen_count_only_with_the_prefix_before_them() {
        let line = |time: &str, tokens: u32, ids: &str| {
            format!(
                r#"{{"chat_id": 1, "type": "text", "timestamp": {time}, "input_length": {tokens},
                "output_length": 132, "hash_ids": {ids}}}"#
            )
            .replace('\n', " ")
        };
        let lines = [
            line("61.114", 40, "[7, 8, 9]"),
            line("61.214", 64, "[7, 8, 11, 9]"),
            line("62", 33, "[8, 9]"),
        ];
        let requests = reading(qwen, lines.join("\n").as_bytes()).unwrap();
        assert_eq!(requests.block_tokens, 16);
        assert_eq!(requests.list[1].arrival, laxity_policy::Time(100_000_000));
        // The ids 9 after 7, 8, 11 and 9 after 7, 8 differ, as do 8 at the start and 8 after 7.
        assert_eq!(requests.blocks, [0, 1, 2, 0, 1, 3, 4, 5, 6, 7]);
        assert_eq!(requests.distinct_blocks, 8);
    }

    #[test]
    fn what_is_wrong_with_a_line_is_said() {
        let good = r#"{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [4]}"#;
        for (from, to, expected) in [
            (": 10", ": -3", "`input_length` is -3; expected a whole number from 1 to 2^32-1"),
            (": 10", ": 0", "`input_length` is 0; expected a whole number from 1"),
            (": 10", ": 5000000000", "`input_length` is 5000000000; expected"),
            (": 10", ": 10.5", "`input_length` is 10.5; expected a whole"),
            (": 10", ": \"10\"", "`input_length` is \"10\"; expected a whole"),
            (": 0", ": -1", "`timestamp` is -1; expected a number of milliseconds from 0"),
            (": 0", ": 1.7e18", "`timestamp` is 1.7e+18; expected a number of milliseconds"),
            ("\"timestamp\"", "\"time\"", "missing field `timestamp` at column"),
            ("[4]", "[4, -1]", "invalid value: integer `-1`, expected u64"),
            ("[4]", "{}", "invalid type: map, expected a sequence"),
            ("[4]", "[4, 5, 6]", "`hash_ids` has 3 ids; expected 1 for 10 tokens in blocks of 512"),
            ("}", "", "EOF while parsing an object at column"),
            (good, "[1, 2]", "expected an object with `timestamp`"),
        ] {
            let bad = good.replace(from, to);
            let message = message(mooncake, format!("{good}\n{bad}\n").as_bytes());
            assert!(message.contains("line 2: "), "{message}");
            assert!(message.contains(expected), "{message}");
        }
    }
}
