//! Traces in CSV format. Columns are found by their names in the first line, in any order and case,
//! so that additional columns do no harm.
//!
//! * *Azure's LLM inference traces* (Azure/AzurePublicDataset): `TIMESTAMP`, `ContextTokens` and
//!   `GeneratedTokens`. Times are `2023-11-16 18:17:03.9799600`, or with a zone in 2024:
//!   `2024-05-10 00:00:00.009930+00:00`.
//! * *BurstGPT* (HPMLL/BurstGPT): `Timestamp` (seconds), `Request tokens` and `Response tokens`.
//!   Failed requests have a response of 0 tokens. They are kept with 1 token, because their prompts
//!   were part of the demand.
//!
//! Fields are not quoted. Rows with a prompt of 0 tokens are skipped. The formats have no prefixes,
//! so requests have no blocks and nothing is reused.

use std::path::Path;
use std::time::UNIX_EPOCH;

use super::draft::TraceDraft;
use super::field::{count, nanoseconds, shown, unfit};
use super::input::Lines;
use super::{Requests, WorkloadError};

pub(super) struct CsvFormat {
    columns: [&'static str; 3],
    /// Function that converts a time to nanoseconds.
    instant_ns: fn(&str, &str) -> Result<i64, String>,
}

pub(super) const AZURE: CsvFormat = CsvFormat {
    columns: ["TIMESTAMP", "ContextTokens", "GeneratedTokens"],
    instant_ns: |field, found| {
        let instant = humantime::parse_rfc3339_weak(found.trim_end_matches("+00:00")).ok();
        let since = instant.and_then(|instant| instant.duration_since(UNIX_EPOCH).ok());
        let ns = since.and_then(|since| i64::try_from(since.as_nanos()).ok());
        ns.ok_or_else(|| unfit(field, found, "a time such as 2023-11-16 18:17:03.9799600"))
    },
};

pub(super) const BURSTGPT: CsvFormat = CsvFormat {
    columns: ["Timestamp", "Request tokens", "Response tokens"],
    instant_ns: |field, found| nanoseconds(field, found, 1.0),
};

/// Reads a trace. Arrivals are as recorded, counted from the first.
pub(super) fn read(path: &Path, format: &CsvFormat) -> Result<Requests, WorkloadError> {
    let mut draft = TraceDraft::new(super::UNKNOWN_BLOCK_TOKENS);
    let mut lines = Lines::open(path)?;
    let Some(header) = lines.next()?.map(fields) else { return draft.finish(path) };
    let header: Vec<String> = header.into_iter().map(str::to_owned).collect();
    let mut places = [0; 3];
    for (place, column) in places.iter_mut().zip(format.columns) {
        let found = header.iter().position(|name| name.eq_ignore_ascii_case(column));
        *place = found.ok_or_else(|| {
            let names = shown(&header.join(", "));
            lines.wrong(format!("there is no column `{column}`; found {names}"))
        })?;
    }
    while let Some(row) = lines.next()? {
        let pushed =
            take(&fields(row), header.len(), places, format).and_then(|taken| match taken {
                (_, 0, _) => Ok(()),
                (at_ns, prompt, output) => draft.push(at_ns, prompt, output, None),
            });
        pushed.map_err(|problem| lines.wrong(problem))?;
    }
    draft.finish(path)
}

fn fields(line: &str) -> Vec<&str> {
    line.split(',').map(str::trim).collect()
}

fn take(
    row: &[&str],
    columns: usize,
    places: [usize; 3],
    format: &CsvFormat,
) -> Result<(i64, u32, u32), String> {
    if row.len() != columns {
        let found = row.len();
        return Err(format!("has {found} fields; expected {columns} as in the first line"));
    }
    let [time, prompt, output] = places.map(|place| row[place]);
    Ok((
        (format.instant_ns)(format.columns[0], time)?,
        count(format.columns[1], prompt, 0)?,
        count(format.columns[2], output, 0)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{azure, burstgpt, message, reading};

    #[test]
    fn both_formats_of_azure_are_read() {
        let of_2023 = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n\
                       2023-11-16 23:59:59.5000000,4808,10\r\n2023-11-17 00:00:01.0000000,3180,8";
        let of_2024 = "\u{feff}TIMESTAMP,ContextTokens,GeneratedTokens\n\
                       2024-05-10 23:59:59.500000+00:00,4808,10\n2024-05-11 \
                       00:00:01+00:00,3180,8\n";
        for text in [of_2023, of_2024] {
            let requests = reading(azure, text.as_bytes()).unwrap();
            assert_eq!(requests.list.len(), 2);
            assert_eq!(requests.list[0].prompt_tokens, 4808);
            assert_eq!(requests.list[1].output_tokens, 8);
            assert_eq!(requests.list[1].arrival, laxity_policy::Time(1_500_000_000));
            assert!(requests.blocks.is_empty());
        }
    }

    #[test]
    fn releases_of_burstgpt_with_more_or_fewer_columns_are_read() {
        let short = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
                     5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087.0,0,1317,API log\n";
        let long = "Response tokens,Timestamp,Session ID,Elapsed time,Model,Request tokens\n\
                    18,5,,1.5,ChatGPT,472\n0,45.5,7,2,GPT-4,1087\n5,46,7,2,GPT-4,0\n";
        for text in [short, long] {
            let requests = reading(burstgpt, text.as_bytes()).unwrap();
            let found: Vec<(u64, u32, u32)> = requests
                .list
                .iter()
                .map(|r| (r.arrival.0, r.prompt_tokens, r.output_tokens))
                .collect();
            assert_eq!(found, [(0, 472, 18), (40_500_000_000, 1087, 1)]);
        }
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        let (azure_head, burstgpt_head) = (
            "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 23:59:59,4808,10\r\n\n",
            "Timestamp,Request tokens,Response tokens\n1,2,3\n\n",
        );
        for (row, expected) in [
            ("never,1,1", "`TIMESTAMP` is never; expected a time such as 2023-11-16"),
            ("2023-02-29 00:00:00,1,1", "`TIMESTAMP` is 2023-02-29 00:00:00; expected"),
            (
                "2023-11-16 23:59:59,-3,1",
                "`ContextTokens` is -3; expected a whole number from 0 to 2^32-1",
            ),
            ("2023-11-16 23:59:59,1,", "`GeneratedTokens` is empty; expected"),
            ("2023-11-16 23:59:59,1", "has 2 fields; expected 3"),
        ] {
            let message = message(azure, format!("{azure_head}{row}\n").as_bytes());
            assert!(message.contains(&format!("line 4: {expected}")), "{message}");
        }
        for (row, expected) in [
            ("x,1,1", "`Timestamp` is x; expected a number of seconds from 0 to 9e9"),
            ("nan,1,1", "`Timestamp` is nan; expected"),
            ("1,1.5,1", "`Request tokens` is 1.5; expected a whole number"),
        ] {
            let message = message(burstgpt, format!("{burstgpt_head}{row}\n").as_bytes());
            assert!(message.contains(&format!("line 4: {expected}")), "{message}");
        }
        let message = message(azure, b"TIMESTAMP,Tokens\n1,2\n");
        assert!(
            message.contains("line 1: there is no column `ContextTokens`; found TIMESTAMP, Tokens"),
            "{message}"
        );
    }
}
