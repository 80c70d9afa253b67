//! Runs all points, variants and seeds of a plan on several threads. It continues where an earlier
//! run was interrupted.
//!
//! The report does not depend on the threads: a run depends only on its scenario, and results are
//! sorted in the order of the plan. Every outcome is converted to JSON and back once, so that
//! outcomes from the journal and new ones are identical to the last bit.

mod fingerprint;
mod host;
mod journal;
pub(crate) mod progress;

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
use journal::{Journal, JournalEntry, JournalLine};
use progress::Progress;

/// A function that simulates one scenario. Its result must depend on nothing else.
pub type Simulate<'a> = dyn Fn(&Scenario) -> Result<Outcome, String> + Sync + 'a;

#[derive(Clone, Copy, Debug)]
pub struct RunOptions<'a> {
    pub jobs: NonZeroUsize,
    pub out: Option<&'a Path>,
    pub progress: bool,
}

impl Default for RunOptions<'_> {
    /// Uses one thread per processor, without a journal or a progress bar.
    fn default() -> Self {
        Self {
            jobs: thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
            out: None,
            progress: false,
        }
    }
}

/// A plan that cannot be run. (The failure of a single run is part of the report instead.)
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Journal(#[from] JournalError),
}

const STACK_BYTES: usize = 8 << 20;

/// Runs everything of `plan` that is not in the journal.
/// Returns an error if the plan is invalid or the journal cannot be used. Finished runs are kept.
pub fn run(
    plan: &Plan,
    simulate: &Simulate<'_>,
    options: &RunOptions<'_>,
) -> Result<Report, RunError> {
    let (start, points, jobs) = (Instant::now(), plan.points(), plan.jobs()?);
    let (journal, kept) = match options.out {
        Some(folder) => Journal::open(folder).map(|(journal, kept)| (Some(journal), kept))?,
        None => (None, BTreeMap::new()),
    };
    let mut fingerprints = Fingerprints::default();
    let mut tasks: Vec<PendingRun<'_>> = Vec::new();
    let mut done: Vec<Option<Done>> = Vec::new();
    for (index, job) in jobs.iter().enumerate() {
        let fingerprint = fingerprints.of(&job.scenario);
        match kept.get(&fingerprint) {
            Some(entry) => done.push(Some(Done::kept(entry))),
            None => {
                done.push(None);
                tasks.push(PendingRun { index, job, fingerprint });
            }
        }
    }
    let resumed = jobs.len() - tasks.len();
    let work = Work {
        plan,
        points: &points,
        simulate,
        stop: AtomicBool::new(false),
        progress: Progress::new(jobs.len(), resumed, options.progress),
        state: Mutex::new(RunState { done, journal, events: 0, failed: 0, broken: None }),
    };
    in_parallel(options.jobs, &tasks, |_, task| work.run(task));
    work.progress.finish();
    let state = work.state.into_inner().unwrap_or_else(PoisonError::into_inner);
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

/// Calls `work` for every task and its index, several in parallel.
pub(crate) fn in_parallel<T: Sync>(
    jobs: NonZeroUsize,
    tasks: &[T],
    work: impl Fn(usize, &T) + Sync,
) {
    // No other data is published with the index of the next task.
    let next = AtomicUsize::new(0);
    let worker = || {
        while let at = next.fetch_add(1, Ordering::Relaxed)
            && let Some(task) = tasks.get(at)
        {
            work(at, task);
        }
    };
    thread::scope(|scope| {
        for _ in 0..jobs.get().min(tasks.len()) {
            thread::Builder::new()
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, worker)
                .expect("the system gives a thread");
        }
    });
}

/// Reports the runs in a folder without running anything. The plan may be incomplete, and results
/// of other versions are included.
/// Returns an error if the plan is invalid or the folder cannot be read.
pub fn collect(plan: &Plan, folder: &Path) -> Result<Report, RunError> {
    let jobs = plan.jobs()?;
    let kept = journal::by_scenario(folder)?;
    let done: Vec<Option<Done>> =
        jobs.iter().map(|job| kept.get(&scenario_id(&job.scenario)).map(Done::kept)).collect();
    let timing = Timing { resumed: done.iter().flatten().count(), ..Timing::default() };
    Ok(report(plan, &jobs, done, timing))
}

/// A run that is not in the journal yet.
struct PendingRun<'a> {
    index: usize,
    job: &'a Job,
    fingerprint: String,
}

struct Done {
    result: Result<Outcome, String>,
    wall_s: f64,
    resumed: bool,
}

impl Done {
    fn kept(entry: &JournalEntry) -> Self {
        Self { result: Ok(entry.outcome.clone()), wall_s: entry.wall_s, resumed: true }
    }
}

struct Work<'a> {
    plan: &'a Plan,
    points: &'a [Point],
    simulate: &'a Simulate<'a>,
    /// Whether the journal failed, so that nothing more must run.
    stop: AtomicBool,
    progress: Progress,
    state: Mutex<RunState>,
}

struct RunState {
    done: Vec<Option<Done>>,
    journal: Option<Journal>,
    events: u64,
    failed: usize,
    broken: Option<JournalError>,
}

impl Work<'_> {
    fn run(&self, task: &PendingRun<'_>) {
        if !self.stop.load(Ordering::Relaxed) {
            let start = Instant::now();
            let result = outcome(self.simulate, &task.job.scenario);
            self.end(task, result, start.elapsed().as_secs_f64());
        }
    }

    fn end(&self, task: &PendingRun<'_>, result: Result<(Outcome, String), String>, wall_s: f64) {
        // No thread panics while it changes the state, so a poisoned state is consistent.
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
            // Failures are not stored, so that the next attempt repeats them.
            Err(_) => state.failed += 1,
        }
        state.done[task.index] =
            Some(Done { result: result.map(|(outcome, _)| outcome), wall_s, resumed: false });
        self.progress.advance(state.events, state.failed);
    }
}

/// Runs a simulation and returns its outcome, after conversion to JSON and back, with the JSON
/// text. A panic is a failure of this run only.
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
    // NaN and infinity are written as null, which the parser rejects.
    let outcome =
        serde_json::from_str(&text).map_err(|error| format!("gave what is no number: {error}"))?;
    Ok((outcome, text))
}

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
                runs.push(Run { point, variant, seed, outcome });
            }
            Err(problem) => {
                failures.push(Failure { point, variant, scenario: job.scenario.clone(), problem });
            }
        }
    }
    Report { plan: plan.clone(), points: plan.points(), runs, failures, missing, timing }
}
