//! A figure: the measured numbers, the gates that it has to pass, and the verdict.
//!
//! Gates come from the design. They are absolute numbers, or ratios to P (request line and reply
//! line) of the same run.

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
}

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
}

impl Gate {
    pub(crate) const fn at_most(quantile: Quantile, limit: Limit) -> Self {
        Self { quantile, side: Side::AtMost, limit }
    }

    pub(crate) const fn at_least(limit: Limit) -> Self {
        Self { quantile: Quantile::P50, side: Side::AtLeast, limit }
    }

    /// Reports whether the figure passes, or `None` if it lacks the number or its reference.
    fn passes(&self, summary: &Summary) -> Option<bool> {
        let Summary { p50, p99, p999, of_p, .. } = *summary;
        let (numbers, limit) = match self.limit {
            Limit::TimesP(limit) => {
                let Ratios { p50, p99, p999 } = of_p?;
                ([Some(p50), Some(p99), Some(p999)], limit)
            }
            Limit::Value(limit) => ([Some(p50), p99, p999], limit),
        };
        let value = numbers[self.quantile as usize]?;
        Some(match self.side {
            Side::AtMost => value <= limit,
            Side::AtLeast => value >= limit,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    /// The figure has no gate, or none that can be judged.
    None,
    Ok,
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
    pub(crate) fn verdict(&self) -> Verdict {
        let summary = match &self.outcome {
            Outcome::Measured(summary) => summary,
            Outcome::Skipped(_) => return Verdict::Skipped,
            Outcome::Failed(_) => return Verdict::Failed,
        };
        match self.row.gates.iter().filter_map(|gate| gate.passes(summary)).min() {
            None => Verdict::None,
            Some(true) => Verdict::Ok,
            Some(false) => Verdict::Missed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(p50: f64, p99: f64, p: f64) -> Figure {
        Figure {
            row: Row::latency("x", "x").gates([
                Gate::at_most(Quantile::P50, Limit::TimesP(1.15)),
                Gate::at_most(Quantile::P99, Limit::TimesP(1.4)),
            ]),
            outcome: Outcome::Measured(Summary {
                p50,
                p99: Some(p99),
                of_p: Some(Ratios { p50: p50 / p, p99: p99 / p, p999: 0.0 }),
                ..Summary::default()
            }),
        }
    }

    #[test]
    fn the_worst_gate_decides() {
        for (p50, p99, verdict) in [
            (200.0, 900.0, Verdict::Missed),
            (300.0, 300.0, Verdict::Ok),
            (330.0, 300.0, Verdict::Missed),
        ] {
            assert_eq!(figure(p50, p99, 280.0).verdict(), verdict, "{p50}");
        }
    }

    #[test]
    fn without_a_reference_no_ratio_is_judged() {
        let mut figure = figure(230.0, 300.0, 1.0);
        figure.outcome = Outcome::Measured(Summary { p50: 230.0, ..Summary::default() });
        assert_eq!(figure.verdict(), Verdict::None);
    }
}
