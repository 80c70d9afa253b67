//! The Qwen-Bailian traces (alibaba-edu/qwen-bailian-usagetraces-anon; Wang et al., *KVCache Cache
//! in the Wild*, ATC '25), one JSON object per line:
//!
//! ```text
//! {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521,
//!  "output_length": 132, "type": "text", "turn": 2, "hash_ids": [1089, 1090, 1091]}
//! ```
//!
//! `timestamp` is in seconds; `hash_ids` has one id for each 16 tokens of the prompt. A line covers
//! its whole context, earlier turns included, so `chat_id`, `parent_chat_id`, `type` and `turn` say
//! nothing that is needed here and are passed over. An id is the hash of its 16 tokens alone: the
//! same tokens after another prefix have the same id. Such ids are told apart, see `draft`.

use std::path::Path;

use super::jsonl::{self, Format};
use super::{Requests, WorkloadError};

/// Tokens of a block.
pub const BLOCK_TOKENS: u32 = 16;

/// Reads a trace. Arrivals are as recorded, from 0.
///
/// # Errors
/// See [`WorkloadError`].
pub fn read(path: &Path) -> Result<Requests, WorkloadError> {
    let format = Format {
        block_tokens: BLOCK_TOKENS,
        unit_s: 1.0,
        unit: "seconds",
    };
    jsonl::read(path, &format)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{message, reading};
    use super::*;

    const LINES: &str = r#"{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 132, "type": "text", "turn": 1, "hash_ids": [7, 8, 9]}
{"chat_id": 2, "parent_chat_id": 1, "timestamp": 61.214, "input_length": 64, "output_length": 20, "type": "text", "turn": 2, "hash_ids": [7, 8, 11, 9]}
{"chat_id": 3, "parent_chat_id": -1, "timestamp": 62, "input_length": 33, "output_length": 1, "type": "file", "turn": 1, "hash_ids": [8, 9]}
"#;

    #[test]
    fn ids_count_only_with_the_prefix_before_them() {
        let requests = reading(read, LINES.as_bytes()).unwrap();
        assert_eq!(requests.block_tokens, 16);
        assert_eq!(requests.list[1].arrival, laxity_policy::Time(100_000_000));
        // 9 after 7, 8, 11 is not the 9 after 7, 8; 8 at the start is not the 8 after 7.
        assert_eq!(requests.blocks, [0, 1, 2, 0, 1, 3, 4, 5, 6, 7]);
        assert_eq!(requests.distinct_blocks, 8);
    }

    #[test]
    fn another_format_is_not_taken_for_this_one() {
        let line =
            r#"{"timestamp": 3, "input_length": 6758, "output_length": 5, "hash_ids": [0, 1]}"#;
        let message = message(read, line.as_bytes());
        assert!(
            message.contains("`hash_ids` has 2 ids; expected 423"),
            "{message}"
        );
    }
}
