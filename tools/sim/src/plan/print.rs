//! Formats a plan as TOML, including everything that it inherited or that the command line changed.

use std::fmt::Write as _;

use toml::Value;

use super::{Axis, Plan, Setting};

impl Plan {
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        let mut line = |key: &str, value: Value| {
            writeln!(text, "{key} = {value}").expect("a String takes all");
        };
        line("name", Value::from(self.name.as_str()));
        line("title", Value::from(self.title.as_str()));
        line("question", Value::from(self.question.as_str()));
        line("seeds", integers(&self.seeds));
        if let Some(reference) = &self.reference
            && self.variants.iter().any(|v| v.name == *reference)
        {
            line("reference", Value::from(reference.as_str()));
        }
        if !self.base.is_empty() {
            text += "\n[base]\n";
            for setting in self.base.values() {
                writeln!(text, "{}", assignment(setting)).expect("a String takes all");
            }
        }
        for axis in &self.axes {
            text += &axis_text(axis);
        }
        for variant in &self.variants {
            writeln!(text, "\n[[variant]]\nname = {}", Value::from(variant.name.as_str()))
                .expect("a String takes all");
            for setting in &variant.settings {
                writeln!(text, "{}", assignment(setting)).expect("a String takes all");
            }
        }
        text += "\n[plot]\n";
        if let Some(x) = self.x() {
            writeln!(text, "x = {}", Value::from(self.axes[x].key())).expect("a String takes all");
        }
        if let Some(at) = &self.plot.at {
            writeln!(text, "at = {}", Value::from(at.as_str())).expect("a String takes all");
        }
        let metrics: Vec<&str> = self.plot.metrics.iter().map(|m| m.key).collect();
        writeln!(text, "metrics = {}", Value::from(metrics)).expect("a String takes all");
        text
    }
}

fn axis_text(axis: &Axis) -> String {
    let mut text = format!("\n[[axis]]\nlabel = {}\n", Value::from(axis.label.as_str()));
    let names: Vec<&str> = axis.values.iter().map(|v| v.name.as_str()).collect();
    match &axis.field {
        Some(field) => {
            let values: Vec<Value> = axis
                .values
                .iter()
                .flat_map(|choice| choice.settings.iter().map(|s| s.value.clone()))
                .collect();
            writeln!(text, "field = {}", Value::from(field.as_str())).expect("a String takes all");
            writeln!(text, "values = {}", Value::Array(values)).expect("a String takes all");
            writeln!(text, "names = {}", Value::from(names)).expect("a String takes all");
        }
        None => {
            text += "settings = [\n";
            for choice in &axis.values {
                write!(text, "  {{ name = {}", Value::from(choice.name.as_str()))
                    .expect("a String takes all");
                for setting in &choice.settings {
                    write!(text, ", {}", assignment(setting)).expect("a String takes all");
                }
                text += " },\n";
            }
            text += "]\n";
        }
    }
    text
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
