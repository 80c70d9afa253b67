//! Azure's LLM inference traces (Azure/AzurePublicDataset), csv with the columns `TIMESTAMP`,
//! `ContextTokens` and `GeneratedTokens`; times of 2023 as `2023-11-16 18:17:03.9799600`, of 2024
//! with a zone, as `2024-05-10 00:00:00.009930+00:00`.
//!
//! Nothing is known of prefixes: requests have no blocks, nothing is reused. A row with a context
//! of 0 tokens asks for no prefill and is left out.

use std::path::Path;

use super::calendar::instant_ns;
use super::draft::Draft;
use super::number::{count, unfit};
use super::table::Table;
use super::{Requests, WorkloadError};

/// Reads a trace. Arrivals are as recorded, from 0.
///
/// # Errors
/// See [`WorkloadError`].
pub fn read(path: &Path) -> Result<Requests, WorkloadError> {
    let mut draft = Draft::new(super::UNKNOWN_BLOCK_TOKENS);
    let mut table = Table::open(path, ["TIMESTAMP", "ContextTokens", "GeneratedTokens"])?;
    while let Some(row) = table.next()? {
        let taken = take(row);
        let (at_ns, prompt, output) = taken.map_err(|problem| table.wrong(problem))?;
        if prompt > 0 {
            let pushed = draft.push(at_ns, prompt, output, None);
            pushed.map_err(|problem| table.wrong(problem))?;
        }
    }
    draft.finish(path)
}

fn take([timestamp, context, generated]: [&str; 3]) -> Result<(i64, u32, u32), String> {
    let at_ns = instant_ns(timestamp).ok_or_else(|| {
        let expected = "a time such as 2023-11-16 18:17:03.9799600";
        unfit("TIMESTAMP", timestamp, expected)
    })?;
    Ok((
        at_ns,
        count("ContextTokens", context, 0)?,
        count("GeneratedTokens", generated, 0)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{message, reading};
    use super::*;

    #[test]
    fn both_formats_are_read() {
        let of_2023 = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n\
                       2023-11-16 23:59:59.5000000,4808,10\r\n2023-11-17 00:00:01.0000000,3180,8";
        let of_2024 = "\u{feff}TIMESTAMP,ContextTokens,GeneratedTokens\n\
                       2024-05-10 23:59:59.500000+00:00,4808,10\n2024-05-11 \
                       00:00:01+00:00,3180,8\n";
        for text in [of_2023, of_2024] {
            let requests = reading(read, text.as_bytes()).unwrap();
            assert_eq!(requests.list.len(), 2);
            assert_eq!(requests.list[0].prompt_tokens, 4808);
            assert_eq!(requests.list[1].output_tokens, 8);
            assert_eq!(requests.list[1].arrival, laxity_policy::Time(1_500_000_000));
            assert!(requests.blocks.is_empty());
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        let head = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59,4808,10\n";
        for (row, expected) in [
            (
                "never,1,1",
                "line 3: `TIMESTAMP` is never; expected a time such as 2023-11-16",
            ),
            (
                "2023-11-16 23:59:59,-3,1",
                "line 3: `ContextTokens` is -3; expected a whole number from 0 to 2^32-1",
            ),
            (
                "2023-11-16 23:59:59,1,",
                "line 3: `GeneratedTokens` is empty; expected",
            ),
            ("2023-11-16 23:59:59,1", "line 3: has 2 fields; expected 3"),
        ] {
            let message = message(read, format!("{head}{row}\n").as_bytes());
            assert!(message.contains(expected), "{message}");
        }
        let message = message(read, b"TIMESTAMP,Tokens\n1,2\n");
        assert!(
            message.contains("line 1: there is no column `ContextTokens`; found TIMESTAMP, Tokens"),
            "{message}"
        );
    }

    #[test]
    fn line_numbers_are_those_of_the_file() {
        let head = "TIMESTAMP,ContextTokens,GeneratedTokens";
        let good = "2023-11-16 18:17:03.97,4808,10";
        let bad = "2023-11-16 18:17:04.97,many,10";
        for (text, line) in [
            (format!("{head}\r\n{good}\r\n{bad}\r\n"), 3),
            (format!("{head}\n{good}\n\n\n{bad}\n"), 5),
            (
                format!("{head}\r\n{good}\r\n2023-11-16 18:17:04.97,3\r\n"),
                3,
            ),
        ] {
            let message = message(read, text.as_bytes());
            assert!(
                message.contains(&format!("line {line}:")),
                "{line}: {message}"
            );
        }
    }
}
