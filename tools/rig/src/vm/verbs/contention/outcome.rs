//! The results of the contention: per phase, and the ratios between phases.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use comfy_table::{CellAlignment, Table, presets};
use serde::{Deserialize, Serialize};

use super::verdict::{UNDER_LAXITY_MAX, UNSCHEDULED_MIN, Verdict};
use super::{COLLECTIVE, ContentionConfig, Phase};
use crate::vm::verbs::case::LibraryReport;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Contention {
    pub config: ContentionConfig,
    pub with_mooncake: bool,
    /// Results of each attempt with each seed.
    pub repetitions: Vec<Repetition>,
}

impl Contention {
    /// Reports whether no seed failed in all of its attempts, and at least one was played.
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

/// Results of all phases with the same arrivals.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Repetition {
    pub seed: u64,
    /// Result of each phase.
    pub phases: BTreeMap<Phase, PhaseOutcome>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PhaseOutcome {
    /// Result of the collective, if it took part.
    pub collective: Option<Rounds>,
    /// Result of the P2D transfers, if they took part.
    pub p2d: Option<Deadlines>,
    /// Result of the reads, if they took part.
    pub reads: Option<Deadlines>,
    /// Bytes that were offered to the router's port towards host 1, by DSCP, including headers. All
    /// data use this port.
    pub bytes_by_dscp: BTreeMap<u8, u64>,
    /// Packets that the router dropped.
    pub drops: u64,
    /// Times that a queue pair sent again because an acknowledgement did not come in time.
    pub retransmissions: u64,
    pub library: LibraryReport,
}

/// Completion times of the collective's rounds that began while bulk transfers were running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rounds {
    pub rounds: usize,
    pub mean_us: f64,
    pub p50_us: f64,
    pub p90_us: f64,
}

impl Rounds {
    /// Returns the statistics of the rounds that count. `round_us` has the times of all, in order.
    pub fn of(round_us: &[f64], config: &ContentionConfig) -> Self {
        let period_us = COLLECTIVE.period_us as f64;
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
        }
    }
}

/// Results of transfers with deadlines, as `bulk` and `mooncake_p2d.py` print them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Deadlines {
    pub transfers: u64,
    /// Transfers that met their deadline.
    pub met: u64,
    pub bytes: u64,
    pub seconds: f64,
    pub p50_us: f64,
    pub p90_us: f64,
    pub max_us: f64,
}

/// The fields of `collective`'s output that are used here.
#[derive(Deserialize)]
pub(super) struct CollectiveLine {
    pub(super) round_us: Vec<f64>,
}

impl Deadlines {
    /// Returns the number of transfers that missed their deadline.
    pub const fn missed(&self) -> u64 {
        self.transfers.saturating_sub(self.met)
    }
}

impl PhaseOutcome {
    pub fn line(&self, phase: Phase) -> String {
        let mut text = phase.name().to_owned();
        if let Some(rounds) = self.collective {
            let [mean, p50, p90] =
                [rounds.mean_us, rounds.p50_us, rounds.p90_us].map(|us| us / 1e3);
            let count = rounds.rounds;
            text += &format!("; {count} rounds of {mean:.1} ms (p50 {p50:.1}, p90 {p90:.1})");
        }
        for (name, load) in [("P2D", self.p2d), ("reads", self.reads)] {
            if let Some(load) = load {
                let (met, all) = (load.met, load.transfers);
                let [p50, max] = [load.p50_us, load.max_us].map(|us| us / 1e3);
                text += &format!("; {name} {met} of {all} in time (p50 {p50:.0} ms, ");
                text += &format!("slowest {max:.0} ms)");
            }
        }
        let (deferred, drops, again) = (self.library.deferred, self.drops, self.retransmissions);
        text + &format!("; {deferred} deferred, {drops} dropped, {again} retransmissions")
    }
}

impl Repetition {
    /// Returns the mean completion time of the collective in a phase, as a multiple of that alone.
    pub fn slowdown(&self, phase: Phase) -> Option<f64> {
        let mean = |phase| Some(self.phases.get(&phase)?.collective?.mean_us);
        Some(mean(phase)? / mean(Phase::CollectiveAlone)?)
    }

    fn row(&self, phase: Phase, outcome: &PhaseOutcome) -> Vec<String> {
        let none = || String::from("–");
        let ms = |of: fn(Rounds) -> f64| {
            let rounds = outcome.collective;
            rounds.map_or_else(none, |rounds| format!("{:.1}", of(rounds) / 1e3))
        };
        let loads = [outcome.p2d, outcome.reads];
        let met = |load: Option<Deadlines>| {
            load.map_or_else(none, |load| format!("{}/{}", load.met, load.transfers))
        };
        let speed = |load: Deadlines| load.bytes as f64 / load.seconds / 1e6;
        let speed: f64 = loads.into_iter().flatten().map(speed).sum();
        let by_dscp = outcome.bytes_by_dscp.iter();
        let bytes: Vec<_> =
            by_dscp.map(|(dscp, bytes)| format!("{dscp}: {}", bytes / 1000)).collect();
        let slowdown = self.slowdown(phase);
        vec![
            self.seed.to_string(),
            phase.name().to_owned(),
            ms(|rounds| rounds.mean_us),
            ms(|rounds| rounds.p50_us),
            ms(|rounds| rounds.p90_us),
            slowdown.map_or_else(none, |times| format!("{times:.2}")),
            met(outcome.p2d),
            met(outcome.reads),
            format!("{speed:.2}"),
            outcome.library.deferred.to_string(),
            bytes.join(", "),
        ]
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
            "mean, × alone",
            "P2D in time",
            "reads in time",
            "bulk MB/s",
            "deferred",
            "DSCP: kB towards host 1",
        ]);
        for column in table.column_iter_mut().skip(2).take(8) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        for repetition in &self.repetitions {
            for (&phase, outcome) in &repetition.phases {
                table.add_row(repetition.row(phase, outcome));
            }
        }
        write!(f, "{table}")?;
        for repetition in &self.repetitions {
            let seed = repetition.seed;
            match repetition.verdict() {
                Verdict::Holds => write!(
                    f,
                    "\nseed {seed}: holds (collective at most {UNDER_LAXITY_MAX} × alone under \
                     Laxity and at least {UNSCHEDULED_MIN} × unscheduled; nothing late that could \
                     be in time)"
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
        let config = ContentionConfig { seconds: 1.6, ..ContentionConfig::default() };
        // The second round delays the third. The fifth would begin at 1.68 s.
        let took = [160e3, 960e3, 160e3, 160e3, 160e3, 900e3];
        let rounds = Rounds::of(&took, &config);
        assert_eq!(rounds.rounds, 4, "{rounds:?}");
        assert_eq!((rounds.p50_us, rounds.p90_us), (160e3, 960e3));
        assert!((rounds.mean_us - 360_000.0).abs() < 1.0);
    }
}
