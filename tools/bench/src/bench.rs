//! One run: how long to measure, which rows are wanted, and what came of each.

use std::time::Duration;

use anyhow::Context;

use crate::clock::Clock;
use crate::figure::{Figure, Outcome, Row};
use crate::machine::Cores;
use crate::reference;
use crate::sample::{Paired, Percentiles, Summary};

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// Repetitions of each figure, each in processes of its own, so that the placement of pages
    /// and processes is part of the spread.
    pub(crate) repetitions: usize,
    /// Timed round trips in a repetition.
    pub(crate) round_trips: usize,
    /// Seconds over which an idle daemon is watched.
    pub(crate) idle_seconds: u64,
}

impl Effort {
    /// What the gates are judged with.
    pub(crate) const FULL: Self = Self {
        repetitions: 9,
        round_trips: 100_000,
        idle_seconds: 10,
    };
    /// A look, not a verdict.
    pub(crate) const QUICK: Self = Self {
        repetitions: 3,
        round_trips: 20_000,
        idle_seconds: 2,
    };

    /// How long a rate is measured for in one repetition.
    pub(crate) fn stretch(self) -> Duration {
        Duration::from_millis(if self.repetitions < 5 { 60 } else { 250 })
    }
}

/// The state of a run.
pub(crate) struct Bench {
    pub(crate) clock: Clock,
    pub(crate) cores: Cores,
    pub(crate) effort: Effort,
    /// All repetitions of P1 and P, made beside those of the figures.
    pub(crate) p1: Vec<Percentiles>,
    pub(crate) p: Vec<Percentiles>,
    pub(crate) figures: Vec<Figure>,
    /// Rows whose names contain one of these are measured; all, if there are none.
    pub(crate) only: Vec<String>,
}

/// This machine cannot show the figure; the reason goes into the report and is no failure.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Skip(pub(crate) String);

/// What a measurement returns: its numbers, and optionally something to say about them.
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
    /// Whether the row was asked for.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| name.contains(part.as_str()))
    }

    /// Measures one row, unless it was not asked for. A failure becomes part of the report: the
    /// rows after it are worth having.
    pub(crate) fn measure<M: Into<Measured>>(
        &mut self,
        mut row: Row,
        measurement: impl FnOnce(&mut Self) -> anyhow::Result<M>,
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
            Err(error) => match error.downcast_ref::<Skip>() {
                Some(skip) => Outcome::Skipped(skip.to_string()),
                None => Outcome::Failed(format!("{error:#}")),
            },
        };
        self.figures.push(Figure { row, outcome });
    }

    /// The core of the other side.
    ///
    /// # Errors
    /// [`Skip`] on a machine with one core.
    pub(crate) fn far_core(&self) -> anyhow::Result<usize> {
        Ok(self
            .cores
            .far
            .ok_or_else(|| Skip("needs two cores".into()))?)
    }

    /// Repeats a round trip, with P1 and P before and after each repetition. One during which the
    /// machine changed is repeated.
    pub(crate) fn latencies(
        &mut self,
        mut repetition: impl FnMut(&Self) -> anyhow::Result<Percentiles>,
    ) -> anyhow::Result<Summary> {
        let mut all = Vec::with_capacity(self.effort.repetitions);
        let mut before = self.references_now()?;
        let mut patience = 2 * self.effort.repetitions;
        while all.len() < self.effort.repetitions {
            let percentiles =
                repetition(self).with_context(|| format!("repetition {}", all.len() + 1))?;
            let after = self.references_now()?;
            if patience == 0 || before.agrees_with(after) {
                let beside = before.between(after);
                all.push(Paired {
                    percentiles,
                    p: beside.p,
                    p1: beside.p1,
                });
            } else {
                patience -= 1;
            }
            before = after;
        }
        Ok(Summary::of_paired(&all))
    }

    /// Repeats a latency measurement that crosses no cores.
    pub(crate) fn latencies_alone(
        &mut self,
        mut repetition: impl FnMut(&Self) -> anyhow::Result<Percentiles>,
    ) -> anyhow::Result<Summary> {
        let all = (0..self.effort.repetitions)
            .map(|i| repetition(self).with_context(|| format!("repetition {}", i + 1)))
            .collect::<anyhow::Result<Vec<_>>>()?;
        Ok(Summary::of_latencies(&all))
    }

    /// Repeats a measurement that gives one number, and says how far apart the cores were.
    pub(crate) fn numbers(
        &mut self,
        mut repetition: impl FnMut(&Self) -> anyhow::Result<f64>,
    ) -> anyhow::Result<Measured> {
        let mut all = Vec::with_capacity(self.effort.repetitions);
        let mut beside = vec![self.references_now()?];
        for i in 0..self.effort.repetitions {
            all.push(repetition(self).with_context(|| format!("repetition {}", i + 1))?);
            beside.push(self.references_now()?);
        }
        let p = || beside.iter().filter_map(|beside| beside.p);
        let (least, most) = (p().fold(f64::MAX, f64::min), p().fold(0.0, f64::max));
        let remark = format!("P was {least:.0} to {most:.0} ns meanwhile.");
        Ok(Measured {
            summary: Summary::of_numbers(all),
            remark: Some(remark),
        })
    }

    /// One more repetition of P1 and P, where there are two cores; their medians.
    pub(crate) fn references_now(&mut self) -> anyhow::Result<Beside> {
        let Some(far) = self.cores.far else {
            return Ok(Beside::default());
        };
        let round_trips = self.effort.round_trips / 4;
        let p1 = reference::one_line(self.clock, far, round_trips)?;
        let p = reference::two_lines(self.clock, far, round_trips)?;
        self.p1.push(p1);
        self.p.push(p);
        Ok(Beside {
            p: Some(p.p50),
            p1: Some(p1.p50),
        })
    }
}

/// P and P1 at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Beside {
    p: Option<f64>,
    p1: Option<f64>,
}

impl Beside {
    /// Whether the cores were as far apart at both moments.
    fn agrees_with(self, other: Self) -> bool {
        let close = |a: Option<f64>, b: Option<f64>| match (a, b) {
            (Some(a), Some(b)) => (a - b).abs() <= 0.15 * a.max(b),
            _ => true,
        };
        close(self.p, other.p) && close(self.p1, other.p1)
    }

    fn between(self, other: Self) -> Self {
        let middle = |a: Option<f64>, b: Option<f64>| Some(f64::midpoint(a?, b?));
        Self {
            p: middle(self.p, other.p),
            p1: middle(self.p1, other.p1),
        }
    }
}
