//! Contention on real verbs: a collective, P2D transfers and reads share one shaped port.
//!
//! ```text
//! rxe0                                       router, shaped          rxe1
//! collective ──── small, blocking, periodic ───▶ ┌────┐ ───▶ collective
//! Mooncake   ──── WRITEs with deadlines ───────▶ │ r1 │ ───▶ Mooncake
//! memory     ──── data of READs with deadlines ▶ └────┘ ───▶ bulk --op read
//! ```
//!
//! The collective answers each round. `nccl_rounds` over the NCCL plugin can replace it.
//!
//! Each phase has the same arrivals: the bulk alone (which shows whether its deadlines can be met),
//! the collective alone, both as on a stock cluster (no shim, no marks), both with static marks,
//! both under Laxity (a `laxityd` per host and `laxity run` on both ends), and the collective alone
//! once more. Each repetition has other arrivals.

mod outcome;
mod programs;
mod verdict;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

pub use self::outcome::Contention;
use self::outcome::{Deadlines, PhaseOutcome, Repetition, Rounds};
use self::programs::PhasePrograms;
use self::verdict::Verdict;
use crate::error::LabError;
use crate::vm::counters::{PortCounters, RouterCounters};
use crate::vm::guest::Guest;
use crate::vm::network::{DEVICES, NetworkConfig};
use crate::vm::verbs::Programs;

/// Most attempts with a seed. Other work of the machine spoils one attempt, but a fault of Laxity
/// spoils all.
const ATTEMPTS: u32 = 3;

const FOLDER: &str = scratch!("contention");

/// Bulk transfers that arrive periodically.
struct Load {
    bytes: u64,
    period_us: u64,
    deadline_us: u64,
}

struct Collective {
    /// Bytes in each direction of a round.
    bytes: u64,
    messages: u64,
    /// Time between the starts of two rounds, in µs, unless a round takes longer.
    period_us: u64,
}

// An emulated machine sustains these loads: 7/8 of the port, three quarters of that bulk.
const COLLECTIVE: Collective = Collective { bytes: 48 << 10, messages: 3, period_us: 400_000 };
const P2D: Load = Load { bytes: 640 << 10, period_us: 1_000_000, deadline_us: 3_000_000 };
const READS: Load = Load { bytes: 128 << 10, period_us: 1_300_000, deadline_us: 2_500_000 };
const JITTER: f64 = 0.3;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContentionConfig {
    pub rate_mbit: u32,
    /// Seed of the arrivals. Each repetition adds one.
    pub seed: u64,
    pub repetitions: u32,
    pub seconds: f64,
    pub plugin: bool,
}

impl Default for ContentionConfig {
    fn default() -> Self {
        Self { rate_mbit: 8, seed: 1, repetitions: 1, seconds: 16.0, plugin: false }
    }
}

impl ContentionConfig {
    pub fn network(&self) -> NetworkConfig {
        NetworkConfig { rate_mbit: Some(self.rate_mbit), ..NetworkConfig::default() }
    }

    fn rounds(&self) -> u64 {
        (self.seconds * 1e6 / COLLECTIVE.period_us as f64).max(1.0) as u64
    }

    /// Returns the transfers of a load. They last longer than the collective, so each round has
    /// bulk.
    fn transfers(&self, load: &Load) -> u64 {
        ((self.seconds + 2.0) * 1e6 / load.period_us as f64).max(1.0) as u64
    }
}

/// A phase: the programs that take part, and their scheduling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Transfers and reads alone, scheduled like [`Phase::Unscheduled`].
    BulkAlone,
    /// The collective alone, scheduled like [`Phase::Unscheduled`].
    CollectiveAlone,
    /// All programs, without shim, daemon or marks.
    Unscheduled,
    /// All programs, without shim or daemon, in two classes that are set by hand.
    StaticMarks,
    Laxity,
    /// [`Phase::CollectiveAlone`] once more, to see whether the machine changed meanwhile.
    CollectiveAgain,
}

impl Phase {
    pub const fn name(self) -> &'static str {
        match self {
            Self::BulkAlone => "bulk alone",
            Self::CollectiveAlone => "collective alone",
            Self::Unscheduled => "unscheduled",
            Self::StaticMarks => "static marks",
            Self::Laxity => "laxity",
            Self::CollectiveAgain => "alone again",
        }
    }

    const fn has_bulk(self) -> bool {
        !matches!(self, Self::CollectiveAlone | Self::CollectiveAgain)
    }

    const fn has_collective(self) -> bool {
        !matches!(self, Self::BulkAlone)
    }
}

/// The phases of a repetition, in the order in which they are played.
const PHASES: [Phase; 6] = [
    Phase::BulkAlone,
    Phase::CollectiveAlone,
    Phase::Unscheduled,
    Phase::StaticMarks,
    Phase::Laxity,
    Phase::CollectiveAgain,
];

pub fn run(
    guest: &Guest,
    programs: &Programs,
    config: &ContentionConfig,
) -> Result<Contention, LabError> {
    if guest.facts.rate_mbit != Some(config.rate_mbit) {
        let rate = guest.facts.rate_mbit;
        return Err(LabError::Plan(format!("the router has another rate: {rate:?}")));
    }
    let mut repetitions = Vec::new();
    for seed in (config.seed..).take(config.repetitions.max(1) as usize) {
        for attempt in 1..=ATTEMPTS {
            let mut outcomes = BTreeMap::new();
            for phase in PHASES {
                let name = format!("{phase:?}-{seed}-{attempt}");
                let programs = PhasePrograms {
                    guest,
                    programs,
                    config,
                    phase,
                    seed,
                    folder: Path::new(FOLDER).join(name),
                };
                let outcome = play(&programs).map_err(LabError::step(format_args!(
                    "phase `{}`, seed {seed}",
                    phase.name()
                )))?;
                guest.say(&format!("seed {seed}, {}", outcome.line(phase)))?;
                outcomes.insert(phase, outcome);
            }
            let repetition = Repetition { seed, phases: outcomes };
            let verdict = repetition.verdict();
            repetitions.push(repetition);
            if verdict == Verdict::Holds {
                break;
            }
            guest.say(&format!("seed {seed}, attempt {attempt}: {verdict:?}"))?;
        }
    }
    Ok(Contention { config: config.clone(), with_mooncake: programs.python.is_some(), repetitions })
}

fn play(programs: &PhasePrograms<'_>) -> Result<PhaseOutcome, LabError> {
    let (guest, phase, folder) = (programs.guest, programs.phase, &programs.folder);
    fs::create_dir_all(folder).map_err(LabError::file("creating", &folder))?;
    let daemons = programs.daemons()?;
    let bulk = phase.has_bulk().then(|| programs.bulk()).transpose()?;
    let before = guest.counters()?;
    let again_before = retransmissions()?;
    let bulk = bulk.map(programs::Bulk::go).transpose()?;
    let collective = phase.has_collective().then(|| programs.collective());
    let rounds = collective.transpose()?.map(programs::Pair::finish_rounds);
    let rounds = rounds.transpose()?;
    let (p2d, reads) = bulk.map(programs::Playing::finish).transpose()?.unzip();
    let after = guest.counters()?;
    drop(daemons);
    Ok(PhaseOutcome {
        collective: rounds.map(|line| Rounds::of(&line.round_us, programs.config)),
        p2d,
        reads,
        bytes_by_dscp: sent(&before, &after),
        drops: drops(&after) - drops(&before),
        retransmissions: retransmissions()? - again_before,
        library: programs.reports()?,
    })
}

/// Returns the bytes that were offered to the port towards host 1 between two readings, by DSCP.
fn sent(before: &RouterCounters, after: &RouterCounters) -> BTreeMap<u8, u64> {
    let earlier = |dscp| before.to_host1.offered.get(dscp).map_or(0, |passed| passed.bytes);
    let offered = after.to_host1.offered.iter();
    let since = offered.map(|(dscp, passed)| (*dscp, passed.bytes - earlier(dscp)));
    since.filter(|(_, bytes)| *bytes > 0).collect()
}

fn drops(router: &RouterCounters) -> u64 {
    let queues = |port: &PortCounters| port.queues.values().map(|queue| queue.drops).sum::<u64>();
    queues(&router.to_host0) + queues(&router.to_host1)
}

/// Returns how often the queue pairs of both devices began to send again.
fn retransmissions() -> Result<u64, LabError> {
    let mut all = 0;
    for device in DEVICES {
        let path =
            format!("/sys/class/infiniband/{device}/ports/1/hw_counters/completer_retry_err");
        let text = fs::read_to_string(&path).map_err(LabError::file("reading", &path))?;
        let count: u64 = text.trim().parse().map_err(|error| LabError::unreadable(path, error))?;
        all += count;
    }
    Ok(all)
}
