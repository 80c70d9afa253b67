//! The report as tables for a terminal.

use super::sheet::Sheet;
use super::view::View;
use super::{Report, capacity, sheets};

pub fn table(report: &Report) -> String {
    let mut text = format!("{}\n", report.plan.title);
    if !report.plan.question.is_empty() {
        text += &report.plan.question;
        text.push('\n');
    }
    if !report.runs.is_empty() {
        for sheet in all(report) {
            text += &format!("\n{}", sheet.terminal());
        }
        for warning in capacity::warnings(report) {
            text += &format!("{warning}\n");
        }
    }
    text += &failures(report);
    text.trim_end().to_owned()
}

/// Returns all tables: attainment, sustained rates, metrics at the point where variants differ
/// most, comparisons with the reference, and the paper's numbers for plans of figures.
pub(super) fn all(report: &Report) -> Vec<Sheet> {
    let view = View::whole(report);
    let mut all = Vec::new();
    if report.plan.x().is_some() {
        all.extend(sheets::attainment(&view));
    }
    all.extend(sheets::sustained(&view).unwrap_or_default());
    all.extend(sheets::details(&view, &sheets::OVERVIEW));
    if !report.comparisons().is_empty() {
        all.extend(sheets::against(&view));
    }
    all.extend(sheets::paper(report));
    all
}

fn failures(report: &Report) -> String {
    let mut text = String::new();
    for (failure, count) in report.kinds_of_failures() {
        let runs = if count == 1 { "run" } else { "runs" };
        let scenario = serde_json::to_string(&failure.scenario).expect("a scenario is JSON");
        let (problem, first) = (&failure.problem, report.failure_name(failure));
        text += &format!("{count} {runs} failed: {problem}\n  first {first}: {scenario}\n");
    }
    if report.missing > 0 {
        text += &format!("{} runs of this plan have not been run\n", report.missing);
    }
    text
}
