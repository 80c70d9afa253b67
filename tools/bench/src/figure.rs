//! A figure: the measured numbers, the gates that it has to pass, and the verdict.
//!
//! Gates come from the design. They are absolute numbers, or ratios to P (request line and reply
//! line) or P1 (one bouncing cache line) of the same run.

use serde::Serialize;

use crate::sample::{Ratios, Summary};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Unit {
    Nanoseconds,
    /// Events per second, shown in millions.
    PerSecond,
    Instructions,
    PercentOfCore,
    PerMillion,
}

/// The number of a figure that a gate checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Quantile {
    P50,
    P99,
    P999,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "of", content = "value")]
pub(crate) enum Limit {
    TimesP(f64),
    TimesP1(f64),
    Value(f64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Side {
    AtMost,
    AtLeast,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Gate {
    pub(crate) quantile: Quantile,
    pub(crate) side: Side,
    pub(crate) limit: Limit,
    pub(crate) excellent: Option<Limit>,
}

impl Gate {
    /// Creates a gate whose quantile may not exceed `limit`.
    pub(crate) const fn at_most(quantile: Quantile, limit: Limit) -> Self {
        Self { quantile, side: Side::AtMost, limit, excellent: None }
    }

    /// Creates a gate whose median may not be below `limit`.
    pub(crate) const fn at_least(limit: Limit) -> Self {
        Self { quantile: Quantile::P50, side: Side::AtLeast, limit, excellent: None }
    }

    pub(crate) const fn excellent(mut self, limit: Limit) -> Self {
        self.excellent = Some(limit);
        self
    }

    fn judge(&self, summary: &Summary) -> Verdict {
        let verdict = |limit: Limit| {
            let (value, limit) = limit.compare(self.quantile, summary)?;
            Some(match self.side {
                Side::AtMost => value <= limit,
                Side::AtLeast => value >= limit,
            })
        };
        match (verdict(self.limit), self.excellent.and_then(verdict)) {
            (None, _) => Verdict::None,
            (Some(false), _) => Verdict::Missed,
            (Some(true), Some(true)) => Verdict::Excellent,
            (Some(true), _) => Verdict::Ok,
        }
    }
}

impl Limit {
    /// Returns the values to compare, or `None` if the figure or its reference lacks one.
    fn compare(self, quantile: Quantile, summary: &Summary) -> Option<(f64, f64)> {
        let of = |ratios: Option<Ratios>| {
            ratios.map(|ratios| match quantile {
                Quantile::P50 => ratios.p50,
                Quantile::P99 => ratios.p99,
                Quantile::P999 => ratios.p999,
            })
        };
        match self {
            Self::TimesP(limit) => Some((of(summary.of_p)?, limit)),
            Self::TimesP1(limit) => Some((of(summary.of_p1)?, limit)),
            Self::Value(limit) => {
                let value = match quantile {
                    Quantile::P50 => Some(summary.p50),
                    Quantile::P99 => summary.p99,
                    Quantile::P999 => summary.p999,
                };
                Some((value?, limit))
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    /// The figure has no gate, or none that can be judged.
    None,
    Ok,
    Excellent,
    Missed,
    /// This machine can't measure the figure. The figure contains the reason.
    Skipped,
    Failed,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    /// Name for `--only` and for the JSON document.
    pub(crate) name: &'static str,
    pub(crate) title: String,
    pub(crate) unit: Unit,
    pub(crate) gates: Vec<Gate>,
    /// Details of the method, if they aren't obvious.
    pub(crate) note: Option<String>,
}

impl Row {
    /// Creates a row of latencies without gates or note.
    pub(crate) fn latency(name: &'static str, title: impl Into<String>) -> Self {
        Self::counting(name, title, Unit::Nanoseconds)
    }

    pub(crate) fn counting(name: &'static str, title: impl Into<String>, unit: Unit) -> Self {
        let (title, gates, note) = (title.into(), Vec::new(), None);
        Self { name, title, unit, gates, note }
    }

    pub(crate) fn gates(mut self, gates: impl IntoIterator<Item = Gate>) -> Self {
        self.gates.extend(gates);
        self
    }

    pub(crate) fn note(mut self, note: impl Into<String>) -> Self {
        self.note = Some(note.into());
        self
    }
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    #[serde(flatten)]
    pub(crate) row: Row,
    pub(crate) outcome: Outcome,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    Measured(Summary),
    Skipped(String),
    Failed(String),
}

impl Figure {
    /// Returns the worst verdict of the gates. It is `excellent` if all gates pass and at least one
    /// reaches its limit for that.
    pub(crate) fn verdict(&self) -> Verdict {
        let summary = match &self.outcome {
            Outcome::Measured(summary) => summary,
            Outcome::Skipped(_) => return Verdict::Skipped,
            Outcome::Failed(_) => return Verdict::Failed,
        };
        let verdicts: Vec<Verdict> =
            self.row.gates.iter().map(|gate| gate.judge(summary)).collect();
        [Verdict::Missed, Verdict::Excellent, Verdict::Ok]
            .into_iter()
            .find(|verdict| verdicts.contains(verdict))
            .unwrap_or(Verdict::None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(p50: f64, p99: f64, p: f64, p1: f64) -> Figure {
        let ratios = |ns| Ratios { p50: p50 / ns, p99: p99 / ns, p999: 0.0 };
        Figure {
            row: Row::latency("x", "x").gates([
                Gate::at_most(Quantile::P50, Limit::TimesP(1.15)).excellent(Limit::TimesP1(1.05)),
                Gate::at_most(Quantile::P99, Limit::TimesP(1.4)),
            ]),
            outcome: Outcome::Measured(Summary {
                p50,
                p99: Some(p99),
                of_p: Some(ratios(p)),
                of_p1: Some(ratios(p1)),
                ..Summary::default()
            }),
        }
    }

    #[test]
    fn the_worst_gate_decides_and_excellence_needs_all_gates_passed() {
        for (p50, p99, verdict) in [
            (200.0, 900.0, Verdict::Missed),
            (230.0, 300.0, Verdict::Excellent),
            (300.0, 300.0, Verdict::Ok),
        ] {
            assert_eq!(figure(p50, p99, 280.0, 220.0).verdict(), verdict, "{p50}");
        }
    }

    #[test]
    fn without_a_reference_no_ratio_is_judged() {
        let mut figure = figure(230.0, 300.0, 1.0, 1.0);
        figure.outcome = Outcome::Measured(Summary { p50: 230.0, ..Summary::default() });
        assert_eq!(figure.verdict(), Verdict::None);
    }
}
