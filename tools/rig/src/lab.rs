//! The entry point of the lab: takes a configuration and returns a report.
//!
//! A program that calls [`run`] must call [`internal_call`] first in `main`, before it starts any
//! thread. The lab starts the same program again as the first process of its sandbox, as clients
//! and as helpers.

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{ExitCode, Stdio};
use std::str::FromStr as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use laxity_policy::PolicyKind;

use crate::config::{Engine, LabConfig};
use crate::controller::{Event, LabSpec, NONE, RunRecord};
use crate::error::LabError;
use crate::plan::{Asked, asking};
use crate::probe;
pub use crate::report::measure::LabReport;
use crate::report::measure::Machine;
use crate::sandbox::INTERNAL;
use crate::{client, collectives, controller, faults, foreign, report, sandbox, vllm, vm};

/// Number of requests that are played one by one to check the computed contention-free TTFT.
const VALIDATION_REQUESTS: usize = 10;

/// Returns a bar on standard error, or one that nobody sees.
pub(crate) fn progress_bar(shown: bool, length: u64, template: &str) -> ProgressBar {
    if !shown {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(length);
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}

fn check(config: &LabConfig) -> Result<(), LabError> {
    config.validate()?;
    for policy in config.policies.iter().filter(|policy| *policy != NONE) {
        let daemons = match config.engine {
            Engine::Vllm => vllm::daemon_policy(policy).0,
            Engine::Timed | Engine::Real => policy,
        };
        PolicyKind::from_str(daemons).map_err(|unknown| {
            let text = format!("policies: {unknown}; and `{NONE}`, for no daemon at all");
            LabError::Plan(text)
        })?;
    }
    Ok(())
}

/// Returns the requests that are played one by one before the policies: all if their TTFT is only
/// measured, otherwise a few that check the computed TTFT.
fn alone(config: &LabConfig, asked: &[Asked]) -> Vec<Asked> {
    let count = match config.engine {
        Engine::Timed if config.validate_ideal => VALIDATION_REQUESTS.min(asked.len()),
        Engine::Timed => return Vec::new(),
        _ => asked.len(),
    };
    // Steps through all requests, to include every host and both kinds of reuse.
    let step = (asked.len() / count).max(1);
    asked.iter().step_by(step).take(count).cloned().collect()
}

/// Runs the lab, with a progress bar on standard error if `progress` is set. The report says
/// whether answers differ between policies.
pub fn run(config: &LabConfig, progress: bool) -> Result<LabReport, LabError> {
    check(config)?;
    let bar = progress_bar(progress, 1000, "{prefix:>12} {bar:40} {msg}");
    bar.set_prefix("probing");
    let tools = probe::find(config)?;
    let asking = asking(config)?;
    let last_s = asking.asked.last().map_or(0.0, |a| a.arrival_ns as f64 / 1e9);
    let alone = alone(config, &asking.asked);
    let run = |label: &str, asked: &[Asked]| Shown {
        label: label.to_owned(),
        requests: asked.len(),
        last_s,
    };
    let plays_alone = !alone.is_empty();
    let first = plays_alone.then(|| run("one by one", &alone));
    let policies = config.policies.iter();
    let policies = policies.map(|policy| run(policy, &asking.asked));
    let runs: Vec<Shown> = first.into_iter().chain(policies).collect();
    let spec = LabSpec { config: config.clone(), asked: asking.asked.clone(), alone, tools };
    let mut records = play(&spec, &runs, &bar)?;
    bar.finish_and_clear();
    let alone = if plays_alone { records.remove(0) } else { RunRecord::default() };
    Ok(report::measure::report(config, &asking, &alone, &records, Machine::of_this()))
}

struct Shown {
    label: String,
    requests: usize,
    last_s: f64,
}

/// Starts the sandbox and returns the record of each run that its controller reports.
fn play(spec: &LabSpec, runs: &[Shown], bar: &ProgressBar) -> Result<Vec<RunRecord>, LabError> {
    let mut sandbox = sandbox::internal("enter")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(LabError::start("the sandbox"))?;
    // The lifeline is dropped when this function returns, which ends all processes of the sandbox.
    let lifeline = sandbox.stdin.take();
    let listen = || -> Result<Vec<RunRecord>, LabError> {
        let (Some(mut lifeline), Some(events)) = (lifeline, sandbox.stdout.take()) else {
            return Err(LabError::no_pipe());
        };
        // If the write fails, the sandbox ended, and its output below says why.
        let _ = lifeline.write_all(&crate::message::line(spec));
        let mut records = Vec::new();
        for line in BufReader::new(events).lines() {
            let line = line.map_err(LabError::system("listening to the sandbox"))?;
            let event: Event = serde_json::from_str(&line).map_err(|error| {
                LabError::unreadable("the sandbox speaks another version", error)
            })?;
            match event {
                Event::Progress { run, finished, elapsed_s } => {
                    show(bar, runs, run, finished, elapsed_s);
                }
                Event::Failed(message) => return Err(LabError::Inside(message)),
                Event::Measured(record) => records.push(*record),
            }
        }
        if records.len() < runs.len() {
            let how = format!("ended after {} of {} runs", records.len(), runs.len());
            return Err(LabError::program("the lab", how));
        }
        Ok(records)
    };
    let records = listen();
    sandbox.wait().map_err(LabError::system("waiting for the sandbox"))?;
    records
}

fn show(bar: &ProgressBar, runs: &[Shown], run: usize, finished: usize, elapsed_s: f64) {
    let Some(shown) = runs.get(run) else { return };
    let share = (elapsed_s / (shown.last_s + 1.0)).min(1.0);
    let of_all = (run as f64 + share) / runs.len() as f64;
    bar.set_prefix(shown.label.clone());
    bar.set_position((of_all * 1000.0) as u64);
    bar.set_message(format!("{finished}/{} requests", shown.requests));
}

/// Does this process's part if the lab itself started it. `main` must call this first.
pub fn internal_call() -> Option<ExitCode> {
    let mut args = std::env::args_os().skip(1);
    args.next().is_some_and(|first| first == INTERNAL).then(|| internal_main(args))
}

/// Handles a call of this program by the lab itself. `args` are the arguments after [`INTERNAL`].
fn internal_main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    let text = |index: usize| args.get(index).and_then(|arg| arg.to_str()).unwrap_or_default();
    let outcome = match text(0) {
        "enter" => match sandbox::enter() {
            Ok(code) => return ExitCode::from(u8::try_from(code).unwrap_or(1)),
            Err(error) => {
                let event = Event::Failed(error.to_string());
                std::io::stdout()
                    .write_all(&crate::message::line(&event))
                    .map_err(LabError::system("telling the lab"))
            }
        },
        "init" => return ExitCode::from(u8::try_from(controller::init()).unwrap_or(1)),
        "probe" => probe::try_all(),
        "vm-keeper" => vm::keeper::keep(),
        "guest" => vm::guest::first_process(),
        "guest-job" => vm::guest::job_process(),
        "client" => run_client(text(1)),
        "collectives" => collectives::run(text(1)),
        "foreign" => foreign::send(&[text(1), text(2), text(3), text(4)]),
        part if part.starts_with("faults-") => faults::internal(part, &args[1..]),
        "in" if args.len() >= 3 => Err(sandbox::become_program(text(1), &args[2], &args[3..])),
        other => Err(LabError::Plan(format!("`{other}` is no part of the lab; use `laxity lab`"))),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run_client(host: &str) -> Result<(), LabError> {
    let host = host.parse().map_err(|error| LabError::unreadable("a host's number", error))?;
    sandbox::enter_host(&crate::fabric::namespace(host))?;
    client::run()
}
