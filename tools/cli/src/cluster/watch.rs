//! `laxity cluster watch`: prints events as they come, one line each, or one JSON object each with
//! `--json` (NDJSON).

use std::io::{self, ErrorKind, Write};

use clap::{Args, ValueEnum};
use laxity_cli::output::OutputError;
use laxity_wire::v1::watch_event::Event;
use laxity_wire::v1::{WatchKind, WatchRequest};

use super::client::CoordinatorArgs;
use super::error::ClusterError;
use super::tables;

#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// Print only these kinds of events, separated by commas [default: all]
    #[arg(long, value_name = "KINDS", value_delimiter = ',')]
    kinds: Vec<WatchTarget>,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum WatchTarget {
    /// A host connects, disconnects, is drained or put back
    Hosts,
    /// A summary of admission's runs, once a second
    Runs,
    /// The policy changes
    Policy,
}

pub(super) fn watch(args: &WatchArgs) -> Result<(), ClusterError> {
    let kinds = args.kinds.iter().map(|kind| match kind {
        WatchTarget::Hosts => WatchKind::Hosts as i32,
        WatchTarget::Runs => WatchKind::Runs as i32,
        WatchTarget::Policy => WatchKind::Policy as i32,
    });
    let request = WatchRequest { kinds: kinds.collect() };
    args.coordinator.run(async |client| {
        let mut operator = client.operator.clone();
        let mut events = client.answer(operator.watch(request)).await?;
        loop {
            match events.message().await {
                Ok(Some(event)) => {
                    if !put(event.event.as_ref(), args.coordinator.json)? {
                        return Ok(());
                    }
                }
                Ok(None) => return Err(ClusterError::Stopped),
                Err(status) => return Err(ClusterError::answered(&status)),
            }
        }
    })
}

/// Writes an event. Returns false if the reader has closed the pipe.
fn put(event: Option<&Event>, json: bool) -> Result<bool, OutputError> {
    let line = match event {
        None if json => r#"{"event":"unknown"}"#.to_owned(),
        None => "unknown an event that this release does not know".to_owned(),
        Some(event) if json => serde_json::to_string(event).map_err(OutputError::Json)?,
        Some(event) => line(event),
    };
    let mut out = io::stdout();
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(OutputError::Stdout(error)),
    }
}

fn line(event: &Event) -> String {
    match event {
        Event::Host(host) => {
            let state = match (host.drained, host.connected) {
                (true, _) => "drained",
                (false, true) => "connected",
                (false, false) => "not connected",
            };
            format!("host    {} {state}", tables::clean(&host.host))
        }
        Event::Run(run) => {
            let mut line = format!(
                "run     {} runs, {} batches, {} requests, {} pruned",
                run.runs, run.batches, run.requests, run.pruned
            );
            // Older coordinators do not send these.
            if run.infeasible > 0 {
                line.push_str(&format!(", {} would be late", run.infeasible));
            }
            if run.ranks_changed > 0 {
                line.push_str(&format!(", {} ranks changed", run.ranks_changed));
            }
            if run.took_ns > 0 {
                line.push_str(&format!(", took {}", tables::span(run.took_ns)));
            }
            line
        }
        Event::Policy(revision) => {
            let pairs = tables::pairs(revision);
            let pairs: Vec<String> =
                pairs.iter().map(|(key, value)| format!("{key}={value}")).collect();
            format!("policy  {}; {}", tables::revision_line(revision), pairs.join(" "))
        }
        Event::Missed(events) => {
            format!("missed  {events} events: this terminal is too slow for them")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use laxity_wire::v1::HostChanged;

    #[test]
    fn an_event_is_one_line_whatever_is_in_it() {
        let host = Event::Host(HostChanged {
            host: "a\nb\u{1b}[31m".into(),
            connected: true,
            drained: false,
        });
        assert_eq!(line(&host), "host    a\\u{a}b\\u{1b}[31m connected");
        let json = serde_json::to_string(&host).expect("JSON");
        assert_eq!(json.lines().count(), 1, "{json}");
        assert!(json.starts_with("{\"event\":\"host\""), "{json}");
    }
}
