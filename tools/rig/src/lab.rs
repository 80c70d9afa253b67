//! The lab, as its callers see it: a configuration in, a report out.
//!
//! A program that calls [`run`] has to begin its `main` with [`internal_call`], before it starts
//! any thread: the lab runs this same program again as the first process of its sandbox, as
//! workers and as helpers.

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::str::FromStr as _;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use indicatif::{ProgressBar, ProgressStyle};
use laxity_policy::PolicyKind;

pub use crate::config::{Engine, LabConfig, ModelConfig, WorkloadSource};
use crate::controller::{Event, LabSpec, NONE, Play, Task};
use crate::engine::controller::EngineSpec;
use crate::engine::plan::asking;
use crate::plan::{self, PlannedRequest};
use crate::probe;
pub use crate::probe::{CannotRun, Findings};
pub use crate::report::engine::EngineReport;
pub use crate::report::measure::LabReport;
use crate::report::measure::{self, Machine};
pub use crate::sandbox::INTERNAL;
use crate::trace::{self, Fitting};
use crate::workload::{self, AGENT, CONVERSATION, Request};
use crate::{controller, engine, report, sandbox, vm, worker};

/// Requests that are played one by one to check the analytic contention-free TTFT.
const VALIDATION_REQUESTS: usize = 10;

/// A bar on standard error, or nothing.
fn progress_bar(shown: bool) -> ProgressBar {
    if !shown {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(1000);
    if let Ok(style) = ProgressStyle::with_template("{prefix:>12} {bar:40} {msg}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}

/// The requests of a run, placed, and how they came to be.
#[derive(Clone, Debug)]
pub struct Arrivals {
    /// As generated or read.
    pub requests: Vec<Request>,
    /// With place and deadline.
    pub plan: Vec<PlannedRequest>,
    /// How a recording was fitted.
    pub fitting: Option<Fitting>,
}

/// Makes the requests that arrive at so many a second within so many seconds.
type Source = dyn Fn(f64, f64) -> (Vec<Request>, Option<Fitting>);

/// Makes the arrivals of a configuration. The same configuration gives the same arrivals.
///
/// # Errors
/// The request file cannot be used, or nothing arrives within the duration.
pub fn arrivals(config: &LabConfig) -> anyhow::Result<Arrivals> {
    // The rate that offers a certain load depends on the requests: take a long look at them.
    const SAMPLE_RATE: f64 = 100.0;
    const SAMPLE_S: f64 = 50.0;
    const WINDOW_FITS: usize = 4;
    let (duration, longest) = (config.duration_s, config.tokens_max);
    let make: Box<Source> = match &config.workload {
        WorkloadSource::File(path) => {
            let recorded = trace::read(path)?;
            Box::new(move |rate, seconds| {
                let mean = CONVERSATION.tokens_mean;
                let (requests, fitting) = trace::fit(&recorded, rate, seconds, mean, longest);
                (requests, Some(fitting))
            })
        }
        built_in => {
            let agent = *built_in == WorkloadSource::Agent;
            let what = if agent { AGENT } else { CONVERSATION };
            let seed = config.seed;
            Box::new(move |rate, s| (workload::synthesise(&what, seed, rate, s, longest), None))
        }
    };
    let rate = config.requests_per_second.unwrap_or_else(|| {
        let mut rate = plan::rate_for_load(config, &make(SAMPLE_RATE, SAMPLE_S).0);
        // What arrives in a short window is not the average, of a bursty recording least of all:
        // move towards the rate at which just these requests offer the load, so that seeds compare.
        for _ in 0..WINDOW_FITS {
            let offered = plan::offered_load(config, &make(rate, duration).0);
            rate *= (config.load / offered.max(1e-3)).clamp(0.5, 2.0);
        }
        rate
    });
    let (requests, fitting) = make(rate, duration);
    if requests.is_empty() {
        bail!("nothing arrives in {duration} s: raise the load, the rate or the duration");
    }
    let plan = plan::route(&requests, config);
    Ok(Arrivals {
        requests,
        plan,
        fitting,
    })
}

/// Checks a configuration for the replay, or for `laxity-engine`.
fn check(config: &LabConfig, replay: bool) -> anyhow::Result<()> {
    config.validate()?;
    if (config.engine == Engine::Replay) != replay {
        bail!(
            "this is the other engine's configuration: {:?}",
            config.engine
        );
    }
    for policy in config.policies.iter().filter(|policy| *policy != NONE) {
        PolicyKind::from_str(policy).map_err(|unknown| {
            anyhow!("policies: {unknown}; and `{NONE}`, for no daemon at all")
        })?;
    }
    Ok(())
}

/// Runs the lab with `laxity-engine`, with a progress bar on standard error if `progress` is set.
///
/// # Errors
/// As [`run`]. That answers differ between policies is in the report.
pub fn run_engine(config: &LabConfig, progress: bool) -> anyhow::Result<EngineReport> {
    check(config, false)?;
    let bar = progress_bar(progress);
    bar.set_prefix("probing");
    let tools = probe::find(config)?;
    let asking = asking(config)?;
    let last_s = asking
        .asked
        .last()
        .map_or(0.0, |a| a.arrival_ns as f64 / 1e9);
    let runs: Vec<Shown> = std::iter::once("one by one")
        .chain(config.policies.iter().map(String::as_str))
        .map(|label| Shown {
            label: label.to_owned(),
            requests: asking.asked.len(),
            last_s,
        })
        .collect();
    let task = Task::Engine(Box::new(EngineSpec {
        config: config.clone(),
        asked: asking.asked.clone(),
        tools,
    }));
    let mut records = play(&task, &runs, &bar, |event| match event {
        Event::Served(record) => Some(*record),
        _ => None,
    })?;
    bar.finish_and_clear();
    let alone = records.remove(0);
    Ok(report::engine::report(
        config,
        &asking,
        &alone,
        &records,
        Machine::of_this(),
    ))
}

/// Runs the lab, with a progress bar on standard error if `progress` is set.
///
/// # Errors
/// The configuration makes no sense, the machine lacks something ([`CannotRun`]), or a part of
/// the lab failed; the message says what to do.
pub fn run(config: &LabConfig, progress: bool) -> anyhow::Result<LabReport> {
    check(config, true)?;
    let bar = progress_bar(progress);
    bar.set_prefix("probing");
    let tools = probe::find(config)?;
    let arrivals = arrivals(config)?;
    let validation = Play {
        policy: NONE.to_owned(),
        plan: plan::one_by_one(&arrivals.plan, VALIDATION_REQUESTS),
    };
    let policies = config.policies.iter().map(|policy| Play {
        policy: policy.clone(),
        plan: arrivals.plan.clone(),
    });
    let runs: Vec<Play> = config
        .validate_ideal
        .then_some(validation)
        .into_iter()
        .chain(policies)
        .collect();
    let shown: Vec<Shown> = runs
        .iter()
        .enumerate()
        .map(|(index, play)| Shown {
            label: if config.validate_ideal && index == 0 {
                "one by one".to_owned()
            } else {
                play.policy.clone()
            },
            requests: play.plan.len(),
            last_s: play.plan.last().map_or(0.0, |r| r.arrival_ns as f64 / 1e9),
        })
        .collect();
    let task = Task::Replay(Box::new(LabSpec {
        config: config.clone(),
        runs: runs.clone(),
        tools,
    }));
    let mut records = play(&task, &shown, &bar, |event| match event {
        Event::Measured(record) => Some(*record),
        _ => None,
    })?;
    let ideal_check = config
        .validate_ideal
        .then(|| measure::ideal_check(&runs[0].plan, &records.remove(0)));
    bar.finish_and_clear();
    Ok(measure::report(
        config,
        &arrivals,
        &records,
        ideal_check,
        Machine::of_this(),
    ))
}

/// A run, as the bar shows it.
struct Shown {
    label: String,
    requests: usize,
    last_s: f64,
}

/// Starts the sandbox and listens to what its controller has to say: a record of each run.
fn play<R>(
    task: &Task,
    runs: &[Shown],
    bar: &ProgressBar,
    record: impl Fn(Event) -> Option<R>,
) -> anyhow::Result<Vec<R>> {
    let mut sandbox = sandbox::internal("enter")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting the sandbox")?;
    // Dropped when this function returns, which ends whatever is left in the sandbox.
    let lifeline = sandbox.stdin.take();
    let listen = || -> anyhow::Result<Vec<R>> {
        let (Some(mut lifeline), Some(events)) = (lifeline, sandbox.stdout.take()) else {
            bail!("the sandbox has no pipes");
        };
        // If it is gone already, what it said below tells why.
        let _ = lifeline.write_all(&crate::message::line(task));
        let mut records = Vec::new();
        for line in BufReader::new(events).lines() {
            match serde_json::from_str(&line?).context("the sandbox speaks another version")? {
                Event::Progress {
                    run,
                    finished,
                    elapsed_s,
                } => {
                    show(bar, runs, run, finished, elapsed_s);
                }
                Event::Failed(message) => bail!(message),
                event => records.extend(record(event)),
            }
        }
        if records.len() < runs.len() {
            bail!(
                "the lab ended after {} of {} runs",
                records.len(),
                runs.len()
            );
        }
        Ok(records)
    };
    let records = listen();
    sandbox.wait().context("waiting for the sandbox")?;
    records
}

fn show(bar: &ProgressBar, runs: &[Shown], run: usize, finished: usize, elapsed_s: f64) {
    let Some(shown) = runs.get(run) else {
        return;
    };
    let share = (elapsed_s / (shown.last_s + 1.0)).min(1.0);
    let of_all = (run as f64 + share) / runs.len() as f64;
    bar.set_prefix(shown.label.clone());
    bar.set_position((of_all * 1000.0) as u64);
    bar.set_message(format!("{finished}/{} requests", shown.requests));
}

/// What this machine has of what the lab needs.
#[must_use]
pub fn probe(config: &LabConfig) -> Findings {
    probe::findings(config)
}

/// Does this process's part if the lab itself started it. To be called first of all in `main`.
pub fn internal_call() -> Option<ExitCode> {
    let mut args = std::env::args_os().skip(1);
    args.next()
        .is_some_and(|first| first == INTERNAL)
        .then(|| internal_main(args))
}

/// The lab's own calls of this program: everything after [`INTERNAL`].
pub fn internal_main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    let text = |index: usize| {
        args.get(index)
            .and_then(|arg| arg.to_str())
            .unwrap_or_default()
    };
    let outcome = match text(0) {
        "enter" => match sandbox::enter() {
            Ok(code) => return ExitCode::from(u8::try_from(code).unwrap_or(1)),
            Err(error) => {
                let event = Event::Failed(format!("{error:#}"));
                std::io::stdout()
                    .write_all(&crate::message::line(&event))
                    .map_err(Into::into)
            }
        },
        "init" => return ExitCode::from(u8::try_from(controller::init()).unwrap_or(1)),
        "probe" => probe::try_all(),
        "vm-keeper" => vm::keeper::keep(),
        "guest" => vm::guest::first_process(),
        "guest-job" => vm::guest::job_process(),
        "worker" => run_worker(Path::new(text(1)), text(2)),
        "client" => run_client(text(1)),
        "in" if args.len() >= 3 => Err(sandbox::become_program(text(1), &args[2], &args[3..])),
        other => Err(anyhow::anyhow!(
            "`{other}` is no part of the lab; use `laxity lab`"
        )),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run_client(host: &str) -> anyhow::Result<()> {
    let host = host.parse().context("a host's number")?;
    sandbox::enter_host(&crate::fabric::namespace(host))?;
    engine::client::run()
}

fn run_worker(folder: &Path, host: &str) -> anyhow::Result<()> {
    let host = host.parse().context("a host's number")?;
    sandbox::enter_host(&crate::fabric::namespace(host))?;
    worker::run(folder, host)
}
