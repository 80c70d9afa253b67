//! The report as one Markdown page: tables of the plan's metrics, of where the time goes, and all
//! that a terminal shows, with the plan that repeats the runs.

use super::sheet::Sheet;
use super::view::View;
use super::{Report, capacity, metric, sheets, table};

pub fn page(report: &Report) -> String {
    let plan = &report.plan;
    let mut text = format!("# {}\n\n", plan.title);
    if !plan.question.is_empty() {
        text += &format!("{}\n\n", plan.question);
    }
    for warning in capacity::warnings(report) {
        text += &format!("* {warning}\n");
    }
    text += &format!("\n{}\n", lead(report));
    text += &incomplete(report);
    if !report.runs.is_empty() {
        let view = View::whole(report);
        section(
            &mut text,
            "Where the time goes",
            "Means over seeds, and the attainment without contention. Where that is low, no \
             network policy can help.",
            &capacity::capacity(&view),
        );
        // The tables below have the attainment in any case.
        for metric in plan.plot.metrics.iter().filter(|m| m.key != metric::ATTAINMENT.key) {
            let sheets = sheets::over_x(&view, metric);
            if !sheets.is_empty() {
                section(&mut text, &metric.title(), "Means over seeds.", &sheets);
            }
        }
        let numbers = "Means over seeds ± half a 95 % confidence interval.";
        section(&mut text, "Numbers", numbers, &table::all(report));
    }
    let version = env!("CARGO_PKG_VERSION");
    let toml = plan.to_toml();
    text + &format!(
        "\n## The plan\n\nlaxity-sim {version}. Fields that the plan does not name have their \
         defaults. The same plan gives the same numbers on any machine: save this as a file and \
         run it with `laxity sim run FILE`.\n\n```toml\n{toml}```\n"
    )
}

fn section(text: &mut String, title: &str, about: &str, sheets: &[Sheet]) {
    let tables: Vec<String> = sheets.iter().map(Sheet::markdown).collect();
    let tables = tables.join("\n");
    *text += &format!("\n## {title}\n\n{about}\n\n{tables}");
}

fn lead(report: &Report) -> String {
    let plan = &report.plan;
    let seeds = match plan.seeds.len() {
        1 => "one seed: how far noise alone goes is unknown".to_owned(),
        count => format!("{count} seeds each"),
    };
    let requests = report.runs.iter().map(|run| run.outcome.requests).min();
    let requests = requests.map_or_else(String::new, |requests| {
        format!(" A run counts at least {requests} requests after its warm-up.")
    });
    let count = |count: usize, what: &str| match count {
        1 => format!("1 {what}"),
        count => format!("{count} {what}s"),
    };
    format!(
        "{}, {}, {seeds}.{requests} All variants see the same arrivals. Simulated: \
         virtual time, the scheduler's own decision code.",
        count(report.points.len(), "point"),
        count(plan.variants.len(), "variant"),
    )
}

fn incomplete(report: &Report) -> String {
    let mut text = String::new();
    if report.missing > 0 {
        let missing = report.missing;
        text += &format!("\n**{missing} runs of this plan have not been run.**\n");
    }
    if !report.failures.is_empty() {
        text += &format!("\n**{} runs failed.**\n\n", report.failures.len());
        for (failure, count) in report.kinds_of_failures() {
            let first = report.failure_name(failure);
            text += &format!("* {count} × {}, first {first}\n", failure.problem);
        }
    }
    text
}
