//! A figure: what was measured, the gates it has to pass, and the verdict.
//!
//! Gates are those of the design: ratios to P (request line and reply line) or P1 (one bouncing
//! cache line) measured in the same run, or absolute numbers where the design gives those.

use serde::Serialize;

use crate::sample::{Ratios, Summary};

/// What the numbers of a figure count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Unit {
    /// Nanoseconds: shown as ns, µs or ms, whichever reads best.
    Nanoseconds,
    /// Events per second, shown in millions.
    PerSecond,
    /// Instructions.
    Instructions,
    /// Percent of one core.
    PercentOfCore,
    /// System calls per million permits.
    PerMillion,
}

/// Which number of the figure a gate looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Quantile {
    P50,
    P99,
    P999,
}

/// What a gate compares with.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "of", content = "value")]
pub(crate) enum Limit {
    /// Multiples of P's median.
    TimesP(f64),
    /// Multiples of P1's median.
    TimesP1(f64),
    /// The figure's own unit.
    Value(f64),
}

/// Which side of the limit is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Side {
    AtMost,
    AtLeast,
}

/// One requirement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Gate {
    pub(crate) quantile: Quantile,
    pub(crate) side: Side,
    pub(crate) limit: Limit,
    /// Beyond this the verdict is `excellent`.
    pub(crate) excellent: Option<Limit>,
}

impl Gate {
    /// The quantile may not exceed `limit`.
    pub(crate) const fn at_most(quantile: Quantile, limit: Limit) -> Self {
        Self {
            quantile,
            side: Side::AtMost,
            limit,
            excellent: None,
        }
    }

    /// The median may not fall below `limit`.
    pub(crate) const fn at_least(limit: Limit) -> Self {
        Self {
            quantile: Quantile::P50,
            side: Side::AtLeast,
            limit,
            excellent: None,
        }
    }

    /// The same with a mark above passing.
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
    /// What has to be compared with what; `None` if the figure or its reference lacks it.
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

/// How a figure stands against its gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    /// No gate, or none that could be judged.
    None,
    Ok,
    Excellent,
    Missed,
    /// Not measurable on this machine; the figure says why.
    Skipped,
    /// The measurement itself went wrong.
    Failed,
}

/// What is to be measured.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    /// For `--only` and for machines.
    pub(crate) name: &'static str,
    /// For people.
    pub(crate) title: String,
    pub(crate) unit: Unit,
    pub(crate) gates: Vec<Gate>,
    /// How it is measured, where that is not obvious.
    pub(crate) note: Option<String>,
}

impl Row {
    /// A row of latencies without gate or note.
    pub(crate) fn latency(name: &'static str, title: impl Into<String>) -> Self {
        Self::counting(name, title, Unit::Nanoseconds)
    }

    /// A row of another unit.
    pub(crate) fn counting(name: &'static str, title: impl Into<String>, unit: Unit) -> Self {
        let (title, gates, note) = (title.into(), Vec::new(), None);
        Self {
            name,
            title,
            unit,
            gates,
            note,
        }
    }

    /// What it has to pass.
    pub(crate) fn gates(mut self, gates: impl IntoIterator<Item = Gate>) -> Self {
        self.gates.extend(gates);
        self
    }

    /// How it is measured.
    pub(crate) fn note(mut self, note: impl Into<String>) -> Self {
        self.note = Some(note.into());
        self
    }
}

/// A row of the report.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    #[serde(flatten)]
    pub(crate) row: Row,
    pub(crate) outcome: Outcome,
}

/// What came of measuring.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    Measured(Summary),
    Skipped(String),
    Failed(String),
}

impl Figure {
    /// Worst verdict of the gates; `excellent` if one of them has such a mark and it is reached
    /// while all others pass.
    pub(crate) fn verdict(&self) -> Verdict {
        let summary = match &self.outcome {
            Outcome::Measured(summary) => summary,
            Outcome::Skipped(_) => return Verdict::Skipped,
            Outcome::Failed(_) => return Verdict::Failed,
        };
        let verdicts: Vec<Verdict> = self
            .row
            .gates
            .iter()
            .map(|gate| gate.judge(summary))
            .collect();
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
        let ratios = |ns| Ratios {
            p50: p50 / ns,
            p99: p99 / ns,
            p999: 0.0,
        };
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
        figure.outcome = Outcome::Measured(Summary {
            p50: 230.0,
            ..Summary::default()
        });
        assert_eq!(figure.verdict(), Verdict::None);
    }
}
