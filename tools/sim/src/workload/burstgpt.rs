//! The BurstGPT traces (HPMLL/BurstGPT), csv with at least the columns `Timestamp` (seconds),
//! `Request tokens` and `Response tokens`. `Session ID`, `Elapsed time`, `Model`, `Total tokens`
//! and `Log Type`, as far as a release has them, are passed over.
//!
//! A request that failed has a response of 0 tokens. It is kept: it arrived and had to be
//! prefilled, and what is simulated here is the demand, not what that service managed to serve. It
//! is taken to generate the one token that every served request does. The releases `without_fails`
//! have none. A row with 0 request tokens asks for no prefill and is left out.
//!
//! Nothing is known of prefixes: requests have no blocks, nothing is reused. A session's later
//! turns surely share some of their prompts, but the trace does not say how much.

use std::path::Path;

use super::draft::Draft;
use super::number::{count, nanoseconds, times, unfit};
use super::table::Table;
use super::{Requests, WorkloadError};

/// Reads a trace. Arrivals are as recorded, from 0.
///
/// # Errors
/// See [`WorkloadError`].
pub fn read(path: &Path) -> Result<Requests, WorkloadError> {
    let mut draft = Draft::new(super::UNKNOWN_BLOCK_TOKENS);
    let mut table = Table::open(path, ["Timestamp", "Request tokens", "Response tokens"])?;
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

fn take([timestamp, request, response]: [&str; 3]) -> Result<(i64, u32, u32), String> {
    let number = timestamp.parse().ok();
    let at_ns = number.and_then(|number| nanoseconds(number, 1.0));
    let at_ns = at_ns.ok_or_else(|| unfit("Timestamp", timestamp, &times(1.0, "seconds")))?;
    Ok((
        at_ns,
        count("Request tokens", request, 0)?,
        count("Response tokens", response, 0)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{message, reading};
    use super::*;

    #[test]
    fn releases_with_more_or_fewer_columns_are_read() {
        let short = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
                     5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087.0,230,1317,API log\n";
        let long = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total \
            tokens,Log Type\n\
                    5,,1.5,ChatGPT,472,18,490,Conversation log\n45.5,7,2,GPT-4,1087,230,1317,API \
                    log\n";
        for text in [short, long] {
            let requests = reading(read, text.as_bytes()).unwrap();
            assert_eq!(requests.list[0].prompt_tokens, 472);
            assert_eq!(requests.list[1].prompt_tokens, 1087);
            assert_eq!(
                requests.list[1].arrival,
                laxity_policy::Time(40_500_000_000)
            );
        }
    }

    #[test]
    fn failed_requests_are_demand_and_empty_ones_are_not() {
        let text = "Timestamp,Request tokens,Response tokens\n1,300,0\n2,0,5\n3,10,5\n";
        let requests = reading(read, text.as_bytes()).unwrap();
        let lengths = requests
            .list
            .iter()
            .map(|r| (r.prompt_tokens, r.output_tokens));
        assert_eq!(lengths.collect::<Vec<_>>(), [(300, 1), (10, 5)]);
    }

    #[test]
    fn what_is_wrong_is_said() {
        let head = "Timestamp,Request tokens,Response tokens\n";
        for (row, expected) in [
            (
                "x,1,1",
                "line 2: `Timestamp` is x; expected a number of seconds from 0 to 9e9",
            ),
            ("nan,1,1", "line 2: `Timestamp` is nan; expected"),
            (
                "1,1.5,1",
                "line 2: `Request tokens` is 1.5; expected a whole number",
            ),
        ] {
            let message = message(read, format!("{head}{row}\n").as_bytes());
            assert!(message.contains(expected), "{message}");
        }
    }
}
