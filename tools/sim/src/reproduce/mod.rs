//! The simulated figures of the MFS paper (§2.2 and §6.3): their plans, the paper's claims, and the
//! corresponding numbers of a report.
//!
//! The paper publishes no data of its plots, so that claims of its text are compared. They are in
//! `claims/mfs.toml`.

pub mod runner;

use evalexpr::Value;
use serde::{Deserialize, Serialize};

use crate::report::{Metric, Panel, Report, Sustained, metric};
pub use runner::ClaimError;
use runner::{Figures, Scope};

const CLAIMS: &str = include_str!("../../claims/mfs.toml");

/// A claim of the paper with the numbers of a report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    pub says: String,
    /// Name of the panel. Empty if there is only one.
    pub panel: String,
    /// Range of the paper's number, or `None` if it gives none.
    pub paper: Option<(f64, f64)>,
    /// Value here of the policy that the paper's number is about. `None` if it was not run.
    pub here: Option<f64>,
    /// Value here of `laxity`. `None` if it was not run.
    pub laxity: Option<f64>,
    #[serde(skip)]
    unit: ClaimUnit,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
enum ClaimUnit {
    #[default]
    #[serde(rename = "×")]
    Times,
    #[serde(rename = "%")]
    Percent,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanClaim {
    plan: String,
    #[serde(default)]
    panel: String,
    says: String,
    of: Option<String>,
    paper: Option<(f64, f64)>,
    #[serde(default)]
    unit: ClaimUnit,
    here: String,
}

impl Finding {
    pub fn shown(&self, value: Option<f64>) -> String {
        match (value, self.unit) {
            (None, _) => "–".to_owned(),
            (Some(value), ClaimUnit::Percent) => {
                // Adding zero turns minus zero into zero.
                let percent = (value * 100.0).round() + 0.0;
                format!("{percent:.0} %")
            }
            (Some(value), ClaimUnit::Times) => format!("{value:.2} ×"),
        }
    }

    /// Reports in words whether the claim holds: by the paper's least number, or in direction only.
    pub fn holds(&self) -> &'static str {
        let nothing = match self.unit {
            ClaimUnit::Times => 1.0,
            ClaimUnit::Percent => 0.0,
        };
        let digits = |value: f64| (value * 100.0).round();
        match (self.here.map(digits), self.paper.map(|(low, _)| digits(low))) {
            (None, _) => "not tested",
            (Some(here), Some(low)) if here >= low => "yes",
            (Some(here), _) if here > digits(nothing) => "in direction",
            (Some(_), _) => "no",
        }
    }

    pub fn paper_shown(&self) -> String {
        match self.paper {
            None => "no number".to_owned(),
            Some((low, high)) if low == high => self.shown(Some(low)),
            Some((low, high)) => format!("{} to {}", self.shown(Some(low)), self.shown(Some(high))),
        }
    }
}

/// Returns the paper's claims about the figure of the report's plan, or none for other plans.
///
/// # Panics
/// Does not panic, because tests evaluate each claim of the file.
pub fn check(report: &Report) -> Vec<Finding> {
    #[derive(Deserialize)]
    struct PlanClaims {
        claim: Vec<PlanClaim>,
    }
    let file: PlanClaims = toml::from_str(CLAIMS).expect("claims/mfs.toml has claims");
    let mut found = Vec::new();
    for claim in file.claim.iter().filter(|c| c.plan == report.plan.name) {
        for panel in report.panels() {
            let parts = || panel.name.split(" · ");
            if claim.panel.is_empty() || parts().any(|part| part == claim.panel) {
                found.push(beside(report, &panel, claim));
            }
        }
    }
    found
}

fn beside(report: &Report, panel: &Panel, claim: &PlanClaim) -> Finding {
    let measured = MeasuredPanel { report, panel };
    let number = |policy: &str| {
        let mut scope = Scope::new(&measured);
        scope.set("policy", Value::from(policy));
        let value = scope.value(&claim.here).and_then(|value| value.as_number());
        let value = value.unwrap_or_else(|error| panic!("{}: {error}", claim.says));
        value.is_finite().then_some(value)
    };
    Finding {
        says: claim.says.clone(),
        panel: panel.name.clone(),
        paper: claim.paper,
        here: number(claim.of.as_deref().unwrap_or("mfs")),
        laxity: number("laxity"),
        unit: claim.unit,
    }
}

/// A panel of a report. Its numbers are NaN where a variant was not run or a rate lies outside of
/// the plan's rates.
struct MeasuredPanel<'a> {
    report: &'a Report,
    panel: &'a Panel,
}

impl Figures for MeasuredPanel<'_> {
    fn call(&self, function: &str, arguments: &[Value]) -> Option<Value> {
        let names: Option<Vec<&str>> = arguments
            .iter()
            .map(|name| match name {
                Value::String(name) => Some(name.as_str()),
                _ => None,
            })
            .collect();
        let found = match (function, names?.as_slice()) {
            ("figure", [policy, metric]) => {
                self.mean(self.report.telling(self.panel), policy, Metric::named(metric)?)
            }
            ("rate", [policy]) => self.rate(policy),
            ("attainment_over", [policy, others @ ..]) => self.attainment_over(policy, others),
            _ => return None,
        };
        Some(Value::Float(found.unwrap_or(f64::NAN)))
    }
}

impl MeasuredPanel<'_> {
    fn variant(&self, name: &str) -> Option<usize> {
        let variants = &self.report.plan.variants;
        variants.iter().position(|variant| variant.name == name)
    }

    fn mean(&self, point: usize, policy: &str, metric: &Metric) -> Option<f64> {
        let estimate = self.report.estimate(point, self.variant(policy)?, metric)?;
        Some(estimate.mean)
    }

    fn rate(&self, policy: &str) -> Option<f64> {
        let rates = self.report.sustained(self.panel);
        let rate = rates.get(self.variant(policy)?)?.rate.as_ref();
        rate.and_then(Sustained::rate)
    }

    /// Returns the largest ratio of the policy's attainment to the best of the others, over the
    /// points of a panel where the policy's attainment is at least half. At other points ratios are
    /// meaningless.
    fn attainment_over(&self, policy: &str, others: &[&str]) -> Option<f64> {
        let ratio = |point: usize| {
            let attainment = |name: &str| self.mean(point, name, &metric::ATTAINMENT);
            let own = attainment(policy).filter(|own| *own >= 0.5)?;
            let others = others.iter().filter_map(|name| attainment(name));
            Some(own / others.fold(f64::NAN, f64::max)).filter(|ratio| ratio.is_finite())
        };
        let ratios = self.panel.points.iter().filter_map(|&point| ratio(point));
        ratios.max_by(f64::total_cmp)
    }
}
