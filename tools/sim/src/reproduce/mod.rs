//! The simulated figures of the MFS paper (§2.2 and §6.3): which plan is which, what the paper says
//! about each, and the same numbers from a report.
//!
//! The paper plots without giving its data; what it says in its text is what is compared.

mod claims;

use serde::Serialize;

use crate::report::{Panel, Report, Sustained, metric};
use claims::{CLAIMS, Claim, Quantity};

/// A figure of a paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figure {
    /// Its number.
    pub number: &'static str,
    /// The built-in plan that stands for it.
    pub plan: &'static str,
}

/// The figures of MFS that can be simulated.
pub const FIGURES: [Figure; 6] = [
    Figure {
        number: "5",
        plan: "mfs-figure-5",
    },
    Figure {
        number: "10",
        plan: "mfs-figure-10",
    },
    Figure {
        number: "11",
        plan: "mfs-figure-11",
    },
    Figure {
        number: "12",
        plan: "mfs-figure-12",
    },
    Figure {
        number: "13",
        plan: "mfs-figure-13",
    },
    Figure {
        number: "14",
        plan: "mfs-figure-14",
    },
];

/// A claim of the paper beside what came out here.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// What it is about, in words.
    pub says: &'static str,
    /// For which panel; empty if there is only one.
    pub panel: String,
    /// What the paper says, from and to; `None` if it gives no number.
    pub paper: Option<(f64, f64)>,
    /// What the policy that the paper's number is about gave here; `None` if it was not run.
    pub here: Option<f64>,
    /// What `laxity` gave.
    pub laxity: Option<f64>,
    #[serde(skip)]
    share: bool,
}

impl Finding {
    /// A number of this finding as tables show it.
    #[must_use]
    pub fn shown(&self, value: Option<f64>) -> String {
        match value {
            None => "–".to_owned(),
            Some(value) if self.share => {
                // Minus zero is zero.
                let percent = (value * 100.0).round() + 0.0;
                format!("{percent:.0} %")
            }
            Some(value) => format!("{value:.2} ×"),
        }
    }

    /// What the paper says, as tables show it.
    #[must_use]
    pub fn paper_shown(&self) -> String {
        match self.paper {
            None => "no number".to_owned(),
            Some((low, high)) if low == high => self.shown(Some(low)),
            Some((low, high)) => format!("{} to {}", self.shown(Some(low)), self.shown(Some(high))),
        }
    }
}

/// The paper's claims about the figure that the report's plan stands for; empty if it is none.
#[must_use]
pub fn check(report: &Report) -> Vec<Finding> {
    let mut found = Vec::new();
    for claim in CLAIMS.iter().filter(|c| c.plan == report.plan.name) {
        for panel in report.panels() {
            if claim.panel.is_empty() || panel.name == claim.panel {
                found.push(beside(report, &panel, claim));
            }
        }
    }
    found
}

fn beside(report: &Report, panel: &Panel, claim: &Claim) -> Finding {
    let number = |name: &str| {
        let variant = variant(report, name)?;
        claim.quantity.of(report, panel, variant)
    };
    Finding {
        says: claim.says,
        panel: panel.name.clone(),
        paper: claim.paper,
        here: number(claim.quantity.subject()),
        laxity: number("laxity"),
        share: claim.quantity.is_share(),
    }
}

fn variant(report: &Report, name: &str) -> Option<usize> {
    report.plan.variants.iter().position(|v| v.name == name)
}

impl Quantity {
    /// The variant that the paper's number is about.
    fn subject(self) -> &'static str {
        match self {
            Self::Slowdown | Self::Stretch => "fair",
            _ => "mfs",
        }
    }

    fn is_share(self) -> bool {
        matches!(self, Self::CollectiveCut(_) | Self::EarlinessCut(_))
    }

    /// Of a variant in a panel; `None` if what it takes was not run, or lies beyond the plan's
    /// rates.
    fn of(self, report: &Report, panel: &Panel, variant: usize) -> Option<f64> {
        let point = report.telling(panel);
        let mean = |variant, metric| Some(report.estimate(point, variant, metric)?.mean);
        match self {
            Self::Attainment(others) => most_over_best(report, panel, variant, others),
            Self::Rate(other) => {
                let rates = report.sustained(panel);
                let other = self::variant(report, other)?;
                let rate =
                    |variant: usize| rates.get(variant)?.rate.as_ref().and_then(Sustained::rate);
                Some(rate(variant)? / rate(other)?)
            }
            Self::CollectiveCut(other) => {
                let other = self::variant(report, other)?;
                let metric = &metric::COLLECTIVE_MEAN;
                Some(1.0 - mean(variant, metric)? / mean(other, metric)?)
            }
            Self::EarlinessCut(others) => {
                let metric = &metric::EARLINESS_MEAN;
                let others: Option<Vec<f64>> = others
                    .iter()
                    .map(|name| mean(self::variant(report, name)?, metric))
                    .collect();
                let others = others?;
                let theirs = others.iter().sum::<f64>() / others.len() as f64;
                Some(1.0 - mean(variant, metric)? / theirs)
            }
            Self::Slowdown => {
                let bound = (0..report.plan.variants.len()).find(|&v| report.is_bound(v))?;
                Some(mean(variant, &metric::TTFT_MEAN)? / mean(bound, &metric::TTFT_MEAN)?)
            }
            Self::Stretch => mean(variant, &metric::COLLECTIVE_STRETCH),
        }
        .filter(|number| number.is_finite())
    }
}

/// The largest ratio of attainment over the best of others, over the points of a panel where the
/// variant still serves half of the requests in time: beyond, ratios are large and mean nothing.
fn most_over_best(report: &Report, panel: &Panel, variant: usize, others: &[&str]) -> Option<f64> {
    let attainment = |point: usize, variant: usize| {
        let estimate = report.estimate(point, variant, &metric::ATTAINMENT)?;
        Some(estimate.mean)
    };
    panel
        .points
        .iter()
        .filter_map(|&point| {
            let own = attainment(point, variant).filter(|own| *own >= 0.5)?;
            let best = others
                .iter()
                .filter_map(|name| attainment(point, self::variant(report, name)?))
                .fold(f64::NAN, f64::max);
            Some(own / best).filter(|ratio| ratio.is_finite())
        })
        .max_by(f64::total_cmp)
}
