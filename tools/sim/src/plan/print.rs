//! Formats a plan as TOML, including everything that it inherited or that the command line changed.

use toml::Value;

use super::{Axis, Plan, Setting};

impl Plan {
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        line(&mut text, "name", self.name.as_str());
        line(&mut text, "title", self.title.as_str());
        line(&mut text, "question", self.question.as_str());
        line(&mut text, "seeds", integers(&self.seeds));
        if let Some(reference) = &self.reference
            && self.variants.iter().any(|v| v.name == *reference)
        {
            line(&mut text, "reference", reference.as_str());
        }
        if !self.base.is_empty() {
            text += "\n[base]\n";
            settings(&mut text, self.base.values());
        }
        for axis in &self.axes {
            axis_text(&mut text, axis);
        }
        for variant in &self.variants {
            text += "\n[[variant]]\n";
            line(&mut text, "name", variant.name.as_str());
            settings(&mut text, &variant.settings);
        }
        text += "\n[plot]\n";
        if let Some(x) = self.x() {
            line(&mut text, "x", self.axes[x].key());
        }
        if let Some(at) = &self.plot.at {
            line(&mut text, "at", at.as_str());
        }
        let metrics: Vec<&str> = self.plot.metrics.iter().map(|m| m.key).collect();
        line(&mut text, "metrics", metrics);
        text
    }
}

fn line(text: &mut String, key: &str, value: impl Into<Value>) {
    *text += &format!("{key} = {}\n", value.into());
}

fn settings<'a>(text: &mut String, settings: impl IntoIterator<Item = &'a Setting>) {
    for setting in settings {
        *text += &format!("{}\n", assignment(setting));
    }
}

fn axis_text(text: &mut String, axis: &Axis) {
    *text += "\n[[axis]]\n";
    line(text, "label", axis.label.as_str());
    if let Some(field) = &axis.field {
        let choices = axis.values.iter();
        let values = choices.flat_map(|choice| choice.settings.iter().map(|s| s.value.clone()));
        line(text, "field", field.as_str());
        line(text, "values", values.collect::<Vec<Value>>());
        line(text, "names", axis.values.iter().map(|v| v.name.as_str()).collect::<Vec<_>>());
        return;
    }
    *text += "settings = [\n";
    for choice in &axis.values {
        let name = format!("name = {}", Value::from(choice.name.as_str()));
        let parts = [name].into_iter().chain(choice.settings.iter().map(assignment));
        *text += &format!("  {{ {} }},\n", parts.collect::<Vec<_>>().join(", "));
    }
    *text += "]\n";
}

fn assignment(setting: &Setting) -> String {
    format!("{} = {}", setting.field, setting.value)
}

/// Converts seeds to TOML. They fit, because they were read from TOML or counted from one.
fn integers(seeds: &[u64]) -> Value {
    let values =
        seeds.iter().map(|&seed| Value::Integer(i64::try_from(seed).unwrap_or(i64::MAX))).collect();
    Value::Array(values)
}
