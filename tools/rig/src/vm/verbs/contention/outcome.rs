//! What came of it: per phase, and the ratios that matter.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use comfy_table::{CellAlignment, Table, presets};
use serde::{Deserialize, Serialize};

use super::verdict::{UNDER_LAXITY_MAX, UNSCHEDULED_MIN, Verdict};
use super::{ContentionConfig, Phase};

/// Everything.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Contention {
    /// What was played.
    pub config: ContentionConfig,
    /// Whether prefill-to-decode transfers were Mooncake's.
    pub with_mooncake: bool,
    /// By seed.
    pub repetitions: Vec<Repetition>,
}

impl Contention {
    /// Whether no seed failed in all of its attempts, and at least one was played.
    #[must_use]
    pub fn passed(&self) -> bool {
        let fails = |repetition: &Repetition| matches!(repetition.verdict(), Verdict::Fails(_));
        let seeds: BTreeSet<u64> = self.repetitions.iter().map(|r| r.seed).collect();
        let failed = |seed: &u64| {
            let of_seed = self.repetitions.iter().filter(|r| r.seed == *seed);
            of_seed.clone().all(fails)
        };
        !seeds.is_empty() && !seeds.iter().any(failed)
    }
}

/// All phases with the same arrivals.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Repetition {
    /// Of the arrivals.
    pub seed: u64,
    /// What came of each.
    pub phases: BTreeMap<Phase, PhaseOutcome>,
}

/// One phase.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PhaseOutcome {
    /// The collective, if it took part.
    pub collective: Option<Rounds>,
    /// Prefill-to-decode transfers, if they took part.
    pub p2d: Option<Deadlines>,
    /// Reads, if they took part.
    pub reads: Option<Deadlines>,
    /// Bytes that the router was offered towards host 1, where all data go, by DSCP; headers
    /// included.
    pub bytes_by_dscp: BTreeMap<u8, u64>,
    /// The same towards host 0: the collective's answers, requests to read, acknowledgements.
    pub back_by_dscp: BTreeMap<u8, u64>,
    /// Packets that the router dropped.
    pub drops: u64,
    /// How often a queue pair sent again what was not acknowledged in time.
    pub retransmissions: u64,
    /// Processors of the guest that were busy, of two.
    pub busy_processors: f64,
    /// What the shim says of each process.
    pub shim: Vec<ShimReport>,
    /// Warnings and errors in the daemons' logs.
    pub daemon_warnings: Vec<String>,
}

/// Completion times of the collective's rounds that began while the bulk was under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rounds {
    /// How many.
    pub rounds: usize,
    /// Mean, µs.
    pub mean_us: f64,
    /// Median, µs.
    pub p50_us: f64,
    /// 90th percentile, µs.
    pub p90_us: f64,
    /// 99th percentile, µs.
    pub p99_us: f64,
    /// Slowest, µs.
    pub max_us: f64,
}

impl Rounds {
    /// Of all rounds' times, in order.
    #[must_use]
    pub fn of(round_us: &[f64], config: &ContentionConfig) -> Self {
        let period_us = config.collective.period_us as f64;
        let mut began_us = 0.0_f64;
        let mut counted = Vec::new();
        for (nth, took_us) in round_us.iter().enumerate() {
            began_us = began_us.max(nth as f64 * period_us);
            if began_us > config.seconds * 1e6 {
                break;
            }
            counted.push(*took_us);
            began_us += took_us;
        }
        counted.sort_by(f64::total_cmp);
        let quantile = |q: f64| {
            let rank = (q * counted.len() as f64).ceil().max(1.0) as usize;
            counted.get(rank - 1).copied().unwrap_or_default()
        };
        Self {
            rounds: counted.len(),
            mean_us: counted.iter().sum::<f64>() / counted.len().max(1) as f64,
            p50_us: quantile(0.5),
            p90_us: quantile(0.9),
            p99_us: quantile(0.99),
            max_us: quantile(1.0),
        }
    }
}

/// Ratios of completion times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slowdown {
    /// Of the means.
    pub mean: f64,
    /// Of the medians.
    pub p50: f64,
    /// Of the 90th percentiles.
    pub p90: f64,
}

/// Transfers with deadlines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Deadlines {
    /// How many.
    pub transfers: u64,
    /// Those that met their deadline.
    pub met: u64,
    /// Bytes of all.
    pub bytes: u64,
    /// From the first arrival to the last end.
    pub seconds: f64,
    /// Median time from arrival to end, µs.
    pub p50_us: f64,
    /// 90th percentile, µs.
    pub p90_us: f64,
    /// Slowest, µs.
    pub max_us: f64,
}

/// What the shim wrote of one process (`LAXITY_REPORT`), as far as it is wanted here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShimReport {
    /// Name of the executable.
    pub program: String,
    /// Work requests that went through.
    pub work_requests: u64,
    /// Their payload.
    pub bytes: u64,
    /// Those that had to wait for a permit.
    pub deferred: u64,
    /// Those that went ahead of their permit.
    pub pulled: u64,
    /// Bytes under permits.
    pub scheduled_bytes: u64,
    /// Bytes that went without.
    pub bypassed_bytes: u64,
    /// Time without a daemon.
    pub unscheduled_ns: u64,
    /// DSCPs of its queue pairs.
    pub dscp: Vec<u8>,
}

/// What `collective` prints, as far as it is wanted here.
#[derive(Deserialize)]
pub(super) struct CollectiveLine {
    pub(super) round_us: Vec<f64>,
}

/// What `bulk` and the script print.
#[derive(Deserialize)]
pub(super) struct BulkLine {
    transfers: u64,
    met: u64,
    bytes: u64,
    seconds: f64,
    p50_us: f64,
    p90_us: f64,
    max_us: f64,
}

impl From<BulkLine> for Deadlines {
    fn from(line: BulkLine) -> Self {
        Self {
            transfers: line.transfers,
            met: line.met,
            bytes: line.bytes,
            seconds: line.seconds,
            p50_us: line.p50_us,
            p90_us: line.p90_us,
            max_us: line.max_us,
        }
    }
}

impl Deadlines {
    /// Missed ones.
    #[must_use]
    pub const fn missed(&self) -> u64 {
        self.transfers.saturating_sub(self.met)
    }
}

impl PhaseOutcome {
    /// Work requests that had to wait for a permit, in all processes.
    #[must_use]
    pub fn deferred(&self) -> u64 {
        self.shim.iter().map(|report| report.deferred).sum()
    }

    /// In a line.
    #[must_use]
    pub fn line(&self, phase: Phase) -> String {
        let rounds = self.collective.map_or_else(String::new, |rounds| {
            let ms = |us: f64| us / 1e3;
            format!(
                "; {} rounds of {:.1} ms (p50 {:.1}, p90 {:.1}, p99 {:.1})",
                rounds.rounds,
                ms(rounds.mean_us),
                ms(rounds.p50_us),
                ms(rounds.p90_us),
                ms(rounds.p99_us)
            )
        });
        let bulk = |name: &str, load: Option<Deadlines>| {
            load.map_or_else(String::new, |load| {
                format!(
                    "; {name} {} of {} in time (p50 {:.0} ms, slowest {:.0} ms)",
                    load.met,
                    load.transfers,
                    load.p50_us / 1e3,
                    load.max_us / 1e3
                )
            })
        };
        format!(
            "{}{rounds}{}{}; {} deferred, {} dropped, {} retransmissions, {:.2} processors busy",
            phase.name(),
            bulk("P2D", self.p2d),
            bulk("reads", self.reads),
            self.deferred(),
            self.drops,
            self.retransmissions,
            self.busy_processors
        )
    }
}

impl Repetition {
    /// Completion of the collective in a phase, as multiples of that alone.
    #[must_use]
    pub fn slowdown(&self, phase: Phase) -> Option<Slowdown> {
        let rounds = |phase| self.phases.get(&phase)?.collective;
        let (alone, then) = (rounds(Phase::CollectiveAlone)?, rounds(phase)?);
        Some(Slowdown {
            mean: then.mean_us / alone.mean_us,
            p50: then.p50_us / alone.p50_us,
            p90: then.p90_us / alone.p90_us,
        })
    }
}

impl fmt::Display for Contention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::UTF8_HORIZONTAL_ONLY).set_header([
            "seed",
            "phase",
            "collective ms: mean",
            "p50",
            "p90",
            "p99",
            "× alone: mean",
            "p50",
            "p90",
            "P2D in time",
            "reads in time",
            "bulk MB/s",
            "deferred",
            "DSCP: kB towards host 1",
        ]);
        for column in table.column_iter_mut().skip(2).take(11) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        for repetition in &self.repetitions {
            for (&phase, outcome) in &repetition.phases {
                let mut row = vec![repetition.seed.to_string(), phase.name().to_owned()];
                let none = || String::from("–");
                match outcome.collective {
                    Some(rounds) => row.extend(
                        [rounds.mean_us, rounds.p50_us, rounds.p90_us, rounds.p99_us]
                            .map(|us| format!("{:.1}", us / 1e3)),
                    ),
                    None => row.extend(std::iter::repeat_with(none).take(4)),
                }
                match repetition.slowdown(phase) {
                    Some(Slowdown { mean, p50, p90 }) => {
                        row.extend([mean, p50, p90].map(|x| format!("{x:.2}")));
                    }
                    None => row.extend([none(), none(), none()]),
                }
                let met = |load: Option<Deadlines>| {
                    load.map_or_else(none, |load| format!("{}/{}", load.met, load.transfers))
                };
                let speed: f64 = [outcome.p2d, outcome.reads]
                    .into_iter()
                    .flatten()
                    .map(|load| load.bytes as f64 / load.seconds / 1e6)
                    .sum();
                row.extend([
                    met(outcome.p2d),
                    met(outcome.reads),
                    format!("{speed:.2}"),
                    outcome.deferred().to_string(),
                ]);
                let bytes: Vec<String> = outcome
                    .bytes_by_dscp
                    .iter()
                    .map(|(dscp, bytes)| format!("{dscp}: {}", bytes / 1000))
                    .collect();
                row.push(bytes.join(", "));
                table.add_row(row);
            }
        }
        write!(f, "{table}")?;
        for repetition in &self.repetitions {
            let seed = repetition.seed;
            match repetition.verdict() {
                Verdict::Holds => write!(
                    f,
                    "\nseed {seed}: holds (collective at most {UNDER_LAXITY_MAX} × alone under \
                     Laxity \
                     and at least {UNSCHEDULED_MIN} × unscheduled; nothing late that could be in \
                     time)"
                )?,
                Verdict::Fails(wrong) => write!(f, "\nseed {seed}: FAILED: {}", wrong.join("; "))?,
                Verdict::Inconclusive(why) => write!(f, "\nseed {seed}: inconclusive: {why}")?,
            }
        }
        if !self.with_mooncake {
            write!(f, "\nwithout Mooncake: a test program wrote in its place")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rounds_that_began_in_time_count() {
        let mut config = ContentionConfig {
            seconds: 1.0,
            ..ContentionConfig::default()
        };
        config.collective.period_us = 250_000;
        // The second holds up the third; the fifth would begin at 1.05 s.
        let took = [100e3, 600e3, 100e3, 100e3, 100e3, 900e3];
        let rounds = Rounds::of(&took, &config);
        assert_eq!(rounds.rounds, 4, "{rounds:?}");
        assert_eq!(rounds.max_us, 600e3);
        assert_eq!(rounds.p50_us, 100e3);
        assert!((rounds.mean_us - 225_000.0).abs() < 1.0);
    }
}
