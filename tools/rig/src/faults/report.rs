//! The report of a fault campaign as a table for people.

use std::fmt::Write as _;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};

use super::campaign::Report;

fn grid(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(header.to_vec()).add_rows(rows);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

fn kinds(report: &Report) -> Vec<Vec<String>> {
    let row = |(kind, number): (&String, &u64)| vec![kind.replace('_', " "), number.to_string()];
    report.by_kind.iter().map(row).collect()
}

const PATHS: [&str; 6] =
    ["path", "transfers", "MiB checked", "MiB permitted", "MiB bypassed", "ended by a fault"];

fn paths(report: &Report) -> Vec<Vec<String>> {
    let rows = report.by_path.iter().map(|(path, counts)| {
        vec![
            path.clone(),
            counts.transfers.to_string(),
            mib(counts.bytes),
            mib(counts.scheduled_bytes),
            mib(counts.bypassed_bytes),
            counts.ended_by_fault.to_string(),
        ]
    });
    rows.collect()
}

/// Returns the report as a table for a terminal.
#[must_use]
pub fn table(report: &Report) -> String {
    let mut text = format!(
        "{}\n{}\n{} faults in {} rounds of seed {} ({:.1} a second), {} transfers, {} MiB \
         checked, longest wait {} ms, {} violations",
        grid(&["fault", "times"], kinds(report).into_iter()),
        grid(&PATHS, paths(report).into_iter()),
        report.faults,
        report.rounds,
        report.seed,
        report.faults as f64 / report.seconds.max(0.001),
        report.transfers,
        mib(report.bytes_checked),
        report.longest_stall_ms,
        report.violations
    );
    for (path, failure) in &report.failures {
        // Writing to a string can't fail.
        let _ = write!(
            text,
            "\nround {}: {}\n  {} of {} faults are enough: {}\n  play it again with: laxity lab \
             faults --replay {}",
            failure.round,
            failure.violations.first().map_or("nothing was wrong again", String::as_str),
            failure.schedule.faults.len(),
            failure.faults_before,
            failure.schedule.faults.iter().map(|f| f.kind.name()).collect::<Vec<_>>().join(", "),
            path.display()
        );
    }
    text
}
