//! The points of a plan: every combination of its axes' values, with every variant and seed.

use toml::Table;

use super::place::PlanError;
use super::setting::{DEFAULTS, Setting, scenario_of};
use super::{Axis, Choice, Plan, Variant};
use crate::scenario::Scenario;

/// One combination of the axes' values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point {
    /// For each axis, the index of its value.
    pub choices: Vec<usize>,
}

/// One run of the simulation.
#[derive(Clone, Debug)]
pub struct Job {
    /// Index of the point, in the order of [`Plan::points`].
    pub point: usize,
    /// Index of the variant.
    pub variant: usize,
    /// What to simulate; its seed included.
    pub scenario: Scenario,
}

impl Plan {
    /// All points; the last axis changes fastest. One point without choices if there are no axes.
    #[must_use]
    pub fn points(&self) -> Vec<Point> {
        let mut points = vec![Point {
            choices: Vec::new(),
        }];
        for axis in &self.axes {
            points = points
                .iter()
                .flat_map(|point| {
                    (0..axis.values.len()).map(|value| {
                        let mut choices = point.choices.clone();
                        choices.push(value);
                        Point { choices }
                    })
                })
                .collect();
        }
        points
    }

    /// All runs, in the order in which results are written: by point, variant, seed.
    ///
    /// # Errors
    /// The first combination that makes no sense: which field, where it was set, and with which
    /// values of the axes.
    pub fn jobs(&self) -> Result<Vec<Job>, PlanError> {
        let mut jobs = Vec::new();
        for (index, point) in self.points().iter().enumerate() {
            for (number, variant) in self.variants.iter().enumerate() {
                let scenario = self.scenario(point, variant)?;
                for &seed in &self.seeds {
                    jobs.push(Job {
                        point: index,
                        variant: number,
                        scenario: Scenario {
                            seed,
                            ..scenario.clone()
                        },
                    });
                }
            }
        }
        Ok(jobs)
    }

    /// What one variant runs at a point; with the default seed.
    fn scenario(&self, point: &Point, variant: &Variant) -> Result<Scenario, PlanError> {
        let mut tree: Table = DEFAULTS.clone();
        for setting in self.settings_of(point, variant) {
            setting.apply(&mut tree);
        }
        // Every setting has been checked by itself: the whole fails only if types depend on each
        // other.
        let scenario = scenario_of(tree).map_err(|problem| PlanError {
            place: self.place.clone(),
            field: String::new(),
            problem,
            point: self.describe(point, variant),
        })?;
        scenario.validate().map_err(|invalid| PlanError {
            // The last to set the field is to blame; a default is the plan's own.
            place: self
                .settings_of(point, variant)
                .filter(|setting| setting.field == invalid.field)
                .last()
                .map_or_else(|| self.place.clone(), |setting| setting.place.clone()),
            field: invalid.field.to_owned(),
            problem: invalid.problem,
            point: self.describe(point, variant),
        })?;
        Ok(scenario)
    }

    /// In the order in which they are applied.
    fn settings_of<'a>(
        &'a self,
        point: &'a Point,
        variant: &'a Variant,
    ) -> impl Iterator<Item = &'a Setting> {
        let axes = self.axes.iter().zip(&point.choices);
        self.base
            .values()
            .chain(axes.flat_map(|(axis, &value)| &axis.values[value].settings))
            .chain(&variant.settings)
    }

    /// The axes' values at a point.
    pub fn at<'a>(&'a self, point: &'a Point) -> impl Iterator<Item = (&'a Axis, &'a Choice)> {
        self.axes
            .iter()
            .zip(&point.choices)
            .map(|(axis, &value)| (axis, &axis.values[value]))
    }

    fn describe(&self, point: &Point, variant: &Variant) -> String {
        let mut parts: Vec<String> = self
            .at(point)
            .map(|(axis, choice)| format!("{} = {}", axis.key(), choice.name))
            .collect();
        parts.push(format!("variant {}", variant.name));
        parts.join(", ")
    }
}
