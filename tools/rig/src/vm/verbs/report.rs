//! The report of the matrix: one entry per program, as JSON and as a table.

use std::collections::BTreeSet;

use comfy_table::{CellAlignment, Table, presets};
use serde::{Deserialize, Serialize};

use super::case::CaseReport;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct VerbsReport {
    pub programs: Vec<ProgramReport>,
    pub faults: Vec<CaseReport>,
    #[serde(default)]
    pub plugin: Vec<CaseReport>,
    /// Result of pyverbs' own test suite, if it was run.
    pub pyverbs: Option<CaseReport>,
}

impl VerbsReport {
    fn cases(&self) -> impl Iterator<Item = &CaseReport> {
        let programs = self.programs.iter().map(|program| &program.case);
        (programs.chain(&self.plugin).chain(&self.pyverbs)).chain(&self.faults)
    }

    pub fn passed(&self) -> bool {
        self.cases().next().is_some() && !self.failed()
    }

    pub fn failed(&self) -> bool {
        !self.cases().all(|case| case.passed)
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ProgramReport {
    #[serde(flatten)]
    pub case: CaseReport,
    /// Command of the program, without the library's part.
    pub command: String,
    pub profile: String,
    pub wire_messages: u64,
    pub wire_bytes: u64,
    /// Packets of connected queue pairs that crossed again, because of a short timeout or a loss.
    pub wire_repeats: u64,
    /// DSCPs of all RoCE packets that crossed the router, except connection management.
    pub dscp: BTreeSet<u8>,
}

/// Returns a table whose columns from the third to the `last` are numbers, or `None` without rows.
fn table_of(header: &[&str], last: usize, rows: Vec<Vec<String>>) -> Option<String> {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header.to_vec());
    for column in table.column_iter_mut().take(last).skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.add_rows(rows);
    (!table.is_empty()).then(|| table.to_string())
}

fn mark(case: &CaseReport) -> String {
    if case.passed { "ok" } else { "FAILED" }.into()
}

fn cases<'a>(kind: &str, cases: impl IntoIterator<Item = &'a CaseReport>) -> Option<String> {
    let row = |case: &CaseReport| {
        let seconds = format!("{:.1}", case.seconds);
        vec![case.name.clone(), mark(case), seconds, case.seen.clone()]
    };
    let rows = cases.into_iter().map(row).collect();
    table_of(&[kind, "", "s", "what was seen"], 3, rows)
}

fn programs(report: &VerbsReport) -> Option<String> {
    let row = |program: &ProgramReport| {
        let (case, library) = (&program.case, program.case.library);
        let dscp: Vec<String> = program.dscp.iter().map(ToString::to_string).collect();
        vec![
            case.name.clone(),
            mark(case),
            (library.work_requests + library.passed_work_requests).to_string(),
            library.deferred.to_string(),
            program.wire_bytes.max(library.bytes).to_string(),
            dscp.join(","),
            format!("{:.1}", case.seconds),
        ]
    };
    let header = ["program", "", "WRs", "deferred", "bytes", "DSCP", "s"];
    table_of(&header, 7, report.programs.iter().map(row).collect())
}

pub fn table(report: &VerbsReport) -> String {
    let parts = [
        programs(report),
        cases("NCCL plugin", &report.plugin),
        cases("test suite", &report.pyverbs),
        cases("fault", &report.faults),
    ];
    let failures = |case: &CaseReport| {
        let lines = case.failures.iter().map(|why| format!("{}: {why}", case.name));
        lines.collect::<Vec<_>>()
    };
    let failures = report.cases().flat_map(failures);
    let parts: Vec<String> = parts.into_iter().flatten().chain(failures).collect();
    parts.join("\n\n")
}
