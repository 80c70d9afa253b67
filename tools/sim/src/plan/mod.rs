//! A plan: a question, a scenario to start from, and what is varied to answer it.
//!
//! A plan is a TOML file:
//!
//! ```toml
//! title = "NIC rates"
//! question = "How much bandwidth does scheduling replace?"
//! seeds = 3                          # 1, 2, 3; or a list
//! policies = ["fair", "mfs", "laxity"]
//! base_plan = "common.toml"          # another plan to start from (a file beside it, or a built-in)
//!
//! [base]                             # fields of the scenario; what is left out has its default
//! cluster.servers = 32
//!
//! [[axis]]                           # several axes: every combination
//! field = "workload.rate_per_gpu"
//! values = [0.5, 1.0]
//!
//! [[axis]]                           # an axis whose values set several fields
//! label = "model"
//! settings = [
//!   { name = "DBRX", model.name = "dbrx", model.tp = 2, model.ep = 16 },
//! ]
//!
//! [[variant]]                        # a policy with choices of its own
//! name = "mfs w/o RED"
//! policy.kind = "mfs"
//! policy.without = ["red"]
//!
//! [plot]
//! x = "workload.rate_per_gpu"
//! metrics = ["attainment", "ttft_p99"]
//! ```
//!
//! A plan that inherits can replace parts of its parent: `policies` and `variant` together, all
//! axes together, and `[base]` and `[plot]` field by field. Relative paths of traces, models and
//! GPUs start at the current folder.

mod built_in;
mod change;
mod label;
mod place;
mod points;
mod print;
mod reader;
mod setting;
mod source;

use std::collections::BTreeMap;

pub use built_in::{BuiltIn, built_in};
pub use place::{PlanError, SourceLocation};
pub use points::{Job, Point};
pub use setting::{Field, Setting, fields, shown};

use crate::report::Metric;

#[derive(Clone, Debug)]
pub struct Plan {
    /// Name from the plan's text, or else that of the file or built-in plan without `.toml`.
    pub name: String,
    pub title: String,
    pub question: String,
    pub seeds: Vec<u64>,
    pub base: BTreeMap<String, Setting>,
    pub axes: Vec<Axis>,
    pub variants: Vec<Variant>,
    pub plot: Plot,
    pub reference: Option<String>,
    place: SourceLocation,
}

#[derive(Clone, Debug)]
pub struct Axis {
    pub label: String,
    /// Field of the axis, if each value sets only that field.
    pub field: Option<String>,
    pub values: Vec<Choice>,
}

#[derive(Clone, Debug)]
pub struct Choice {
    pub name: String,
    pub number: Option<f64>,
    pub settings: Vec<Setting>,
}

#[derive(Clone, Debug)]
pub struct Variant {
    pub name: String,
    pub settings: Vec<Setting>,
}

#[derive(Clone, Debug, Default)]
pub struct Plot {
    pub x: Option<String>,
    pub metrics: Vec<&'static Metric>,
    pub at: Option<String>,
}

impl Axis {
    /// Reports whether every value is a number, so that values have a position on a scale.
    pub fn is_numeric(&self) -> bool {
        self.values.iter().all(|value| value.number.is_some())
    }

    pub fn key(&self) -> &str {
        self.field.as_deref().unwrap_or(&self.label)
    }

    fn is(&self, name: &str) -> bool {
        self.label == name || self.field.as_deref() == Some(name)
    }
}

impl Plan {
    /// Returns the horizontal axis of plots: the plan's choice, else the request rate, else the
    /// first numeric axis with several values. Returns `None` if there is none, and each point is
    /// then separate.
    pub fn x(&self) -> Option<usize> {
        let usable = |&(_, axis): &(usize, &Axis)| axis.is_numeric() && axis.values.len() > 1;
        let find = |wanted: &dyn Fn(&Axis) -> bool| {
            self.axes
                .iter()
                .enumerate()
                .filter(usable)
                .find(|(_, axis)| wanted(axis))
                .map(|(index, _)| index)
        };
        let chosen = self.plot.x.as_deref();
        find(&|axis| chosen.is_some_and(|x| axis.is(x)))
            .or_else(|| find(&|axis| axis.is(RATE)))
            .or_else(|| find(&|_| true))
    }

    pub fn rate_axis(&self) -> Option<usize> {
        self.x().filter(|&axis| self.axes[axis].is(RATE))
    }

    /// Checks that axes have an effect. A field that every variant sets cannot be an axis.
    fn check_axes(&self) -> Result<(), PlanError> {
        let choices = self.axes.iter().flat_map(|axis| &axis.values);
        for setting in choices.flat_map(|choice| &choice.settings) {
            let set = |variant: &Variant| variant.settings.iter().any(|s| s.field == setting.field);
            if setting.field == KIND || self.variants.iter().all(set) {
                return Err(PlanError::new(
                    &setting.place,
                    &setting.field,
                    "is what variants differ in, and no axis; say it in `policies` or `variant`",
                ));
            }
        }
        self.check_runs()
    }

    /// Checks that the runs fit into memory. A few axes have more combinations than that.
    fn check_runs(&self) -> Result<(), PlanError> {
        let axes = self.axes.iter().map(|axis| axis.values.len());
        let factors = axes.chain([self.variants.len(), self.seeds.len()]);
        let runs = factors.fold(1, usize::saturating_mul);
        if runs > RUNS_MAX {
            let problem = format!(
                "{runs} runs are more than {RUNS_MAX}; take away values of axes, variants or seeds"
            );
            return Err(PlanError::new(&self.place, "", problem));
        }
        Ok(())
    }

    /// Returns the variant that others are compared with: the plan's choice, else `laxity`, else
    /// `mfs`, else the first. Returns `None` for a single variant.
    pub fn reference(&self) -> Option<usize> {
        if self.variants.len() < 2 {
            return None;
        }
        let named = |name: &str| self.variants.iter().position(|v| v.name == name);
        self.reference
            .as_deref()
            .and_then(named)
            .or_else(|| named("laxity"))
            .or_else(|| named("mfs"))
            .or(Some(0))
    }
}

/// Largest number of runs: points times variants times seeds.
const RUNS_MAX: usize = 100_000;

const KIND: &str = "policy.kind";

const RATE: &str = "workload.rate_per_gpu";

#[cfg(test)]
mod tests;
