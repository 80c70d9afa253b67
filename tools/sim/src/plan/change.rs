//! Changes to a plan from the command line: settings, axes, seeds, and the choice of variants.

use std::collections::BTreeMap;

use laxity_policy::PolicyKind;
use toml::Value;

use super::place::{PlanError, SourceLocation};
use super::setting::{Setting, typed};
use super::{Axis, Choice, KIND, Plan, Variant, label};

impl Plan {
    /// Sets a field for all runs: `field=value`. The field is removed from the axes. Of axis values
    /// that become equal, only the first is kept.
    /// Returns an error if the field or value is invalid, or if variants differ in this field.
    pub fn set(&mut self, assignment: &str) -> Result<(), PlanError> {
        let place = SourceLocation::whole("--set");
        let (field, value) = split(&place, assignment, "FIELD=VALUE")?;
        let setting =
            Setting { field: field.to_owned(), value: typed(value), place: place.clone() };
        setting.check(&place)?;
        let in_variant = |v: &Variant| v.settings.iter().any(|s| s.field == field);
        if field == KIND || self.variants.iter().all(in_variant) {
            return Err(PlanError::new(
                &place,
                field,
                "is what variants differ in; choose them with --only or --policies",
            ));
        }
        self.axes.retain(|axis| axis.field.as_deref() != Some(field));
        for axis in &mut self.axes {
            axis.forget(field);
        }
        self.base.insert(field.to_owned(), setting);
        Ok(())
    }

    /// Adds an axis, `field=value,value,…`. It replaces an axis over the same field.
    /// Returns an error if the field or a value is invalid.
    pub fn vary(&mut self, axis: &str) -> Result<(), PlanError> {
        let place = SourceLocation::whole("--axis");
        let (field, values) = split(&place, axis, "FIELD=VALUE,VALUE,…")?;
        let mut choices: Vec<Choice> = Vec::new();
        for value in list(values) {
            let setting = Setting { field: field.to_owned(), value, place: place.clone() };
            setting.check(&place)?;
            let choice = Choice::of(setting);
            if choices.iter().any(|c| c.name == choice.name) {
                return Err(PlanError::new(
                    &place,
                    field,
                    format!("{} is there twice", choice.name),
                ));
            }
            choices.push(choice);
        }
        let new = Axis {
            label: label::of(field).to_owned(),
            field: Some(field.to_owned()),
            values: choices,
        };
        match self.axes.iter_mut().find(|axis| axis.field.as_deref() == Some(field)) {
            Some(old) => *old = new,
            None => self.axes.push(new),
        }
        if self.x().is_some_and(|x| self.axes[x].is(field)) {
            self.plot.at = None;
        }
        self.check_axes()
    }

    /// Replaces the plan's variants by these policies.
    /// Returns an error if a name is not a policy.
    pub fn compare(&mut self, policies: &[String]) -> Result<(), PlanError> {
        let place = SourceLocation::whole("--policies");
        let mut variants: Vec<Variant> = Vec::new();
        for name in policies {
            let kind: PolicyKind =
                name.parse().map_err(|error| PlanError::new(&place, "", format!("{error}")))?;
            if variants.iter().any(|v| v.name == kind.name()) {
                return Err(PlanError::new(&place, "", format!("{name} is there twice")));
            }
            variants.push(Variant {
                name: kind.name().to_owned(),
                settings: vec![Setting {
                    field: KIND.to_owned(),
                    value: Value::String(kind.name().to_owned()),
                    place: place.clone(),
                }],
            });
        }
        self.variants = variants;
        Ok(())
    }

    /// Removes all variants except these.
    /// Returns an error if a name is not a variant.
    pub fn only(&mut self, names: &[String]) -> Result<(), PlanError> {
        for name in names {
            if !self.variants.iter().any(|v| v.name == *name) {
                let known: Vec<&str> = self.variants.iter().map(|v| v.name.as_str()).collect();
                return Err(PlanError::new(
                    &SourceLocation::whole("--only"),
                    "",
                    format!("no variant `{name}`; there are {}", known.join(", ")),
                ));
            }
        }
        self.variants.retain(|v| names.contains(&v.name));
        Ok(())
    }
}

impl Axis {
    /// Removes a field from the settings of axis values. Values that equal an earlier one are
    /// removed, because they would repeat its runs.
    fn forget(&mut self, field: &str) {
        let mut kept: Vec<Choice> = Vec::new();
        for mut choice in self.values.drain(..) {
            choice.settings.retain(|setting| setting.field != field);
            if !kept.iter().any(|other| other.sets_the_same(&choice)) {
                kept.push(choice);
            }
        }
        self.values = kept;
    }
}

impl Choice {
    fn sets_the_same(&self, other: &Self) -> bool {
        let of = |choice: &Self| -> BTreeMap<String, String> {
            let settings = choice.settings.iter();
            settings.map(|setting| (setting.field.clone(), setting.value.to_string())).collect()
        };
        of(self) == of(other)
    }
}

fn split<'a>(
    place: &SourceLocation,
    assignment: &'a str,
    form: &str,
) -> Result<(&'a str, &'a str), PlanError> {
    match assignment.split_once('=') {
        Some((field, value)) if !field.trim().is_empty() && !value.trim().is_empty() => {
            Ok((field.trim(), value))
        }
        _ => Err(PlanError::new(place, "", format!("expected {form}, found `{assignment}`"))),
    }
}

fn list(text: &str) -> Vec<Value> {
    match format!("[{text}]").parse::<Value>() {
        Ok(Value::Array(values)) => values,
        _ => text.split(',').map(typed).collect(),
    }
}
