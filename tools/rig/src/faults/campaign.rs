//! A campaign: rounds from one seed until enough faults were done, and what to do about a round
//! that went wrong.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::oracle::TransferCounts;
use super::plant::Plant;
use super::round::{self, Outcome};
use super::schedule::{FaultKind, ROUND_FAULTS, Schedule, shrink};
use super::setting::Setting;
#[cfg(feature = "virtual-time")]
use super::virtual_time;
use crate::child::lock;
use crate::error::LabError;
use crate::lab::progress_bar;

/// Times that a smaller schedule is played before it counts as one that does not fail. Processes
/// don't run alike twice.
const TRIES: u32 = 2;
/// Times that a smaller schedule has to fail.
const FAILURES: u32 = 2;

#[derive(Clone, Debug)]
pub enum Player {
    /// Processes, in the time of this machine.
    Processes(Box<Setting>),
    /// One thread, in virtual time.
    VirtualTime(Option<Plant>),
}

impl Player {
    const fn is_virtual(&self) -> bool {
        matches!(self, Self::VirtualTime(_))
    }

    fn draw(&self, seed: u64, round: u64, count: u64) -> Schedule {
        match self {
            Self::Processes(setting) => Schedule::draw_of(&setting.kinds(), seed, round, count),
            Self::VirtualTime(_) => Schedule::draw_of(&FaultKind::VIRTUAL, seed, round, count),
        }
    }

    /// Does what all rounds need, before the first.
    fn prepare(&self) -> Result<(), LabError> {
        match self {
            Self::Processes(setting) => setting.prepare(),
            Self::VirtualTime(_) => Ok(()),
        }
    }

    fn play(&self, schedule: &Schedule) -> Result<Outcome, LabError> {
        match self {
            Self::Processes(setting) => round::play(setting, schedule),
            #[cfg(feature = "virtual-time")]
            Self::VirtualTime(plant) => virtual_time::play(schedule, *plant),
            #[cfg(not(feature = "virtual-time"))]
            Self::VirtualTime(_) => {
                Err(LabError::Plan("this build of laxity-lab has no virtual time".to_owned()))
            }
        }
    }
}

#[derive(Clone, Debug)]
pub struct Campaign {
    pub seed: u64,
    pub faults: u64,
    pub jobs: usize,
    pub player: Player,
    /// File that remembers finished rounds, so that a later call goes on.
    pub state: Option<PathBuf>,
    pub failures: PathBuf,
    /// Maximum number of smaller schedules that are tried on a round that went wrong.
    pub shrink: u32,
}

/// A round that went wrong, in a form that can be played again.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failure {
    pub seed: u64,
    pub round: u64,
    /// What was wrong when the shrunk schedule was played.
    pub violations: Vec<String>,
    pub faults_before: usize,
    pub schedule: Schedule,
    #[serde(default)]
    pub in_virtual_time: bool,
    /// Paths of the round, if processes played it.
    #[serde(default)]
    pub paths: Vec<String>,
}

impl Failure {
    pub fn read(file: &Path) -> Result<Self, LabError> {
        let text = std::fs::read(file).map_err(LabError::file("reading", file))?;
        serde_json::from_slice(&text)
            .map_err(|error| LabError::unreadable(file.display().to_string(), error))
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    pub seed: u64,
    pub faults: u64,
    pub by_kind: BTreeMap<String, u64>,
    pub by_path: BTreeMap<String, TransferCounts>,
    pub violations: u64,
    /// The longest wait for a permit in milliseconds, apart from time in which the worker did not
    /// run.
    pub longest_stall_ms: u64,
    pub bytes_checked: u64,
    pub transfers: u64,
    pub seconds: f64,
    pub rounds: u64,
    /// Rounds in which a worker was seen with the lanes of its queues.
    #[serde(default)]
    pub rounds_with_lanes: u64,
    /// Number of the next round to start. A round that was cut off is not repeated.
    pub next_round: u64,
    pub failures: Vec<(PathBuf, Failure)>,
    #[serde(default)]
    pub in_virtual_time: bool,
    #[serde(default)]
    pub events: u64,
}

impl Report {
    fn add(&mut self, outcome: &Outcome) {
        self.rounds += 1;
        self.events += outcome.events;
        self.rounds_with_lanes += u64::from(outcome.saw_lanes);
        for (kind, number) in &outcome.by_kind {
            *self.by_kind.entry(kind.clone()).or_default() += number;
            self.faults += number;
        }
        for (path, counts) in &outcome.by_path {
            let sum = self.by_path.entry(path.clone()).or_default();
            sum.add(counts);
            self.bytes_checked += counts.bytes;
            self.transfers += counts.transfers;
        }
        self.longest_stall_ms = self.longest_stall_ms.max(outcome.longest_stall_ms);
    }

    fn new(seed: u64, in_virtual_time: bool) -> Self {
        Self { seed, in_virtual_time, ..Self::default() }
    }

    fn read(path: &Path, seed: u64, in_virtual_time: bool) -> Result<Self, LabError> {
        let Ok(text) = std::fs::read(path) else { return Ok(Self::new(seed, in_virtual_time)) };
        let report: Self = serde_json::from_slice(&text)
            .map_err(|error| LabError::unreadable(path.display().to_string(), error))?;
        if report.seed != seed {
            return Err(LabError::Plan(format!(
                "{} is the state of seed {}: give that seed, or another file",
                path.display(),
                report.seed
            )));
        }
        if report.in_virtual_time != in_virtual_time {
            return Err(LabError::Plan(format!(
                "{} is the state of a campaign with --virtual, or this one is: give another file",
                path.display()
            )));
        }
        Ok(report)
    }

    fn write(&self, path: &Path) -> Result<(), LabError> {
        let next = path.with_extension("next");
        std::fs::write(&next, serde_json::to_vec_pretty(self)?)
            .and_then(|()| std::fs::rename(&next, path))
            .map_err(LabError::file("writing", path))
    }
}

/// Plays rounds until the campaign has its faults, or one round goes wrong. `tell` gets what a
/// person should know at once.
pub fn run(
    campaign: &Campaign,
    progress: bool,
    tell: impl Fn(&str) + Sync,
) -> Result<Report, LabError> {
    let mut report = match &campaign.state {
        Some(path) => Report::read(path, campaign.seed, campaign.player.is_virtual())?,
        None => Report::new(campaign.seed, campaign.player.is_virtual()),
    };
    campaign.player.prepare()?;
    let template = "{pos:>7}/{len} faults {bar:40} {per_sec} {eta} {msg}";
    let bar = progress_bar(progress, campaign.faults, template);
    bar.set_position(report.faults);
    bar.reset_eta();
    let (began, before_s) = (Instant::now(), report.seconds);
    let next = AtomicU64::new(report.next_round);
    let planned = AtomicU64::new(report.faults);
    let wrong = AtomicBool::new(false);
    let found: Mutex<Vec<(u64, Schedule, Outcome)>> = Mutex::default();
    let error: Mutex<Option<LabError>> = Mutex::default();
    let shared = Mutex::new(&mut report);
    let job = || -> Result<(), LabError> {
        while !wrong.load(Ordering::Relaxed) {
            let from = planned.fetch_add(ROUND_FAULTS, Ordering::Relaxed);
            let count = campaign.faults.saturating_sub(from).min(ROUND_FAULTS);
            if count == 0 {
                return Ok(());
            }
            let number = next.fetch_add(1, Ordering::Relaxed);
            let schedule = campaign.player.draw(campaign.seed, number, count);
            let outcome = campaign.player.play(&schedule)?;
            let mut report = lock(&shared);
            report.add(&outcome);
            report.next_round = report.next_round.max(number + 1);
            report.seconds = before_s + began.elapsed().as_secs_f64();
            bar.set_position(report.faults);
            if let Some(violation) = outcome.violations.first() {
                wrong.store(true, Ordering::Relaxed);
                let seed = campaign.seed;
                bar.suspend(|| tell(&format!("seed {seed}, round {number}: {violation}")));
                lock(&found).push((number, schedule, outcome));
            } else if let Some(path) = &campaign.state {
                report.write(path)?;
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        for _ in 0..campaign.jobs.max(1) {
            scope.spawn(|| {
                if let Err(failed) = job() {
                    wrong.store(true, Ordering::Relaxed);
                    lock(&error).get_or_insert(failed);
                }
            });
        }
    });
    bar.finish_and_clear();
    if let Some(error) = lock(&error).take() {
        return Err(error);
    }
    let mut found = std::mem::take(&mut *lock(&found)).into_iter();
    report.violations += found.len() as u64;
    // Jobs end together, and shrinking takes a while. So only the first is shrunk.
    if let Some((number, schedule, outcome)) = found.next() {
        report.failures.push(shrunk(campaign, number, &schedule, outcome, &tell)?);
    }
    Ok(report)
}

fn shrunk(
    campaign: &Campaign,
    round: u64,
    schedule: &Schedule,
    outcome: Outcome,
    tell: &impl Fn(&str),
) -> Result<(PathBuf, Failure), LabError> {
    let in_virtual_time = campaign.player.is_virtual();
    let mut violations = outcome.violations;
    let mut failed = None;
    let mut fails_once = |fewer: &Schedule| match campaign.player.play(fewer) {
        Ok(outcome) if outcome.violations.is_empty() => false,
        Ok(outcome) => {
            violations = outcome.violations;
            true
        }
        Err(error) => {
            failed = Some(error);
            false
        }
    };
    let smallest = shrink(schedule, campaign.shrink, |fewer| {
        // What fails only once in many times would not fail when it is played again.
        let (failures, tries) = if in_virtual_time { (1, 1) } else { (FAILURES, TRIES) };
        let wrong = (0..failures).all(|_| (0..tries).any(|_| fails_once(fewer)));
        if wrong {
            tell(&format!("still wrong with {} faults", fewer.faults.len()));
        }
        wrong
    });
    if let Some(error) = failed {
        return Err(error);
    }
    let faults_before = schedule.faults.len();
    let seed = campaign.seed;
    let paths = match &campaign.player {
        Player::Processes(setting) => setting.paths_of(schedule.seed),
        Player::VirtualTime(_) => Vec::new(),
    };
    let schedule = smallest;
    let failure =
        Failure { seed, round, violations, faults_before, schedule, in_virtual_time, paths };
    let path = campaign.failures.join(format!("faults-{seed}-{round}.json"));
    std::fs::create_dir_all(&campaign.failures)
        .and_then(|()| std::fs::write(&path, serde_json::to_vec_pretty(&failure)?))
        .map_err(LabError::file("writing", &path))?;
    Ok((path, failure))
}

/// Plays the schedule of a [`Failure`] in `file` again, up to `times` times, until something is
/// wrong.
pub fn replay(
    player: &Player,
    file: &Path,
    failure: Failure,
    times: u32,
) -> Result<Report, LabError> {
    player.prepare()?;
    let began = Instant::now();
    let mut report = Report::new(failure.seed, player.is_virtual());
    for _ in 0..times {
        let outcome = player.play(&failure.schedule)?;
        report.add(&outcome);
        report.seconds = began.elapsed().as_secs_f64();
        if !outcome.violations.is_empty() {
            report.violations = 1;
            let failure = Failure { violations: outcome.violations, ..failure };
            report.failures.push((file.to_owned(), failure));
            break;
        }
    }
    Ok(report)
}
