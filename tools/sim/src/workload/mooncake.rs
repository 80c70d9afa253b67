//! Mooncake's traces (kvcache-ai/Mooncake, `FAST25-release/traces`), one JSON object per line:
//!
//! ```text
//! {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}
//! ```
//!
//! `timestamp` is in ms; `hash_ids` has one id for each 512 tokens of the prompt, the last block
//! possibly partial, and an id stands for the whole prefix up to it. In the published conversation
//! trace all 12 031 lines have exactly `input_length / 512` ids, rounded up, all requests share the
//! first block, and requests come in lumps of about ten every 3 s, which is how they were sampled:
//! prefer `arrivals = "poisson"` unless that is what should be looked at.

use std::path::Path;

use super::jsonl::{self, Format};
use super::{Requests, WorkloadError};

/// Tokens of a block.
pub const BLOCK_TOKENS: u32 = 512;

/// Reads a trace. Arrivals are as recorded, from 0.
///
/// # Errors
/// See [`WorkloadError`].
pub fn read(path: &Path) -> Result<Requests, WorkloadError> {
    let format = Format {
        block_tokens: BLOCK_TOKENS,
        unit_s: 1e-3,
        unit: "milliseconds",
    };
    jsonl::read(path, &format)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{message, reading};
    use super::*;

    const LINES: &str = r#"{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 3000.5, "input_length": 1600, "output_length": 0, "hash_ids": [0, 1, 3, 4]}

{"timestamp": 2000, "input_length": 512, "output_length": 7, "hash_ids": [9], "more": {}}
"#;

    #[test]
    fn lines_are_read_and_sorted_and_their_ids_made_dense() {
        let requests = reading(read, LINES.as_bytes()).unwrap();
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
        let requests = reading(read, format!("{line}\n{line}").as_bytes()).unwrap();
        assert_eq!(requests.blocks, [0, 1, 0, 2]);
    }

    #[test]
    fn whole_numbers_may_be_written_as_fractions() {
        let line =
            r#"{"timestamp": 0, "input_length": 70.0, "output_length": 1e1, "hash_ids": [4]}"#;
        let requests = reading(read, line.as_bytes()).unwrap();
        assert_eq!(requests.list[0].prompt_tokens, 70);
        assert_eq!(requests.list[0].output_tokens, 10);
    }

    #[test]
    fn what_is_wrong_with_a_line_is_said() {
        let good = r#"{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [4]}"#;
        let wrong = |from: &str, to: &str| {
            let bad = good.replace(from, to);
            message(read, format!("{good}\n{bad}\n").as_bytes())
        };
        for (from, to, expected) in [
            (
                ": 10",
                ": -3",
                "line 2: `input_length` is -3; expected a whole number from 1 to 2^32-1",
            ),
            (
                ": 10",
                ": 0",
                "`input_length` is 0; expected a whole number from 1",
            ),
            (
                ": 10",
                ": 5000000000",
                "`input_length` is 5000000000; expected",
            ),
            (": 10", ": 10.5", "`input_length` is 10.5; expected a whole"),
            (
                ": 10",
                ": \"10\"",
                "`input_length` is \"10\"; expected a whole",
            ),
            (
                ": 1,",
                ": null,",
                "`output_length` is null; expected a whole number from 0",
            ),
            (
                ": 0",
                ": -1",
                "`timestamp` is -1; expected a number of milliseconds from 0",
            ),
            (
                ": 0",
                ": 1.7e18",
                "`timestamp` is 1.7e+18; expected a number of milliseconds",
            ),
            (
                "\"timestamp\"",
                "\"time\"",
                "`timestamp` is missing; expected an object with",
            ),
            (
                "[4]",
                "[4, -1]",
                "`hash_ids[1]` is -1; expected a whole number",
            ),
            ("[4]", "{}", "`hash_ids` is an object; expected a list"),
            (
                "[4]",
                "[4, 5, 6]",
                "`hash_ids` has 3 ids; expected 1 for 10 tokens in blocks of 512",
            ),
            (
                "}",
                "",
                "is not JSON (EOF while parsing an object at column",
            ),
            (
                good,
                "[1, 2]",
                "is a list; expected an object with `timestamp`",
            ),
        ] {
            let message = wrong(from, to);
            assert!(message.contains("line 2: "), "{message}");
            assert!(message.contains(expected), "{message}");
        }
    }
}
