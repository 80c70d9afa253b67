//! The report as JSON. The same plan gives the same bytes for any number of threads.

use serde_json::{Map, Value, json};

use super::{Report, metric};
use crate::reproduce;

/// Version of the format. It changes when a field is removed or changes its meaning.
const FORMAT: u32 = 1;

/// Returns the report as JSON. Each entry of a list is on a line of its own.
pub fn json(report: &Report) -> String {
    let fields = [
        ("format", json!(FORMAT)),
        ("made_by", json!(concat!("laxity-sim ", env!("CARGO_PKG_VERSION")))),
        ("plan", plan(report)),
        ("summary", summary(report).into()),
        ("sustained", sustained(report).into()),
        ("compared", compared(report).into()),
        ("paper", json!(reproduce::check(report))),
        ("failures", failures(report).into()),
        ("missing", json!(report.missing)),
        ("runs", runs(report).into()),
    ];
    let fields: Vec<String> =
        fields.iter().map(|(name, value)| format!("  \"{name}\": {}", lines(value))).collect();
    format!("{{\n{}\n}}\n", fields.join(",\n"))
}

fn lines(value: &Value) -> String {
    match value {
        Value::Array(entries) if !entries.is_empty() => {
            let entries: Vec<String> = entries.iter().map(|e| format!("    {e}")).collect();
            format!("[\n{}\n  ]", entries.join(",\n"))
        }
        other => other.to_string(),
    }
}

fn plan(report: &Report) -> Value {
    let plan = &report.plan;
    let reference = plan.reference().map(|index| &plan.variants[index].name);
    json!({
        "name": plan.name,
        "title": plan.title,
        "question": plan.question,
        "seeds": plan.seeds,
        "reference": reference,
        "toml": plan.to_toml(),
    })
}

/// Returns the values of the axes at a point, as numbers where possible and else as names.
fn at(report: &Report, point: usize) -> Value {
    let at = report.plan.at(&report.points[point]);
    Value::Object(
        at.map(|(axis, choice)| {
            let value = match choice.number {
                Some(number) => Value::from(number),
                None => Value::from(choice.name.as_str()),
            };
            (axis.key().to_owned(), value)
        })
        .collect(),
    )
}

fn summary(report: &Report) -> Vec<Value> {
    let mut found = Vec::new();
    for point in 0..report.points.len() {
        for (index, variant) in report.plan.variants.iter().enumerate() {
            let metrics: Map<String, Value> = metric::ALL
                .iter()
                .filter_map(|metric| {
                    let estimate = report.estimate(point, index, metric)?;
                    Some((metric.key.to_owned(), json!(estimate)))
                })
                .collect();
            if !metrics.is_empty() {
                found.push(json!({
                    "at": at(report, point),
                    "variant": variant.name,
                    "metrics": metrics,
                }));
            }
        }
    }
    found
}

fn sustained(report: &Report) -> Vec<Value> {
    let mut found = Vec::new();
    for panel in report.panels() {
        for rate in report.sustained(&panel) {
            let mut value = json!(rate);
            value["panel"] = json!(panel.name);
            value["variant"] = json!(report.plan.variants[rate.variant].name);
            found.push(value);
        }
    }
    found
}

fn compared(report: &Report) -> Vec<Value> {
    report
        .comparisons()
        .iter()
        .map(|comparison| {
            let mut value = json!(comparison);
            value["at"] = at(report, comparison.point);
            value["with"] = json!(report.plan.variants[comparison.other].name);
            value
        })
        .collect()
}

fn failures(report: &Report) -> Vec<Value> {
    report
        .failures
        .iter()
        .map(|failure| {
            json!({
                "at": at(report, failure.point),
                "variant": report.plan.variants[failure.variant].name,
                "seed": failure.scenario.seed,
                "problem": failure.problem,
                "scenario": failure.scenario,
            })
        })
        .collect()
}

fn runs(report: &Report) -> Vec<Value> {
    report
        .runs
        .iter()
        .map(|run| {
            json!({
                "at": at(report, run.point),
                "variant": report.plan.variants[run.variant].name,
                "seed": run.seed,
                "outcome": run.outcome,
            })
        })
        .collect()
}
