//! Points of a plan: every combination of axis values, with every variant and seed.

use toml::Table;

use super::place::PlanError;
use super::setting::{DEFAULTS, Setting, scenario_of};
use super::{Axis, Choice, Plan, Variant};
use crate::scenario::Scenario;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point {
    pub choices: Vec<usize>,
}

#[derive(Clone, Debug)]
pub struct Job {
    pub point: usize,
    pub variant: usize,
    pub scenario: Scenario,
}

impl Plan {
    /// Returns all points. The last axis changes fastest. Without axes there is one point.
    pub fn points(&self) -> Vec<Point> {
        let mut points = vec![Point { choices: Vec::new() }];
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

    /// Returns all runs in the order of the results: by point, variant, seed.
    /// Fails at the first invalid combination. The error has the field, its location and the axis
    /// values.
    pub fn jobs(&self) -> Result<Vec<Job>, PlanError> {
        // The command line may have added seeds.
        self.check_runs()?;
        let mut jobs = Vec::new();
        for (index, point) in self.points().iter().enumerate() {
            for (number, variant) in self.variants.iter().enumerate() {
                let scenario = self.scenario(point, variant)?;
                for &seed in &self.seeds {
                    jobs.push(Job {
                        point: index,
                        variant: number,
                        scenario: Scenario { seed, ..scenario.clone() },
                    });
                }
            }
        }
        Ok(jobs)
    }

    fn scenario(&self, point: &Point, variant: &Variant) -> Result<Scenario, PlanError> {
        let mut tree: Table = DEFAULTS.clone();
        for setting in self.settings_of(point, variant) {
            setting.apply(&mut tree);
        }
        // Settings were checked one by one. The whole can only fail if fields depend on each other.
        let scenario = scenario_of(tree).map_err(|problem| PlanError {
            place: self.place.clone(),
            field: String::new(),
            problem,
            point: self.describe(point, variant),
        })?;
        scenario.validate().map_err(|invalid| PlanError {
            // The error points at the last setting of the field, or at the plan for a default.
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

    pub fn at<'a>(&'a self, point: &'a Point) -> impl Iterator<Item = (&'a Axis, &'a Choice)> {
        self.axes.iter().zip(&point.choices).map(|(axis, &value)| (axis, &axis.values[value]))
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
