//! The report as tables for a terminal.

use std::fmt::Write as _;

use comfy_table::{Cell, CellAlignment, Table, presets};

use super::metric::{
    ATTAINMENT, COLLECTIVE_MEAN, COLLECTIVE_P99, COLLECTIVE_STRETCH, EARLINESS_MEAN, KV_REUSE,
    LATENESS_MEAN, Metric, P2D, PORT_BUSY_MEAN, PRUNED, QUEUE, TTFT_MEAN, TTFT_P50, TTFT_P99,
};
use super::{Estimate, Panel, Report};
use crate::reproduce;

/// The metrics that tables show where there is space for many.
pub(super) const DETAILS: [&Metric; 14] = [
    &ATTAINMENT,
    &TTFT_MEAN,
    &TTFT_P50,
    &TTFT_P99,
    &COLLECTIVE_MEAN,
    &COLLECTIVE_P99,
    &COLLECTIVE_STRETCH,
    &EARLINESS_MEAN,
    &LATENESS_MEAN,
    &QUEUE,
    &KV_REUSE,
    &P2D,
    &PORT_BUSY_MEAN,
    &PRUNED,
];

/// What they are called where there is little.
const SHORT: [&str; 14] = [
    "in time %",
    "TTFT ms",
    "p50",
    "p99",
    "collect. ms",
    "p99",
    "stretch",
    "early ms",
    "late ms",
    "queue ms",
    "KV ms",
    "P2D ms",
    "NICs %",
    "pruned",
];

/// The tables, and what one has to know to read them.
#[must_use]
pub fn table(report: &Report) -> String {
    let mut text = format!("{}\n", report.plan.title);
    if !report.plan.question.is_empty() {
        text += &report.plan.question;
        text.push('\n');
    }
    if report.runs.is_empty() {
        text += &failures(report);
        return text.trim_end().to_owned();
    }
    let panels = report.panels();
    if report.plan.x().is_some() {
        for panel in &panels {
            text += &attainment(report, panel);
        }
    }
    if report.plan.x().is_some() {
        text += "\nwhere variants differ most:\n";
    }
    text += &details(report, &panels);
    text += &comparison(report);
    text += &paper(report);
    for finding in report.findings() {
        writeln!(text, "{finding}").expect("a String takes all");
    }
    text += &failures(report);
    text.trim_end().to_owned()
}

fn new(heading: impl IntoIterator<Item = String>) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::UTF8_FULL_CONDENSED)
        .set_header(heading);
    table
}

/// Names on the left, numbers on the right.
fn add(table: &mut Table, names: usize, cells: Vec<String>) {
    table.add_row(cells.into_iter().enumerate().map(|(column, text)| {
        Cell::new(text).set_alignment(if column < names {
            CellAlignment::Left
        } else {
            CellAlignment::Right
        })
    }));
}

fn mean(estimate: Option<Estimate>, metric: &Metric) -> String {
    estimate.map_or_else(
        || "–".to_owned(),
        |estimate| metric.unit.shown(estimate.mean),
    )
}

fn with_interval(estimate: Option<Estimate>, metric: &Metric) -> String {
    let mut text = mean(estimate, metric);
    if let Some(half) = estimate.and_then(|e| e.half_width) {
        write!(text, " ±{}", metric.unit.shown(half)).expect("a String takes all");
    }
    text
}

/// Attainment over the horizontal axis, and the rate at 90 %.
fn attainment(report: &Report, panel: &Panel) -> String {
    let x = report.plan.x().expect("only called with one");
    let rates = report.sustained(panel);
    let mut heading = vec!["in time %".to_owned()];
    heading.extend(panel.points.iter().map(|&p| report.x_name(p).to_owned()));
    if !rates.is_empty() {
        heading.push("rate at 90 %".to_owned());
    }
    let mut table = new(heading);
    for (variant, named) in report.plan.variants.iter().enumerate() {
        let mut cells = vec![named.name.clone()];
        cells.extend(panel.points.iter().map(|&point| {
            with_interval(report.estimate(point, variant, &ATTAINMENT), &ATTAINMENT)
        }));
        if let Some(found) = rates.get(variant) {
            let rate = found.rate.map(|rate| rate.to_string());
            cells.push(rate.unwrap_or_else(|| "–".to_owned()));
        }
        add(&mut table, 1, cells);
    }
    let name = match panel.name.as_str() {
        "" => String::new(),
        name => format!("{name}, "),
    };
    format!("\n{name}by {}\n{table}\n", report.plan.axes[x].label)
}

/// Many metrics at one point of each panel.
fn details(report: &Report, panels: &[Panel]) -> String {
    let several = report.points.len() > 1;
    let mut heading = Vec::new();
    if several {
        heading.push("at".to_owned());
    }
    heading.push("variant".to_owned());
    heading.extend(SHORT.map(str::to_owned));
    let mut table = new(heading);
    for panel in panels {
        let point = report.telling(panel);
        for (variant, named) in report.plan.variants.iter().enumerate() {
            let mut cells = Vec::new();
            if several {
                cells.push(report.point_name(point));
            }
            cells.push(named.name.clone());
            cells.extend(DETAILS.iter().enumerate().map(|(column, metric)| {
                let estimate = report.estimate(point, variant, metric);
                if column == 0 {
                    with_interval(estimate, metric)
                } else {
                    mean(estimate, metric)
                }
            }));
            add(&mut table, 1 + usize::from(several), cells);
        }
    }
    format!("{table}\n")
}

/// How the reference stands to the others, over all points.
fn comparison(report: &Report) -> String {
    let comparisons = report.comparisons();
    let Some(reference) = report.plan.reference().filter(|_| !comparisons.is_empty()) else {
        return String::new();
    };
    let heading = [
        "against",
        "points better",
        "no difference",
        "worse",
        "one seed",
        "least",
        "most",
    ];
    let mut table = new(heading.map(str::to_owned));
    for (other, named) in report.plan.variants.iter().enumerate() {
        if !comparisons.iter().any(|c| c.other == other) {
            continue;
        }
        let tally = report.tally(&comparisons, other);
        let extreme = |found: Option<(Estimate, usize)>| {
            found.map_or_else(String::new, |(difference, point)| {
                let mut text = format!("{:+.1}", difference.mean * 100.0);
                if let Some(half) = difference.half_width {
                    write!(text, " ±{:.1}", half * 100.0).expect("a String takes all");
                }
                if report.points.len() > 1 {
                    write!(text, " ({})", report.point_name(point)).expect("a String takes all");
                }
                text
            })
        };
        let mut cells = vec![named.name.clone()];
        cells.extend(
            [tally.above, tally.level, tally.below, tally.unknown].map(|count| count.to_string()),
        );
        cells.extend([extreme(tally.worst), extreme(tally.best)]);
        add(&mut table, 1, cells);
    }
    format!(
        "\n{} less the others, attainment in percentage points (differences by seed, 95 % \
         confidence):\n{table}\n",
        report.plan.variants[reference].name
    )
}

/// What the paper says about the figure, if the plan is one.
fn paper(report: &Report) -> String {
    let findings = reproduce::check(report);
    if findings.is_empty() {
        return String::new();
    }
    let heading = ["the paper says", "where", "paper", "here", "laxity here"];
    let mut table = new(heading.map(str::to_owned));
    for finding in findings {
        let cells = vec![
            finding.says.to_owned(),
            finding.panel.clone(),
            finding.paper_shown(),
            finding.shown(finding.here),
            finding.shown(finding.laxity),
        ];
        add(&mut table, 2, cells);
    }
    format!("\n{table}\n")
}

fn failures(report: &Report) -> String {
    let mut text = String::new();
    for (failure, count) in report.kinds_of_failures() {
        let runs = if count == 1 { "run" } else { "runs" };
        let scenario = serde_json::to_string(&failure.scenario).expect("a scenario is JSON");
        writeln!(
            text,
            "{count} {runs} failed: {}\n  first {}: {scenario}",
            failure.problem,
            report.failure_name(failure)
        )
        .expect("a String takes all");
    }
    if report.missing > 0 {
        writeln!(
            text,
            "{} runs of this plan have not been run",
            report.missing
        )
        .expect("a String takes all");
    }
    text
}
