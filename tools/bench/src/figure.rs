//! A figure: what was measured, the gates it has to pass, and the verdict.
//!
//! Gates are those of the design: ratios to P (request line and reply line) or P1 (one bouncing
//! cache line) measured in the same run, or absolute numbers where the design gives those.

use serde::Serialize;

use crate::sample::{Percentiles, Summary};

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

    fn judge(&self, summary: &Summary, references: &References) -> Verdict {
        let value = match self.quantile {
            Quantile::P50 => Some(summary.p50),
            Quantile::P99 => summary.p99,
            Quantile::P999 => summary.p999,
        };
        let (Some(value), Some(limit)) = (value, references.resolve(self.limit)) else {
            return Verdict::None;
        };
        let passes = |limit: f64| match self.side {
            Side::AtMost => value <= limit,
            Side::AtLeast => value >= limit,
        };
        if !passes(limit) {
            return Verdict::Missed;
        }
        match self.excellent.and_then(|limit| references.resolve(limit)) {
            Some(limit) if passes(limit) => Verdict::Excellent,
            _ => Verdict::Ok,
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

/// A row of the report.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    /// For `--only` and for machines.
    pub(crate) name: String,
    /// For people.
    pub(crate) title: String,
    pub(crate) unit: Unit,
    pub(crate) gates: Vec<Gate>,
    pub(crate) outcome: Outcome,
    /// How it was measured, where that is not obvious.
    pub(crate) note: Option<String>,
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
    pub(crate) fn verdict(&self, references: &References) -> Verdict {
        let summary = match &self.outcome {
            Outcome::Measured(summary) => summary,
            Outcome::Skipped(_) => return Verdict::Skipped,
            Outcome::Failed(_) => return Verdict::Failed,
        };
        let verdicts: Vec<Verdict> = self
            .gates
            .iter()
            .map(|gate| gate.judge(summary, references))
            .collect();
        [Verdict::Missed, Verdict::Excellent, Verdict::Ok]
            .into_iter()
            .find(|verdict| verdicts.contains(verdict))
            .unwrap_or(Verdict::None)
    }
}

/// The machine's own round trips. They are repeated beside each group of figures, because a
/// virtual machine's cores drift apart and together within minutes.
#[derive(Clone, Debug, Default)]
pub(crate) struct References {
    pub(crate) p1: Vec<Percentiles>,
    pub(crate) p: Vec<Percentiles>,
}

impl References {
    /// P1 over all repetitions so far.
    pub(crate) fn p1_ns(&self) -> Option<f64> {
        (!self.p1.is_empty()).then(|| Summary::of_latencies(&self.p1).p50)
    }

    /// P over all repetitions so far.
    pub(crate) fn p_ns(&self) -> Option<f64> {
        (!self.p.is_empty()).then(|| Summary::of_latencies(&self.p).p50)
    }

    fn resolve(&self, limit: Limit) -> Option<f64> {
        match limit {
            Limit::TimesP(ratio) => Some(ratio * self.p_ns()?),
            Limit::TimesP1(ratio) => Some(ratio * self.p1_ns()?),
            Limit::Value(value) => Some(value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn references(p: f64, p1: f64) -> References {
        let of = |p50| {
            vec![Percentiles {
                p50,
                ..Percentiles::default()
            }]
        };
        References {
            p1: of(p1),
            p: of(p),
        }
    }

    fn figure(p50: f64, p99: f64) -> Figure {
        Figure {
            name: "x".into(),
            title: "x".into(),
            unit: Unit::Nanoseconds,
            gates: vec![
                Gate::at_most(Quantile::P50, Limit::TimesP(1.15)).excellent(Limit::TimesP1(1.05)),
                Gate::at_most(Quantile::P99, Limit::TimesP(1.4)),
            ],
            outcome: Outcome::Measured(Summary {
                p50,
                p99: Some(p99),
                ..Summary::default()
            }),
            note: None,
        }
    }

    #[test]
    fn one_missed_gate_decides_whatever_the_others_say() {
        assert_eq!(
            figure(200.0, 900.0).verdict(&references(280.0, 220.0)),
            Verdict::Missed
        );
    }

    #[test]
    fn excellence_needs_its_own_limit_and_all_gates_passed() {
        assert_eq!(
            figure(230.0, 300.0).verdict(&references(280.0, 220.0)),
            Verdict::Excellent
        );
        assert_eq!(
            figure(300.0, 300.0).verdict(&references(280.0, 220.0)),
            Verdict::Ok
        );
    }

    #[test]
    fn without_a_reference_no_ratio_is_judged() {
        assert_eq!(
            figure(230.0, 300.0).verdict(&References::default()),
            Verdict::None
        );
    }
}
