//! Contention on real verbs: a collective against prefill-to-decode transfers and reads, which share
//! one shaped port.
//!
//! ```text
//! rxe0                                       router, shaped          rxe1
//! collective ──── small, blocking, periodic ───▶ ┌────┐ ───▶ collective   (and its answer back)
//! Mooncake   ──── WRITEs with deadlines ───────▶ │ r1 │ ───▶ Mooncake
//! memory     ──── data of READs with deadlines ▶ └────┘ ───▶ bulk --op read
//! ```
//!
//! The same arrivals in each phase: the bulk alone (can its deadlines be met at all?), the collective
//! alone, both as on a stock cluster (no shim, no marks), both with static marks, both under Laxity:
//! a `laxityd` per host and `laxity run` on both ends. Each repetition has other arrivals.

mod outcome;
mod programs;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

pub use self::outcome::{Contention, Deadlines, PhaseOutcome, Repetition, Rounds, ShimReport};
use self::programs::Cast;
use crate::vm::counters::{PortCounters, RouterCounters};
use crate::vm::guest::Guest;
use crate::vm::network::DEVICES;

/// Folder in the guest.
const FOLDER: &str = "/tmp/contention";

/// Who plays, and where it is on the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Programs {
    /// `laxity`.
    pub laxity: PathBuf,
    /// `laxityd`.
    pub laxityd: PathBuf,
    /// `liblaxity.so`.
    pub library: PathBuf,
    /// Folder with `collective`, `bulk` and `patient.so` (`tests/verbs/build.sh`).
    pub folder: PathBuf,
    /// A Python that can import `mooncake.engine`; without one, `bulk` writes in Mooncake's place.
    pub python: Option<PathBuf>,
}

impl Programs {
    /// Those beside each other in a build folder or an installation; builds the test programs from
    /// this source tree if they are missing. Mooncake's Python is `$LAXITY_PYTHON` or `python3`.
    ///
    /// # Errors
    /// What is missing.
    pub fn find(folder: &Path) -> anyhow::Result<Self> {
        let there = |name: &str| {
            let path = folder.join(name);
            if !path.is_file() {
                bail!("{} is missing: build or install it", path.display());
            }
            Ok(path)
        };
        let programs = folder.join("verbs");
        let needed = ["collective", "bulk", "patient.so"];
        if !needed.iter().all(|name| programs.join(name).is_file()) {
            let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/verbs/build.sh");
            let output = Command::new(&script)
                .arg(&programs)
                .output()
                .with_context(|| format!("running {}", script.display()))?;
            if !output.status.success() {
                bail!(
                    "{} failed: {}",
                    script.display(),
                    String::from_utf8_lossy(&output.stderr)
                );
            }
        }
        let python = std::env::var_os("LAXITY_PYTHON").map_or("python3".into(), PathBuf::from);
        let imports = Command::new(&python)
            .args(["-c", "import mooncake.engine"])
            .output()
            .is_ok_and(|output| output.status.success());
        Ok(Self {
            laxity: there("laxity")?,
            laxityd: there("laxityd")?,
            library: there("liblaxity.so")?,
            folder: programs,
            python: imports.then_some(python),
        })
    }
}

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
    /// Programs.
    pub programs: Programs,
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
}

impl ContentionConfig {
    /// Rate of the router's ports that the loads are made for, Mbit/s.
    pub const RATE_MBIT: u32 = 8;

    /// The experiment at [`Self::RATE_MBIT`]: about three quarters of the port.
    #[must_use]
    pub fn new(programs: Programs) -> Self {
        Self {
            programs,
            seed: 1,
            repetitions: 1,
            seconds: 16.0,
            static_marks: true,
            collective: Collective {
                bytes: 48 << 10,
                messages: 3,
                period_us: 270_000,
            },
            p2d: Load {
                bytes: 512 << 10,
                period_us: 1_200_000,
                deadline_us: 3_000_000,
            },
            jitter: 0.3,
            reads: Load {
                bytes: 128 << 10,
                period_us: 1_210_000,
                deadline_us: 1_800_000,
            },
            chunk: None,
            window: None,
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
        }
    }

    const fn has_bulk(self) -> bool {
        !matches!(self, Self::CollectiveAlone)
    }

    const fn has_collective(self) -> bool {
        !matches!(self, Self::BulkAlone)
    }
}

/// Plays all of it.
///
/// # Errors
/// The router is not shaped, or a program did not do what it should.
pub fn run(guest: &Guest, config: &ContentionConfig) -> anyhow::Result<Contention> {
    let Some(rate_mbit) = guest.facts.rate_mbit else {
        bail!("contention needs a shaped router: give it a rate");
    };
    fs::create_dir_all(FOLDER).with_context(|| format!("creating {FOLDER}"))?;
    let mut phases = vec![Phase::BulkAlone, Phase::CollectiveAlone, Phase::Unscheduled];
    if config.static_marks {
        phases.push(Phase::StaticMarks);
    }
    phases.push(Phase::Laxity);
    let mut repetitions = Vec::new();
    for nth in 0..config.repetitions.max(1) {
        let seed = config.seed + u64::from(nth);
        let mut outcomes = BTreeMap::new();
        for &phase in &phases {
            let outcome = play(guest, config, phase, seed, rate_mbit)
                .with_context(|| format!("phase `{}`, seed {seed}", phase.name()))?;
            guest.say(&format!("seed {seed}, {}", outcome.line(phase)))?;
            outcomes.insert(phase, outcome);
        }
        repetitions.push(Repetition {
            seed,
            phases: outcomes,
        });
    }
    Ok(Contention {
        config: config.clone(),
        rate_mbit,
        repetitions,
    })
}

fn play(
    guest: &Guest,
    config: &ContentionConfig,
    phase: Phase,
    seed: u64,
    rate_mbit: u32,
) -> anyhow::Result<PhaseOutcome> {
    let folder = Path::new(FOLDER).join(format!("{phase:?}-{seed}"));
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let cast = Cast {
        guest,
        config,
        phase,
        seed,
        folder: &folder,
        // Starting Mooncake takes seconds, and under load everything takes longer.
        limit: Duration::from_secs_f64(60.0 + 6.0 * config.seconds),
    };
    let daemons = match phase {
        Phase::Laxity => cast.daemons(rate_mbit)?,
        _ => Vec::new(),
    };
    let bulk = phase.has_bulk().then(|| cast.bulk()).transpose()?;
    let before = guest.counters()?;
    let again_before = retransmissions()?;
    let busy_before = busy()?;
    let bulk = bulk.map(programs::Bulk::go).transpose()?;
    let collective = match phase.has_collective() {
        true => Some(cast.collective()?),
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
        shim: cast.reports()?,
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
