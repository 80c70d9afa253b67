//! `laxity cluster watch`: events as they come, a line each; with `--json`, an object each
//! (NDJSON).

use std::io::{self, ErrorKind, Write};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use laxity_wire::v1::{WatchKind, WatchRequest};
use laxity_wire::view::Event;

use super::client::{Coordinator, refused};
use super::tables;

/// Arguments of `laxity cluster watch`.
#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// Only these kinds, separated by commas; all without it
    #[arg(long, value_name = "KINDS", value_delimiter = ',')]
    kinds: Vec<Kind>,
    #[command(flatten)]
    coordinator: Coordinator,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Hosts that come, go, are drained or taken back
    Hosts,
    /// Runs of admission, a summary a second
    Runs,
    /// Changes of the policy
    Policy,
}

pub(super) fn watch(args: &WatchArgs) -> Result<()> {
    let kinds = args.kinds.iter().map(|kind| match kind {
        Kind::Hosts => WatchKind::Hosts as i32,
        Kind::Runs => WatchKind::Runs as i32,
        Kind::Policy => WatchKind::Policy as i32,
    });
    let request = WatchRequest {
        kinds: kinds.collect(),
    };
    args.coordinator.run(async |client| {
        let mut operator = client.operator.clone();
        let mut events = client.answer(operator.watch(request)).await?;
        loop {
            match events.message().await {
                Ok(Some(event)) => {
                    if !put(&Event::from(&event), args.json)? {
                        return Ok(());
                    }
                }
                Ok(None) => {
                    bail!("the coordinator stopped; watch again when it, or another one, is back")
                }
                Err(status) => return Err(refused(&status)),
            }
        }
    })
}

/// Writes an event; false if nobody reads any more.
fn put(event: &Event, json: bool) -> Result<bool> {
    let line = if json {
        serde_json::to_string(event).context("cannot write this as JSON")?
    } else {
        line(event)
    };
    let mut out = io::stdout();
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error).context("cannot write to standard output"),
    }
}

fn line(event: &Event) -> String {
    match event {
        Event::Host {
            host,
            connected,
            drained,
        } => {
            let state = match (drained, connected) {
                (true, _) => "drained",
                (false, true) => "connected",
                (false, false) => "not connected",
            };
            format!("host    {} {state}", tables::clean(host))
        }
        Event::Run {
            batches,
            requests,
            pruned,
            infeasible,
            ranks_changed,
            took_ns,
            runs,
            ..
        } => {
            let mut line = format!(
                "run     {runs} runs, {batches} batches, {requests} requests, {pruned} pruned"
            );
            // Older coordinators leave these out.
            if *infeasible > 0 {
                line.push_str(&format!(", {infeasible} would be late"));
            }
            if *ranks_changed > 0 {
                line.push_str(&format!(", {ranks_changed} ranks changed"));
            }
            if *took_ns > 0 {
                line.push_str(&format!(", took {}", tables::span(*took_ns)));
            }
            line
        }
        Event::Policy(revision) => {
            let pairs = tables::policy(&revision.policy);
            let pairs: Vec<String> = pairs
                .iter()
                .map(|(key, value)| format!("{key}={value}"))
                .collect();
            format!(
                "policy  {}; {}",
                tables::revision_line(revision),
                pairs.join(" ")
            )
        }
        Event::Missed { events } => {
            format!("missed  {events} events: this terminal is too slow for them")
        }
        Event::Unknown => "unknown an event that this release does not know".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_whatever_is_in_it() {
        let host = Event::Host {
            host: "a\nb\u{1b}[31m".into(),
            connected: true,
            drained: false,
        };
        assert_eq!(line(&host), "host    a\\u{a}b\\u{1b}[31m connected");
        let json = serde_json::to_string(&host).expect("JSON");
        assert_eq!(json.lines().count(), 1, "{json}");
        assert!(json.starts_with("{\"event\":\"host\""), "{json}");
    }
}
