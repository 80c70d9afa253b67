//! Contention on real verbs: a collective against prefill-to-decode transfers and reads, which
//! share one shaped port.
//!
//! ```text
//! rxe0                                       router, shaped          rxe1
//! collective ──── small, blocking, periodic ───▶ ┌────┐ ───▶ collective   (and its answer back; or `nccl_rounds` by the NCCL plugin)
//! Mooncake   ──── WRITEs with deadlines ───────▶ │ r1 │ ───▶ Mooncake
//! memory     ──── data of READs with deadlines ▶ └────┘ ───▶ bulk --op read
//! ```
//!
//! The same arrivals in each phase: the bulk alone (can its deadlines be met at all?), the
//! collective alone, both as on a stock cluster (no shim, no marks), both with static marks, both
//! under Laxity (a `laxityd` per host and `laxity run` on both ends), the collective alone once
//! more. Each repetition has other arrivals.

mod outcome;
mod programs;
mod verdict;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

pub use self::outcome::{
    Contention, Deadlines, PhaseOutcome, Repetition, Rounds, ShimReport, Slowdown,
};
use self::programs::PhasePrograms;
pub use self::verdict::{UNDER_LAXITY_MAX, UNSCHEDULED_MIN, Verdict};
use crate::vm::counters::{PortCounters, RouterCounters};
use crate::vm::guest::Guest;
use crate::vm::network::{DEVICES, NetworkConfig};
use crate::vm::verbs::Programs;

/// How often a seed is played that does not hold: other work of the machine spoils one attempt, a
/// fault of ours all of them.
const ATTEMPTS: u32 = 3;

/// Folder in the guest.
const FOLDER: &str = scratch!("contention");

/// Bulk transfers that come one a period.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Bytes of a transfer.
    pub bytes: u64,
    /// One arrives each period.
    pub period_us: u64,
    /// After its arrival.
    pub deadline_us: u64,
}

/// The collective.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Collective {
    /// Bytes in each direction of a round.
    pub bytes: u64,
    /// Messages that they are sent in.
    pub messages: u64,
    /// A round begins each period, unless the last one is not over.
    pub period_us: u64,
}

/// What to play.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContentionConfig {
    /// Rate of the router's ports, Mbit/s.
    pub rate_mbit: u32,
    /// Of the arrivals; each repetition adds one.
    pub seed: u64,
    /// How often, in this one boot.
    pub repetitions: u32,
    /// Seconds that a phase lasts.
    pub seconds: f64,
    /// Whether to play the phase with static marks, too.
    pub static_marks: bool,
    /// The collective.
    pub collective: Collective,
    /// Prefill-to-decode transfers.
    pub p2d: Load,
    /// How far a transfer arrives from its place, as part of a period.
    pub jitter: f64,
    /// Reads of KV cache.
    pub reads: Load,
    /// Bytes permitted at once; none for the daemon's default.
    pub chunk: Option<u64>,
    /// Bytes in flight at most; none for the daemon's default.
    pub window: Option<u64>,
    /// Whether the collective goes by the NCCL plugin.
    #[serde(default)]
    pub plugin: bool,
}

impl Default for ContentionConfig {
    /// What an emulated machine sustains: seven eighths of the port, three quarters of it bulk.
    fn default() -> Self {
        Self {
            rate_mbit: 8,
            seed: 1,
            repetitions: 1,
            seconds: 16.0,
            static_marks: true,
            collective: Collective {
                bytes: 48 << 10,
                messages: 3,
                period_us: 400_000,
            },
            p2d: Load {
                bytes: 640 << 10,
                period_us: 1_000_000,
                deadline_us: 3_000_000,
            },
            jitter: 0.3,
            reads: Load {
                bytes: 128 << 10,
                period_us: 1_300_000,
                deadline_us: 2_500_000,
            },
            chunk: None,
            window: None,
            plugin: false,
        }
    }
}

impl ContentionConfig {
    /// The network that it is played on.
    #[must_use]
    pub fn network(&self) -> NetworkConfig {
        NetworkConfig {
            rate_mbit: Some(self.rate_mbit),
            ..NetworkConfig::default()
        }
    }

    fn rounds(&self) -> u64 {
        (self.seconds * 1e6 / self.collective.period_us as f64).max(1.0) as u64
    }

    /// Transfers of a load: a little longer than the collective, so that no round is without.
    fn transfers(&self, load: &Load) -> u64 {
        ((self.seconds + 2.0) * 1e6 / load.period_us as f64).max(1.0) as u64
    }
}

/// Who takes part, and under what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Transfers and reads alone, as [`Phase::Unscheduled`].
    BulkAlone,
    /// The collective alone, as [`Phase::Unscheduled`].
    CollectiveAlone,
    /// No shim, no daemon, no marks.
    Unscheduled,
    /// No shim, no daemon; two classes, set by hand.
    StaticMarks,
    /// Everything under Laxity.
    Laxity,
    /// [`Phase::CollectiveAlone`] once more: did the machine change meanwhile?
    CollectiveAgain,
}

impl Phase {
    /// The name used in reports.
    #[must_use]
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

/// Plays all of it, on [`ContentionConfig::network`].
///
/// # Errors
/// The router is shaped otherwise, or a program did not do what it should.
pub fn run(
    guest: &Guest,
    programs: &Programs,
    config: &ContentionConfig,
) -> anyhow::Result<Contention> {
    if guest.facts.rate_mbit != Some(config.rate_mbit) {
        bail!("the router has another rate: {:?}", guest.facts.rate_mbit);
    }
    fs::create_dir_all(FOLDER).with_context(|| format!("creating {FOLDER}"))?;
    let mut phases = vec![Phase::BulkAlone, Phase::CollectiveAlone, Phase::Unscheduled];
    if config.static_marks {
        phases.push(Phase::StaticMarks);
    }
    phases.extend([Phase::Laxity, Phase::CollectiveAgain]);
    let mut repetitions = Vec::new();
    for nth in 0..config.repetitions.max(1) {
        let seed = config.seed + u64::from(nth);
        for attempt in 1..=ATTEMPTS {
            let mut outcomes = BTreeMap::new();
            for &phase in &phases {
                let outcome = play(guest, programs, config, phase, seed, attempt)
                    .with_context(|| format!("phase `{}`, seed {seed}", phase.name()))?;
                guest.say(&format!("seed {seed}, {}", outcome.line(phase)))?;
                outcomes.insert(phase, outcome);
            }
            let repetition = Repetition {
                seed,
                phases: outcomes,
            };
            let verdict = repetition.verdict();
            repetitions.push(repetition);
            if verdict == Verdict::Holds {
                break;
            }
            guest.say(&format!("seed {seed}, attempt {attempt}: {verdict:?}"))?;
        }
    }
    Ok(Contention {
        config: config.clone(),
        with_mooncake: programs.python.is_some(),
        repetitions,
    })
}

fn play(
    guest: &Guest,
    programs: &Programs,
    config: &ContentionConfig,
    phase: Phase,
    seed: u64,
    attempt: u32,
) -> anyhow::Result<PhaseOutcome> {
    let folder = Path::new(FOLDER).join(format!("{phase:?}-{seed}-{attempt}"));
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let started = PhasePrograms {
        guest,
        programs,
        config,
        phase,
        seed,
        folder: &folder,
        // Starting Mooncake takes seconds, and under load everything takes longer.
        limit: Duration::from_secs_f64(60.0 + 6.0 * config.seconds),
    };
    let daemons = match phase {
        Phase::Laxity => started.daemons()?,
        _ => Vec::new(),
    };
    let bulk = phase.has_bulk().then(|| started.bulk()).transpose()?;
    let before = guest.counters()?;
    let again_before = retransmissions()?;
    let busy_before = busy()?;
    let bulk = bulk.map(programs::Bulk::go).transpose()?;
    let collective = match phase.has_collective() {
        true => Some(started.collective()?),
        false => None,
    };
    let rounds = collective.map(programs::Pair::finish_rounds).transpose()?;
    let (p2d, reads) = match bulk {
        Some(bulk) => {
            let (p2d, reads) = bulk.finish()?;
            (Some(p2d), Some(reads))
        }
        None => (None, None),
    };
    let busy_after = busy()?;
    let after = guest.counters()?;
    let daemon_warnings = daemons
        .into_iter()
        .flat_map(|daemon| {
            let said = daemon.kill();
            let lines = said.stdout.lines().chain(said.stderr.lines());
            let wrong = lines.filter(|line| line.contains(" WARN ") || line.contains(" ERROR "));
            wrong.map(str::to_owned).collect::<Vec<_>>()
        })
        .collect();
    Ok(PhaseOutcome {
        collective: rounds.map(|line| Rounds::of(&line.round_us, config)),
        p2d,
        reads,
        bytes_by_dscp: sent(&before, &after, |router| &router.to_host1),
        back_by_dscp: sent(&before, &after, |router| &router.to_host0),
        drops: drops(&after) - drops(&before),
        retransmissions: retransmissions()? - again_before,
        busy_processors: (busy_after.0 - busy_before.0) / (busy_after.1 - busy_before.1).max(1e-3),
        shim: started.reports()?,
        daemon_warnings,
    })
}

/// Bytes that came to a port between two looks, by DSCP.
fn sent(
    before: &RouterCounters,
    after: &RouterCounters,
    port: fn(&RouterCounters) -> &PortCounters,
) -> BTreeMap<u8, u64> {
    let earlier = &port(before).offered;
    port(after)
        .offered
        .iter()
        .map(|(dscp, passed)| {
            let since = earlier.get(dscp).map_or(0, |earlier| earlier.bytes);
            (*dscp, passed.bytes - since)
        })
        .filter(|(_, bytes)| *bytes > 0)
        .collect()
}

fn drops(router: &RouterCounters) -> u64 {
    let queues = |port: &PortCounters| port.queues.values().map(|queue| queue.drops).sum::<u64>();
    queues(&router.to_host0) + queues(&router.to_host1)
}

/// How often a queue pair of either device has begun to send again.
fn retransmissions() -> anyhow::Result<u64> {
    let mut all = 0;
    for device in DEVICES {
        let path =
            format!("/sys/class/infiniband/{device}/ports/1/hw_counters/completer_retry_err");
        let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        all += text
            .trim()
            .parse::<u64>()
            .with_context(|| format!("reading {path}"))?;
    }
    Ok(all)
}

/// Seconds of processors that were busy, and of uptime.
fn busy() -> anyhow::Result<(f64, f64)> {
    let stat = fs::read_to_string("/proc/stat").context("reading /proc/stat")?;
    let uptime = fs::read_to_string("/proc/uptime").context("reading /proc/uptime")?;
    let fields: Vec<f64> = stat
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .filter_map(|field| field.parse().ok())
        .collect();
    // user nice system idle iowait irq softirq steal, in hundredths.
    let idle = fields.iter().skip(3).take(2).sum::<f64>();
    let all = fields.iter().take(8).sum::<f64>();
    let up = uptime.split_whitespace().next().unwrap_or_default();
    Ok((
        (all - idle) / 100.0,
        up.parse().context("reading the uptime")?,
    ))
}
