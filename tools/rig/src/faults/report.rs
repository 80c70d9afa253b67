//! The report of a fault campaign as a table for people.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};

use super::campaign::Report;
use super::oracle::TransferCounts;

pub(super) fn grid(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(header.to_vec()).add_rows(rows);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

pub(super) fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

pub(super) fn kinds(by_kind: &BTreeMap<String, u64>) -> Vec<Vec<String>> {
    let row = |(kind, number): (&String, &u64)| vec![kind.replace('_', " "), number.to_string()];
    by_kind.iter().map(row).collect()
}

pub(super) const PATHS: [&str; 6] =
    ["path", "transfers", "MiB checked", "MiB permitted", "MiB bypassed", "ended by a fault"];

pub(super) fn paths(by_path: &BTreeMap<String, TransferCounts>) -> Vec<Vec<String>> {
    let rows = by_path.iter().map(|(path, counts)| {
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

/// Returns the tables and the last line, without the failures.
pub(crate) fn tables(report: &Report) -> String {
    let mut text = format!(
        "{}\n{}\n{} faults in {} rounds of seed {} ({:.1} a second), {} transfers, {} MiB \
         checked, longest wait {} ms, {} violations",
        grid(&["fault", "times"], kinds(&report.by_kind).into_iter()),
        grid(&PATHS, paths(&report.by_path).into_iter()),
        report.faults,
        report.rounds,
        report.seed,
        report.faults as f64 / report.seconds.max(0.001),
        report.transfers,
        mib(report.bytes_checked),
        report.longest_stall_ms,
        report.violations
    );
    if report.in_virtual_time {
        let a_minute = report.events as f64 / report.seconds.max(0.001) * 60.0 / 1e6;
        // Writing to a string can't fail.
        let _ = write!(text, ", {} events ({a_minute:.1} million a minute)", report.events);
    }
    text
}

pub fn table(report: &Report) -> String {
    let mut text = tables(report);
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

pub(super) fn markdown_table(header: &[&str], rows: &[Vec<String>]) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let header: Vec<String> = header.iter().map(|&cell| cell.to_owned()).collect();
    let rule = format!("|{}\n", "---|".repeat(header.len()));
    let rows: String = rows.iter().map(|row| line(row)).collect();
    line(&header) + &rule + &rows
}

pub fn page(report: &Report) -> String {
    let found = match report.failures.len() {
        0 => "No round failed.".to_owned(),
        _ => report.failures.iter().fold(String::new(), |text, (_, failure)| {
            let kinds: Vec<_> = failure.schedule.faults.iter().map(|f| f.kind.name()).collect();
            let what = failure.violations.first().map_or("", String::as_str);
            text + &format!("* round {}: {what} ({})\n", failure.round, kinds.join(", "))
        }),
    };
    format!(
        "# A fault campaign\n\nThis page is the output of\n\n```sh\nlaxity lab faults {}--faults \
         {} --seed {} --report docs/results/faults.md\n```\n\n[faults.md](../faults.md) says \
         what is done and checked. The campaign did **{} faults** in {} rounds\nand {:.1} \
         minutes. {} transfers completed. {} MiB were {}. **{} \
         rounds\nfailed**. The longest wait for a permit was {} ms.\n\n## What was found\n\n{}\n\n\
         ## Faults\n\n{}\n## Paths\n\n{}",
        if report.in_virtual_time { "--virtual " } else { "" },
        report.faults,
        report.seed,
        report.faults,
        report.rounds,
        report.seconds / 60.0,
        report.transfers,
        mib(report.bytes_checked),
        if report.in_virtual_time { "posted at their place" } else { "compared" },
        report.violations,
        report.longest_stall_ms,
        found.trim_end(),
        markdown_table(&["fault", "times"], &kinds(&report.by_kind)),
        markdown_table(&PATHS, &paths(&report.by_path)),
    )
}
