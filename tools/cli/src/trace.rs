//! `laxity trace`: has the daemon record what it sees and does for a while, and writes a picture of it for
//! Perfetto or Chrome.

mod lives;
mod rows;
mod why;

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use laxity_quantity::Nanos;
use laxity_wire::ControlClient;
use laxity_wire::trace::TraceEvent;

use crate::host::Endpoint;
use crate::output;

pub(crate) const HELP: &str = "\
The file opens in https://ui.perfetto.dev (which keeps it on this machine) and in chrome://tracing. Each port has rows \
by stage, layer and level; each flow is a slice from its submit to its last completion, with how long it waited \
for leave, and each permit says why it came when it did. What the engine says is in rows of its own: the \
layers of each batch, the life of each request.

Examples:
  laxity trace --for 5s --out trace.json
  laxity trace --out trace.json -- python serve_one_batch.py";

/// Time between two looks for what was recorded.
const READ_EVERY: Duration = Duration::from_millis(100);

/// Arguments of `laxity trace`.
#[derive(Args)]
pub(crate) struct TraceArgs {
    #[command(flatten)]
    endpoint: Endpoint,
    /// How long, at most; with a command, until that ends
    #[arg(long = "for", value_name = "TIME", default_value = "10s")]
    length: Nanos,
    /// The file that is written
    #[arg(long, value_name = "FILE", default_value = "laxity-trace.json")]
    out: PathBuf,
    /// Events that may wait in the daemon until they are read here; beyond, they are lost and counted
    #[arg(long, value_name = "N", default_value_t = 1 << 18)]
    events: u64,
    /// End a trace that somebody else began, and write nothing
    #[arg(long, conflicts_with_all = ["length", "out", "command"])]
    stop: bool,
    /// A program to trace the daemon for as long as it runs
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

pub(crate) fn trace(args: &TraceArgs) -> Result<ExitCode> {
    let mut daemon = args.endpoint.connect()?;
    if args.stop {
        output::say(daemon.trace_stop()?)?;
        return Ok(ExitCode::SUCCESS);
    }
    output::check(&args.out)?;
    let nics = nics(&mut daemon)?;
    let length = Duration::from(args.length);
    // The daemon counts whole seconds; this end is exact.
    let seconds = length.as_secs_f64().ceil().max(1.0) as u64;
    daemon.trace_start(seconds, args.events)?;
    let (recorded, code) = record(&mut daemon, length, &args.command);
    // Whatever came of it here, nothing is recorded for nobody.
    let stopped = daemon.trace_stop();
    let mut events = recorded?;
    stopped?;
    let lost = rest(&mut daemon, &mut events)?;
    if events.is_empty() {
        bail!(
            "laxityd saw nothing in that time: no flow and no hint; `laxity status` says who is attached"
        );
    }
    let lives = lives::lives(&events);
    let picture = serde_json::to_vec(&rows::picture(&lives, &nics, lost))
        .context("cannot write the trace as JSON")?;
    output::replace(&args.out, &picture)?;
    let permits: usize = lives.flows.iter().map(|life| life.permits.len()).sum();
    let mut said = format!(
        "{} flows, {permits} permits, {} events in {:.3} s: {}",
        lives.flows.len(),
        events.len(),
        why::us(lives.last_ns - lives.first_ns) / 1e6,
        args.out.display()
    );
    if lost > 0 {
        said.push_str(&format!(
            "\n{lost} events found no room and are not in it; --events can be larger"
        ));
    }
    output::say(said)?;
    Ok(code)
}

fn nics(daemon: &mut ControlClient) -> Result<Vec<String>> {
    let status = daemon.status()?;
    let mut names = Vec::new();
    for port in status.ports {
        let index = usize::from(port.nic);
        if names.len() <= index {
            names.resize(index + 1, String::new());
        }
        names[index] = port.name;
    }
    Ok(names)
}

/// Reads until the time is over or the command is; what was read, and how the command ended.
fn record(
    daemon: &mut ControlClient,
    length: Duration,
    command: &[String],
) -> (Result<Vec<TraceEvent>>, ExitCode) {
    let mut child = None;
    if let Some((program, arguments)) = command.split_first() {
        match Command::new(program).args(arguments).spawn() {
            Ok(started) => child = Some(started),
            Err(error) => {
                let failed = Err(error).with_context(|| format!("cannot start {program}"));
                return (failed, ExitCode::FAILURE);
            }
        }
    }
    let mut code = ExitCode::SUCCESS;
    let mut events = Vec::new();
    let end = Instant::now() + length;
    loop {
        if let Some(running) = &mut child
            && let Ok(Some(status)) = running.try_wait()
        {
            // By a signal: as a shell has it.
            code = ExitCode::from(status.code().map_or(1, |code| code as u8));
            return (Ok(events), code);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        std::thread::sleep(left.min(READ_EVERY));
        match daemon.trace_read() {
            Ok(page) => {
                events.extend(page.events);
                if page.is_over {
                    break;
                }
            }
            Err(error) => return (Err(error.into()), code),
        }
    }
    if let Some(mut running) = child {
        // The trace is over, the program is not: it is not this command's to end.
        let _ = output::say("the time is over; waiting for the command to end");
        if let Ok(status) = running.wait() {
            code = ExitCode::from(status.code().map_or(1, |code| code as u8));
        }
    }
    (Ok(events), code)
}

/// What is left to read; how many were lost.
fn rest(daemon: &mut ControlClient, events: &mut Vec<TraceEvent>) -> Result<u64> {
    loop {
        let page = daemon.trace_read()?;
        events.extend(page.events);
        if page.is_over || page.is_empty {
            return Ok(page.lost);
        }
    }
}

#[cfg(test)]
mod tests;
