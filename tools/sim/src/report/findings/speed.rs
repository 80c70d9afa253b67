//! Timings of simulations on a machine.

use crate::report::Report;
use crate::report::sheet::{Cell, Sheet};
use crate::run::{Timing, thousands};

pub(super) fn speed(report: &Report, took: Option<&Timing>) -> Sheet {
    let runs = report.runs.len();
    let events: u64 = report.runs.iter().map(|run| run.outcome.events).sum();
    let virtual_s: f64 = report.runs.iter().map(|run| run.outcome.virtual_s).sum();
    // Each run used one thread. Runs from the journal have the timing that was recorded then.
    let busy_s: f64 = report.timing.runs.iter().map(|run| run.wall_s).sum();
    let heading = [
        "machine", "runs", "events", "events/s of a thread", "virtual s per s", "s per run",
        "threads", "s in all", "peak memory, MB",
    ];
    let mut table = Sheet::new(1, heading.map(Cell::from).to_vec());
    let unknown = || "–".to_owned();
    let machine = took.map(|took| took.processor.as_str()).filter(|name| !name.is_empty());
    // If a run was interrupted, the time from start to end does not cover all runs.
    let whole = took.filter(|took| took.simulated == runs);
    let peak = took.filter(|took| took.peak_rss_bytes > 0);
    let numbers = [
        runs.to_string(),
        thousands(events as f64),
        thousands(events as f64 / busy_s.max(1e-9)),
        digits(virtual_s / busy_s.max(1e-9)),
        digits(busy_s / runs.max(1) as f64),
        whole.map_or_else(unknown, |took| took.jobs.to_string()),
        whole.map_or_else(unknown, |took| digits(took.wall_s)),
        peak.map_or_else(unknown, |took| (took.peak_rss_bytes / 1_000_000).to_string()),
    ];
    let mut cells = vec![machine.map_or("–".into(), Cell::name)];
    cells.extend(numbers.map(Cell::Text));
    table.add(cells);
    table
}

fn digits(value: f64) -> String {
    let decimals = match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.decimals$}")
}
