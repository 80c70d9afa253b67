//! The state of one run: how much to measure, which rows to measure, and their results.

use std::time::Duration;

use crate::clock::Clock;
use crate::error::{BenchError, Result};
use crate::figure::{Figure, Outcome, Row};
use crate::machine::Cores;
use crate::reference;
use crate::sample::{Paired, Percentiles, Summary};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// Repetitions of each figure. Each uses new processes, so that the placement of pages and
    /// processes is part of the spread.
    pub(crate) repetitions: usize,
    pub(crate) round_trips: usize,
    pub(crate) idle_seconds: u64,
}

impl Effort {
    pub(crate) const FULL: Self = Self { repetitions: 9, round_trips: 100_000, idle_seconds: 10 };
    pub(crate) const QUICK: Self = Self { repetitions: 3, round_trips: 20_000, idle_seconds: 2 };

    pub(crate) fn stretch(self) -> Duration {
        Duration::from_millis(if self.repetitions < 5 { 60 } else { 250 })
    }
}

pub(crate) struct Bench {
    pub(crate) clock: Clock,
    pub(crate) cores: Cores,
    pub(crate) effort: Effort,
    pub(crate) p: Vec<Percentiles>,
    pub(crate) figures: Vec<Figure>,
    /// Parts of names of the rows to measure. If empty, all rows are measured.
    pub(crate) only: Vec<String>,
}

/// The result of a measurement: its numbers and an optional remark.
pub(crate) struct Measured {
    pub(crate) summary: Summary,
    pub(crate) remark: Option<String>,
}

impl From<Summary> for Measured {
    fn from(summary: Summary) -> Self {
        let remark = None;
        Self { summary, remark }
    }
}

impl Bench {
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| name.contains(part.as_str()))
    }

    /// Measures a row if it is selected. A failure becomes part of the report, so that later rows
    /// are still measured.
    pub(crate) fn measure<M: Into<Measured>>(
        &mut self,
        mut row: Row,
        measurement: impl FnOnce(&mut Self) -> Result<M>,
    ) {
        if !self.wants(row.name) {
            return;
        }
        eprintln!("{} …", row.title);
        let outcome = match measurement(self) {
            Ok(measured) => {
                let Measured { summary, remark } = measured.into();
                let notes: Vec<_> = row.note.into_iter().chain(remark).collect();
                row.note = (!notes.is_empty()).then(|| notes.join(" "));
                Outcome::Measured(summary)
            }
            Err(BenchError::Skip(why)) => Outcome::Skipped(why),
            Err(error) => Outcome::Failed(error.to_string()),
        };
        self.figures.push(Figure { row, outcome });
    }

    pub(crate) fn far_core(&self) -> Result<usize> {
        self.cores.far.ok_or_else(|| BenchError::Skip("needs two cores".to_owned()))
    }

    /// Repeats a round trip with P before and after each repetition. If these differ much, the
    /// machine changed and the repetition is discarded.
    pub(crate) fn latencies(
        &mut self,
        mut repetition: impl FnMut(&Self) -> Result<Percentiles>,
    ) -> Result<Summary> {
        let mut all = Vec::with_capacity(self.effort.repetitions);
        let mut before = self.reference_now()?;
        let mut patience = 2 * self.effort.repetitions;
        while all.len() < self.effort.repetitions {
            let percentiles = repetition(self).map_err(BenchError::repetition(all.len() + 1))?;
            let after = self.reference_now()?;
            if patience == 0 || agree(before, after) {
                let p = before.zip(after).map(|(before, after)| f64::midpoint(before, after));
                all.push(Paired { percentiles, p });
            } else {
                patience -= 1;
            }
            before = after;
        }
        Ok(Summary::of_paired(&all))
    }

    /// Repeats a measurement with a single number, and remarks the range of P meanwhile.
    pub(crate) fn numbers(
        &mut self,
        mut repetition: impl FnMut(&Self) -> Result<f64>,
    ) -> Result<Measured> {
        let mut all = Vec::with_capacity(self.effort.repetitions);
        let mut beside = vec![self.reference_now()?];
        for i in 0..self.effort.repetitions {
            all.push(repetition(self).map_err(BenchError::repetition(i + 1))?);
            beside.push(self.reference_now()?);
        }
        let p = || beside.iter().flatten().copied();
        let (least, most) = (p().fold(f64::MAX, f64::min), p().fold(0.0, f64::max));
        let remark = format!("P was {least:.0} to {most:.0} ns meanwhile.");
        Ok(Measured { summary: Summary::of_numbers(all), remark: Some(remark) })
    }

    /// Measures P once more if there are two cores. Returns its median.
    pub(crate) fn reference_now(&mut self) -> Result<Option<f64>> {
        let Some(far) = self.cores.far else { return Ok(None) };
        let p = reference::round_trips(self.clock, far, self.effort.round_trips / 4)?;
        self.p.push(p);
        Ok(Some(p.p50))
    }
}

/// Reports whether two values of P are so close that the machine didn't change between them.
fn agree(before: Option<f64>, after: Option<f64>) -> bool {
    let close = |(a, b): (f64, f64)| (a - b).abs() <= 0.15 * a.max(b);
    before.zip(after).is_none_or(close)
}
