//! A soak: one daemon under full load for a long time, with workers that stay and workers that
//! come and go.
//!
//! A fault campaign starts a daemon for each round, so it can't see what grows slowly. Here one
//! daemon lives through all of it, and no fault ends it. The oracle checks all transfers as in a
//! campaign. In addition, samples of the daemon and of the workers that stay decide whether
//! something [leaks](trend), and the daemon's counters have to [agree](balances).

mod balances;
mod page;
mod trend;

use std::collections::BTreeMap;
use std::fs;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use laxity_wire::{ControlClient, Status};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

pub use page::{soak_page, soak_table};
use trend::{Growth, SAMPLES_MIN};

use super::daemon::Daemon;
use super::oracle::{Oracle, TransferCounts};
use super::round::{CLOSED_WITHIN, FORGET_MAX, folder};
use super::setting::Setting;
use super::workers::RoundWorkers;
use crate::child::{descriptors, lock, status_number};
use crate::error::LabError;
use crate::lab::progress_bar;

/// Time between two changes: a worker leaves, is killed, or the daemon reloads.
const CHANGE_EVERY: Duration = Duration::from_millis(500);
/// One change out of this many is a kill. If more processes of a user were killed, the daemon would
/// stop scheduling that user's clients.
const KINDS: u64 = 24;
/// Samples of a short soak, and the time between those of a long one.
const SAMPLES: u32 = 60;
const SAMPLE_EVERY_MAX: Duration = Duration::from_secs(5);
/// Longest wait for a permit at full load. Flows that have waited for 1 s share 5 % of the port.
/// With many workers on a busy machine, these flows take long.
const WAIT_MAX: Duration = Duration::from_secs(5);
/// The policies under which [`WAIT_MAX`] holds.
const POLICIES: [&str; 2] = ["laxity", "mfs"];
const STEP: Duration = Duration::from_millis(25);
/// Growth that is no leak: memory of buffers and of the allocator, and what a worker that just
/// starts or ends has.
const MEMORY_KIB: u64 = 4096;
const FEW: u64 = 4;
/// What is measured of a process, with its bound.
const OF_PROCESS: [(&str, u64); 3] =
    [("memory in KiB", MEMORY_KIB), ("descriptors", FEW), ("threads", FEW)];
/// What is measured of the daemon's status.
const OF_DAEMON: [(&str, u64); 2] = [("clients", FEW), ("lanes", 2 * FEW)];

#[derive(Clone, Debug)]
pub struct SoakPlan {
    pub seed: u64,
    pub length: Duration,
    pub setting: Setting,
}

impl SoakPlan {
    /// Reads the length of a soak, such as `4h` or `10min`.
    pub fn length(text: &str) -> Result<Duration, String> {
        humantime::parse_duration(text).map_err(|error| format!("{error}, as in 4h or 10min"))
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SoakCounters {
    pub attachments: u64,
    pub flows: u64,
    pub submitted_bytes: u64,
    pub permitted_bytes: u64,
    pub bypassed_bytes: u64,
    pub withdrawn_bytes: u64,
    pub completed_bytes: u64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SoakReport {
    pub seed: u64,
    pub seconds: f64,
    pub samples: u64,
    /// How often a worker left in order, was killed, or the daemon reloaded.
    pub changes: BTreeMap<String, u64>,
    pub by_path: BTreeMap<String, TransferCounts>,
    pub transfers: u64,
    pub bytes_checked: u64,
    /// The longest wait for a permit in milliseconds, apart from time in which the worker did not
    /// run.
    pub longest_stall_ms: u64,
    /// Workers that ended in order, and whose counters agree with the bytes that came.
    pub workers_counted: u64,
    pub counters: SoakCounters,
    pub growth: Vec<Growth>,
    pub violations: Vec<String>,
}

/// What grows if something leaks, by name, with the bound of its growth.
#[derive(Default)]
struct Series(BTreeMap<String, (u64, Vec<u64>)>);

impl Series {
    fn add(&mut self, whose: &str, what: (&str, u64), value: u64) {
        let (_, samples) =
            self.0.entry(format!("{whose}: {}", what.0)).or_insert((what.1, Vec::new()));
        samples.push(value);
    }

    fn add_process(&mut self, whose: &str, pid: u32) -> Option<()> {
        let (resident, threads) = (status_number(pid, "VmRSS")?, status_number(pid, "Threads")?);
        let values = [resident, descriptors(pid)? as u64, threads];
        for (what, value) in OF_PROCESS.into_iter().zip(values) {
            self.add(whose, what, value);
        }
        Some(())
    }

    fn growth(&self) -> Vec<Growth> {
        let of = |(what, (bound, samples)): (&String, &(u64, Vec<u64>))| {
            Growth::of(what, samples, *bound)
        };
        self.0.iter().filter_map(of).collect()
    }
}

struct Soak<'a> {
    oracle: Arc<Mutex<Oracle>>,
    daemon: Daemon,
    /// Workers that stay, whose size is sampled.
    residents: RoundWorkers<'a>,
    /// Workers that come and go.
    guests: RoundWorkers<'a>,
    rng: ChaCha8Rng,
    series: Series,
    last: Status,
    scheduled: u64,
    /// When the daemon had no processor since the last judgement.
    stops: Vec<(u64, u64)>,
    report: SoakReport,
}

/// Runs a daemon and its workers for the length of the plan, or until something is wrong. `tell`
/// gets that at once.
pub fn run(plan: &SoakPlan, progress: bool, tell: impl Fn(&str)) -> Result<SoakReport, LabError> {
    let folder = folder("laxity-soak")?;
    let oracle = Arc::<Mutex<Oracle>>::default();
    let setting = plan.setting.for_soak();
    setting.prepare()?;
    let mut daemon = Daemon::new(&setting.laxityd, None, folder.path(), setting.pace)?;
    daemon.launch()?;
    let first = daemon.status().map_err(|wrong| LabError::program("laxityd", wrong))?;
    std::thread::sleep(CLOSED_WITHIN);
    let (descriptors, _) = daemon.size().unwrap_or_default();
    let start = |name: &str, seed: u64| -> Result<RoundWorkers<'_>, LabError> {
        let own = folder.path().join(name);
        fs::create_dir(&own).map_err(LabError::file("making", &own))?;
        RoundWorkers::start(&setting, &own, daemon.socket(), seed, &oracle)
    };
    let (residents, guests) = (start("residents", plan.seed)?, start("guests", plan.seed + 1000)?);
    let mut soak = Soak {
        oracle,
        daemon,
        residents,
        guests,
        rng: ChaCha8Rng::seed_from_u64(plan.seed),
        series: Series::default(),
        last: first,
        scheduled: 0,
        stops: Vec::new(),
        report: SoakReport { seed: plan.seed, ..SoakReport::default() },
    };
    let template = "{pos:>7}/{len} s {bar:40} {eta} {msg}";
    let bar = progress_bar(progress, plan.length.as_secs(), template);
    soak.go_on(plan.length, &bar)?;
    bar.finish_and_clear();
    soak.end(descriptors);
    soak.report.violations.iter().for_each(|violation| tell(violation));
    Ok(soak.report)
}

impl Soak<'_> {
    fn note(&mut self, wrong: impl IntoIterator<Item = String>) {
        self.report.violations.extend(wrong);
    }

    fn go_on(&mut self, length: Duration, bar: &ProgressBar) -> Result<(), LabError> {
        let begin = Instant::now();
        let sample_every = (length / SAMPLES).min(SAMPLE_EVERY_MAX);
        let (mut sample_at, mut change_at) = (sample_every, CHANGE_EVERY);
        let is_over =
            |soak: &Self| begin.elapsed() >= length && soak.report.samples >= SAMPLES_MIN as u64;
        while !is_over(self) && self.report.violations.is_empty() {
            std::thread::sleep(STEP);
            self.stops.extend(self.daemon.had_no_processor());
            let now = begin.elapsed();
            if now >= change_at {
                self.change()?;
                change_at = now + CHANGE_EVERY;
            }
            if now >= sample_at {
                self.sample();
                sample_at = now + sample_every;
                self.report.seconds = now.as_secs_f64();
                bar.set_position(now.as_secs());
                let rate = self.last.totals.completed_bytes as f64 / now.as_secs_f64().max(0.1);
                let (rate, stall) = (rate as u64 >> 20, self.report.longest_stall_ms);
                bar.set_message(format!("{rate} MiB/s, longest wait {stall} ms"));
            }
        }
        self.report.seconds = begin.elapsed().as_secs_f64();
        Ok(())
    }

    /// Lets a worker leave or kills one, which another replaces, or reloads the daemon.
    fn change(&mut self) -> Result<(), LabError> {
        let (kind, choice) = (self.rng.random_range(0..KINDS), self.rng.random());
        let name = match kind {
            0 => {
                self.guests.kill(choice)?;
                "killed"
            }
            1..=4 => {
                self.daemon.window_kib = 64 << (choice % 3);
                "reloaded"
            }
            5..=8 => {
                self.daemon.policy = POLICIES[(choice % POLICIES.len() as u64) as usize];
                "policy_changed"
            }
            _ => {
                self.guests.leave(choice)?;
                "left"
            }
        };
        if (1..=8).contains(&kind) {
            self.daemon.configure()?;
            let answer = self.daemon.ask(ControlClient::reload);
            self.note(answer.err());
        }
        *self.report.changes.entry(name.to_owned()).or_default() += 1;
        Ok(())
    }

    /// Measures everything, and judges the changes since the last sample.
    fn sample(&mut self) {
        let wrong = self.daemon.look();
        self.note(wrong);
        let status = match self.daemon.status() {
            Ok(status) => status,
            Err(wrong) => return self.note([wrong]),
        };
        self.report.samples += 1;
        let lanes = status.clients.iter().map(|client| u64::from(client.lanes)).sum();
        for (what, value) in OF_DAEMON.into_iter().zip([status.clients.len() as u64, lanes]) {
            self.series.add("laxityd", what, value);
        }
        if let Some(pid) = self.daemon.pid() {
            self.series.add_process("laxityd", pid);
        }
        let residents = self.residents.processes();
        for (number, path, pid) in &residents {
            self.series.add_process(&format!("{path} {number}"), *pid);
        }
        let wrong = balances::of_daemon(&self.last, &status);
        self.note(wrong);
        self.last = status;
        let guests = self.guests.processes();
        let alive: Vec<usize> = residents.into_iter().chain(guests).map(|(at, ..)| at).collect();
        self.judge();
        lock(&self.oracle).keep_only(&alive);
    }

    fn judge(&mut self) {
        let mut oracle = lock(&self.oracle);
        let longest = oracle.judge_waits(&self.stops, WAIT_MAX).as_millis() as u64;
        let counts = std::mem::take(&mut oracle.worker_counts);
        let mut wrong = std::mem::take(&mut oracle.violations);
        drop(oracle);
        // A wait that is not over yet is excused for a shorter time.
        self.stops.clear();
        self.report.longest_stall_ms = self.report.longest_stall_ms.max(longest);
        let balanced = counts.iter().filter(|count| balances::is_balanced(count));
        self.report.workers_counted += balanced.count() as u64;
        self.scheduled += counts.iter().map(|count| count.scheduled).sum::<u64>();
        wrong.extend(counts.iter().filter_map(balances::of_worker));
        self.note(wrong);
    }

    /// Ends all workers, and judges their remains in the daemon and the growth of all series.
    fn end(&mut self, descriptors: usize) {
        self.guests.finish();
        self.residents.finish();
        self.judge();
        let wrong = self.settle(descriptors);
        self.note(wrong);
        let wrong = self.daemon.panicked();
        self.note(wrong);
        self.note(balances::of_all(self.scheduled, &self.last));
        let totals = &self.last.totals;
        self.report.counters = SoakCounters {
            attachments: totals.attachments,
            flows: totals.flows,
            submitted_bytes: totals.submitted_bytes,
            permitted_bytes: totals.permitted_bytes,
            bypassed_bytes: totals.bypassed_bytes,
            withdrawn_bytes: totals.withdrawn_bytes,
            completed_bytes: totals.completed_bytes,
        };
        let oracle = lock(&self.oracle);
        self.report.by_path.clone_from(&oracle.counts);
        drop(oracle);
        self.report.transfers = self.report.by_path.values().map(|path| path.transfers).sum();
        self.report.bytes_checked = self.report.by_path.values().map(|path| path.bytes).sum();
        self.report.growth = self.series.growth();
        let wrong: Vec<String> = self.report.growth.iter().filter_map(Growth::wrong).collect();
        self.note(wrong);
    }

    /// Waits until the daemon has forgotten all clients. Returns the clients' remains.
    fn settle(&mut self, descriptors: usize) -> Vec<String> {
        let start = Instant::now();
        loop {
            let status = match self.daemon.status() {
                Ok(status) => status,
                Err(wrong) => return vec![wrong],
            };
            std::thread::sleep(CLOSED_WITHIN);
            let (open, _) = self.daemon.size().unwrap_or_default();
            let clients = status.clients.len();
            let waiting: u64 = status.ports.iter().map(|port| port.waiting_flows).sum();
            let in_flight: u64 = status.ports.iter().map(|port| port.in_flight_bytes).sum();
            let is_idle = clients == 0 && waiting == 0 && in_flight == 0 && open <= descriptors;
            if is_idle || start.elapsed() > FORGET_MAX {
                let mut wrong = balances::of_daemon(&self.last, &status);
                if !is_idle {
                    wrong.push(format!(
                        "{FORGET_MAX:?} after the end laxityd has {clients} clients, {waiting} \
                         waiting flows, {in_flight} bytes in flight, {open} descriptors instead \
                         of {descriptors}"
                    ));
                }
                self.last = status;
                return wrong;
            }
        }
    }
}
