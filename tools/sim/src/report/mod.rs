//! The results of a plan and their forms: tables for a terminal, JSON, CSV, and a Markdown page.
//!
//! A report contains every run. Means over seeds, differences and sustained rates are computed from
//! the runs here, not in the forms.

mod capacity;
pub mod csv;
pub mod estimate;
pub mod findings;
pub mod json;
pub mod map;
pub mod metric;
pub mod page;
pub mod paired;
pub(crate) mod sheet;
mod sheets;
pub mod summary;
pub mod sustained;
pub mod table;
mod view;

pub use estimate::Estimate;
pub use metric::Metric;
pub use paired::Verdict;
pub use sustained::Sustained;

use toml::Value;

use crate::outcome::Outcome;
use crate::plan::{Plan, Point, Setting};
use crate::run::Timing;
use crate::scenario::Scenario;

#[derive(Clone, Debug)]
pub struct Report {
    pub plan: Plan,
    pub points: Vec<Point>,
    pub runs: Vec<Run>,
    pub failures: Vec<Failure>,
    /// Number of runs that were not started.
    pub missing: usize,
    pub timing: Timing,
}

#[derive(Clone, Debug)]
pub struct Run {
    pub point: usize,
    pub variant: usize,
    pub seed: u64,
    pub outcome: Outcome,
}

#[derive(Clone, Debug)]
pub struct Failure {
    pub point: usize,
    pub variant: usize,
    pub scenario: Scenario,
    pub problem: String,
}

/// Points that differ only in the horizontal axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Panel {
    /// Values of the other axes. Empty if there are no other axes.
    pub name: String,
    pub points: Vec<usize>,
}

impl Report {
    pub fn runs_of(&self, point: usize, variant: usize) -> impl Iterator<Item = &Run> {
        self.runs.iter().filter(move |run| run.point == point && run.variant == variant)
    }

    pub fn values(&self, point: usize, variant: usize, metric: &Metric) -> Vec<(u64, f64)> {
        self.runs_of(point, variant).map(|run| (run.seed, (metric.of)(&run.outcome))).collect()
    }

    /// Returns a metric's mean over seeds for a variant at a point, or `None` if nothing was run.
    pub fn estimate(&self, point: usize, variant: usize, metric: &Metric) -> Option<Estimate> {
        let values: Vec<f64> =
            self.values(point, variant, metric).into_iter().map(|(_, value)| value).collect();
        Estimate::of(&values)
    }

    /// Returns the points grouped by the values of all axes except the horizontal one. Without a
    /// horizontal axis each point is a panel.
    pub fn panels(&self) -> Vec<Panel> {
        let x = self.plan.x();
        let mut panels: Vec<Panel> = Vec::new();
        for (index, point) in self.points.iter().enumerate() {
            let name = self.panel_name(point, x);
            match panels.iter_mut().find(|panel| panel.name == name) {
                Some(panel) => panel.points.push(index),
                None => panels.push(Panel { name, points: vec![index] }),
            }
        }
        for panel in &mut panels {
            panel.points.sort_by(|&a, &b| self.x_of(a).total_cmp(&self.x_of(b)));
        }
        panels
    }

    /// Returns a panel's name, such as `DBRX`, or `NIC rate, Gb/s 50` for a bare number.
    fn panel_name(&self, point: &Point, x: Option<usize>) -> String {
        let mut name = String::new();
        for (index, (axis, &value)) in self.plan.axes.iter().zip(&point.choices).enumerate() {
            if Some(index) == x || (axis.values.len() == 1 && x.is_some()) {
                continue;
            }
            let choice = &axis.values[value];
            name += if name.is_empty() { "" } else { " · " };
            let own = |s: &Setting| matches!(&s.value, Value::String(text) if *text == choice.name);
            let speaks = axis.field.is_none() || choice.settings.first().is_none_or(own);
            // The unit is placed behind the number.
            name += &match axis.label.split_once(", ") {
                _ if speaks => choice.name.clone(),
                Some((label, unit)) => format!("{label} {} {unit}", choice.name),
                None => format!("{} {}", axis.label, choice.name),
            };
        }
        name
    }

    /// Returns a point's position on the horizontal axis, or zero if there is none.
    pub fn x_of(&self, point: usize) -> f64 {
        self.plan
            .x()
            .and_then(|axis| {
                let choice = self.points[point].choices[axis];
                self.plan.axes[axis].values[choice].number
            })
            .unwrap_or(0.0)
    }

    /// Returns the shown value of the horizontal axis at a point. Empty if there is none.
    pub fn x_name(&self, point: usize) -> &str {
        self.plan
            .x()
            .map_or("", |axis| &self.plan.axes[axis].values[self.points[point].choices[axis]].name)
    }

    /// Returns the point of a panel at which distributions are shown: the plan's choice, or else
    /// the point with the largest difference in attainment between variants.
    pub fn telling(&self, panel: &Panel) -> usize {
        let named = panel
            .points
            .iter()
            .find(|&&point| self.plan.plot.at.as_deref() == Some(self.x_name(point)));
        if let Some(&point) = named {
            return point;
        }
        let spread = |point: usize| {
            let means: Vec<f64> = (0..self.plan.variants.len())
                .filter(|&variant| !self.is_bound(variant))
                .filter_map(|variant| self.estimate(point, variant, &metric::ATTAINMENT))
                .map(|estimate| estimate.mean)
                .collect();
            means.iter().copied().fold(0.0, f64::max) - means.iter().copied().fold(1.0, f64::min)
        };
        // Of equal points the first counts.
        let points = panel.points.iter().copied().rev();
        points.max_by(|&a, &b| spread(a).total_cmp(&spread(b))).unwrap_or(panel.points[0])
    }

    /// Reports whether a variant is the bound without contention rather than a policy.
    pub fn is_bound(&self, variant: usize) -> bool {
        self.plan.variants[variant]
            .settings
            .iter()
            .any(|s| s.field == "policy.no_contention" && s.value == Value::Boolean(true))
    }

    pub(crate) fn kinds_of_failures(&self) -> Vec<(&Failure, usize)> {
        let mut kinds: Vec<(&Failure, usize)> = Vec::new();
        for failure in &self.failures {
            match kinds.iter_mut().find(|(f, _)| f.problem == failure.problem) {
                Some((_, count)) => *count += 1,
                None => kinds.push((failure, 1)),
            }
        }
        kinds
    }

    /// Returns the name of a failed run, such as `mfs, seed 3 (DBRX, 0.7)`.
    pub(crate) fn failure_name(&self, failure: &Failure) -> String {
        let mut name =
            format!("{}, seed {}", self.plan.variants[failure.variant].name, failure.scenario.seed);
        if self.points.len() > 1 {
            name += &format!(" ({})", self.point_name(failure.point));
        }
        name
    }

    pub fn is_whole(&self) -> bool {
        self.failures.is_empty() && self.missing == 0
    }
}
