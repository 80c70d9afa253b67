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
//! A plan that inherits replaces what it says: `policies` and `variant` together, all axes
//! together; `[base]` and `[plot]` field by field. Relative paths of traces, models and GPUs are
//! taken from the current folder.

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

/// A question, a scenario to start from, and what is varied.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What it says, else the file's or the built-in plan's name, without `.toml`.
    pub name: String,
    /// A few words.
    pub title: String,
    /// What the plan is to answer, one sentence.
    pub question: String,
    /// Seeds; every point is run with each of them.
    pub seeds: Vec<u64>,
    /// Laid over the default scenario, by field.
    pub base: BTreeMap<String, Setting>,
    /// What is varied, outermost first.
    pub axes: Vec<Axis>,
    /// What is compared at each point. Never empty.
    pub variants: Vec<Variant>,
    /// What is shown.
    pub plot: Plot,
    /// The variant that the others are compared with, if the plan says so.
    pub reference: Option<String>,
    place: SourceLocation,
}

/// One thing that is varied.
#[derive(Clone, Debug)]
pub struct Axis {
    /// What it is, with its unit.
    pub label: String,
    /// The field, if each value sets only that one.
    pub field: Option<String>,
    /// Its values, in order.
    pub values: Vec<Choice>,
}

/// One value of an axis.
#[derive(Clone, Debug)]
pub struct Choice {
    /// As it is shown.
    pub name: String,
    /// The value, if it is a number.
    pub number: Option<f64>,
    /// The fields that it sets.
    pub settings: Vec<Setting>,
}

/// What is compared: a policy, or one with choices of its own.
#[derive(Clone, Debug)]
pub struct Variant {
    /// As it is shown.
    pub name: String,
    /// The fields that it sets.
    pub settings: Vec<Setting>,
}

/// What is shown of a plan's results.
#[derive(Clone, Debug, Default)]
pub struct Plot {
    /// The axis (its field or label) that plots have on the horizontal.
    pub x: Option<String>,
    /// What is plotted over it.
    pub metrics: Vec<&'static Metric>,
    /// The value of the horizontal axis at which distributions are shown.
    pub at: Option<String>,
}

impl Axis {
    /// Whether every value is a number, so that they have a place on a scale.
    #[must_use]
    pub fn is_numeric(&self) -> bool {
        self.values.iter().all(|value| value.number.is_some())
    }

    /// Its name in files: the field, else the label.
    #[must_use]
    pub fn key(&self) -> &str {
        self.field.as_deref().unwrap_or(&self.label)
    }

    fn is(&self, name: &str) -> bool {
        self.label == name || self.field.as_deref() == Some(name)
    }
}

impl Plan {
    /// The axis that plots have on the horizontal: the plan's choice, else the request rate, else
    /// the first with numbers and more than one value. `None` if there is none: then each point
    /// stands by itself.
    #[must_use]
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

    /// The axis of request rates, if that is what the horizontal is.
    #[must_use]
    pub fn rate_axis(&self) -> Option<usize> {
        self.x().filter(|&axis| self.axes[axis].is(RATE))
    }

    /// Checks that axes have an effect: what every variant sets by itself cannot be varied.
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
        Ok(())
    }

    /// The variant that the others are compared with: the plan's choice, else `laxity`, else `mfs`,
    /// else the first. `None` if there is nothing to compare.
    #[must_use]
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

/// The field of policies.
const KIND: &str = "policy.kind";

/// The field of request rates.
const RATE: &str = "workload.rate_per_gpu";

#[cfg(test)]
mod tests;
