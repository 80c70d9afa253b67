//! Runs a plan: all points, variants and seeds, on several threads, and continues where an earlier
//! run was cut off.
//!
//! Which thread runs what, and in which order runs end, leaves no trace in the report: a run
//! depends on its scenario alone, and results are put in the order of the plan. Every outcome
//! passes through its JSON text once, so that one that was read back from the journal is the same
//! to the last bit as one that was simulated just now.

mod fingerprint;
mod host;
mod journal;
mod progress;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

pub(crate) use host::thousands;
pub use host::{RunTiming, Timing};
pub use journal::JournalError;

use crate::outcome::Outcome;
use crate::plan::{Job, Plan, PlanError, Point};
use crate::report::{Failure, Report, Run};
use crate::scenario::Scenario;
use fingerprint::{Fingerprints, scenario_id};
use journal::{Entry, Journal, JournalLine};
use progress::Progress;

/// The simulation of one scenario. Must depend on nothing else.
pub type Simulate<'a> = dyn Fn(&Scenario) -> Result<Outcome, String> + Sync + 'a;

/// How a plan is run.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// Threads.
    pub jobs: NonZeroUsize,
    /// Folder in which finished runs are kept, and looked for first.
    pub out: Option<&'a Path>,
    /// Show a progress bar on standard error.
    pub progress: bool,
}

impl Default for Options<'_> {
    /// As many threads as there are processors; nothing is kept or shown.
    fn default() -> Self {
        Self {
            jobs: thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
            out: None,
            progress: false,
        }
    }
}

/// A plan that cannot be run at all. (A single run that fails is part of the report.)
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A combination of its values makes no sense.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Results cannot be kept.
    #[error(transparent)]
    Journal(#[from] JournalError),
}

/// Stack of a thread that simulates: that of a program's main thread.
const STACK_BYTES: usize = 8 << 20;

/// Runs all of `plan` that is not done yet.
///
/// # Errors
/// The plan makes no sense, or results cannot be kept. What was done until then is kept.
pub fn run(
    plan: &Plan,
    simulate: &Simulate<'_>,
    options: &Options<'_>,
) -> Result<Report, RunError> {
    let (start, points, jobs) = (Instant::now(), plan.points(), plan.jobs()?);
    let (journal, kept) = match options.out {
        Some(folder) => Journal::open(folder).map(|(journal, kept)| (Some(journal), kept))?,
        None => (None, BTreeMap::new()),
    };
    let mut fingerprints = Fingerprints::default();
    let mut tasks: Vec<Task<'_>> = Vec::new();
    let mut done: Vec<Option<Done>> = Vec::new();
    for (index, job) in jobs.iter().enumerate() {
        let fingerprint = fingerprints.of(&job.scenario);
        match kept.get(&fingerprint) {
            Some(entry) => done.push(Some(Done::kept(entry))),
            None => {
                done.push(None);
                tasks.push(Task {
                    index,
                    job,
                    fingerprint,
                });
            }
        }
    }
    let resumed = jobs.len() - tasks.len();
    let work = Work {
        plan,
        points: &points,
        simulate,
        tasks: &tasks,
        next: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        progress: Progress::new(jobs.len(), resumed, options.progress),
        state: Mutex::new(State {
            done,
            journal,
            events: 0,
            failed: 0,
            broken: None,
        }),
    };
    let threads = options.jobs.get().min(tasks.len());
    thread::scope(|scope| {
        for _ in 0..threads {
            thread::Builder::new()
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, || work.go())
                .expect("the system gives a thread");
        }
    });
    work.progress.finish();
    let state = work
        .state
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    if let Some(error) = state.broken {
        return Err(error.into());
    }
    let wall_s = start.elapsed().as_secs_f64();
    let timing = Timing {
        processor: host::processor(),
        jobs: options.jobs.get(),
        wall_s,
        simulated: tasks.len(),
        resumed,
        events: state.events,
        events_per_s: state.events as f64 / wall_s.max(1e-9),
        peak_rss_bytes: host::peak_rss_bytes(),
        runs: Vec::new(),
    };
    Ok(report(plan, &jobs, state.done, timing))
}

/// The report of what a folder holds, without running anything: also of a plan that was cut off,
/// and of results of other versions.
///
/// # Errors
/// The plan makes no sense, or the folder cannot be read.
pub fn collect(plan: &Plan, folder: &Path) -> Result<Report, RunError> {
    let jobs = plan.jobs()?;
    let kept = journal::by_scenario(folder)?;
    let done: Vec<Option<Done>> = jobs
        .iter()
        .map(|job| kept.get(&scenario_id(&job.scenario)).map(Done::kept))
        .collect();
    let timing = Timing {
        resumed: done.iter().flatten().count(),
        ..Timing::default()
    };
    Ok(report(plan, &jobs, done, timing))
}

/// A run that is to be done.
struct Task<'a> {
    /// Among the plan's runs.
    index: usize,
    job: &'a Job,
    fingerprint: String,
}

/// A run that ended.
struct Done {
    result: Result<Outcome, String>,
    wall_s: f64,
    resumed: bool,
}

impl Done {
    fn kept(entry: &Entry) -> Self {
        Self {
            result: Ok(entry.outcome.clone()),
            wall_s: entry.wall_s,
            resumed: true,
        }
    }
}

/// What the threads share.
struct Work<'a> {
    plan: &'a Plan,
    points: &'a [Point],
    simulate: &'a Simulate<'a>,
    tasks: &'a [Task<'a>],
    /// The next task; nothing else is passed on with it.
    next: AtomicUsize,
    /// Results can no longer be kept.
    stop: AtomicBool,
    progress: Progress,
    state: Mutex<State>,
}

struct State {
    done: Vec<Option<Done>>,
    journal: Option<Journal>,
    events: u64,
    failed: usize,
    broken: Option<JournalError>,
}

impl Work<'_> {
    /// What each thread does: one task after the other, in order.
    fn go(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            let Some(task) = self.tasks.get(self.next.fetch_add(1, Ordering::Relaxed)) else {
                return;
            };
            let start = Instant::now();
            let result = outcome(self.simulate, &task.job.scenario);
            self.end(task, result, start.elapsed().as_secs_f64());
        }
    }

    fn end(&self, task: &Task<'_>, result: Result<(Outcome, String), String>, wall_s: f64) {
        // Nothing in here panics half-way: a poisoned state is a whole one.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = &mut *state;
        match &result {
            Ok((outcome, text)) => {
                state.events += outcome.events;
                let at: Vec<(&str, &str)> = self
                    .plan
                    .at(&self.points[task.job.point])
                    .map(|(axis, choice)| (axis.key(), choice.name.as_str()))
                    .collect();
                let line = JournalLine {
                    fingerprint: &task.fingerprint,
                    scenario_id: &scenario_id(&task.job.scenario),
                    at: &at,
                    variant: &self.plan.variants[task.job.variant].name,
                    seed: task.job.scenario.seed,
                    wall_s,
                    scenario: &task.job.scenario,
                    outcome: text,
                };
                let kept = state.journal.as_mut().map(|journal| journal.append(&line));
                if let Some(Err(error)) = kept {
                    self.stop.store(true, Ordering::Relaxed);
                    state.broken.get_or_insert(error);
                }
            }
            // Failures are not kept: the next attempt tries again.
            Err(_) => state.failed += 1,
        }
        state.done[task.index] = Some(Done {
            result: result.map(|(outcome, _)| outcome),
            wall_s,
            resumed: false,
        });
        self.progress.advance(state.events, state.failed);
    }
}

/// One run: its outcome by way of its JSON text, and the text. A panic is a failure of this run
/// alone.
fn outcome(simulate: &Simulate<'_>, scenario: &Scenario) -> Result<(Outcome, String), String> {
    let outcome =
        catch_unwind(AssertUnwindSafe(|| simulate(scenario))).unwrap_or_else(|panic| {
            let said = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied());
            Err(format!("panicked: {}", said.unwrap_or("without a word")))
        })?;
    let text = serde_json::to_string(&outcome).map_err(|error| error.to_string())?;
    // JSON has no NaN and no infinity: they were written as null, which is no number.
    let outcome =
        serde_json::from_str(&text).map_err(|error| format!("gave what is no number: {error}"))?;
    Ok((outcome, text))
}

/// Puts what ended in the order of the plan.
fn report(plan: &Plan, jobs: &[Job], done: Vec<Option<Done>>, mut timing: Timing) -> Report {
    let (mut runs, mut failures, mut missing) = (Vec::new(), Vec::new(), 0);
    for (job, done) in jobs.iter().zip(done) {
        let (point, variant, seed) = (job.point, job.variant, job.scenario.seed);
        let Some(done) = done else {
            missing += 1;
            continue;
        };
        match done.result {
            Ok(outcome) => {
                timing.runs.push(RunTiming {
                    point,
                    variant: plan.variants[variant].name.clone(),
                    seed,
                    wall_s: done.wall_s,
                    events_per_s: outcome.events as f64 / done.wall_s.max(1e-9),
                    resumed: done.resumed,
                });
                runs.push(Run {
                    point,
                    variant,
                    seed,
                    outcome,
                });
            }
            Err(problem) => failures.push(Failure {
                point,
                variant,
                scenario: job.scenario.clone(),
                problem,
            }),
        }
    }
    Report {
        plan: plan.clone(),
        points: plan.points(),
        runs,
        failures,
        missing,
        timing,
    }
}
