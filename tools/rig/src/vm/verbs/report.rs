//! What the matrix comes to: one entry per program, as JSON and as a table for people.

use std::collections::BTreeSet;

use comfy_table::{CellAlignment, Table};
use serde::{Deserialize, Serialize};

use super::contention::Contention;
use super::faults::Fault;
use super::overhead::Overhead;
use super::plugin::PluginReport;
use super::pyverbs::SuiteReport;

/// Everything that one boot brought.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct VerbsReport {
    /// The matrix.
    pub programs: Vec<ProgramReport>,
    /// A collective against bulk transfers, if that was asked for.
    pub contention: Option<Contention>,
    /// The same with the collective through the NCCL plugin.
    #[serde(default)]
    pub plugin_contention: Option<Contention>,
    /// What was killed, and what came of it.
    pub faults: Vec<Fault>,
    /// The NCCL plugin over verbs.
    #[serde(default)]
    pub plugin: Vec<PluginReport>,
    /// pyverbs' own test suite.
    #[serde(default)]
    pub pyverbs: Option<SuiteReport>,
    /// With the library against without, if that was asked for.
    pub overhead: Option<Overhead>,
}

impl VerbsReport {
    /// Whether all that was run passed, and anything was run at all.
    #[must_use]
    pub fn passed(&self) -> bool {
        let ran = !self.programs.is_empty()
            || !self.faults.is_empty()
            || !self.plugin.is_empty()
            || self.pyverbs.is_some()
            || self.contention.is_some()
            || self.plugin_contention.is_some()
            || self.overhead.is_some();
        ran && !self.failed()
    }

    /// Whether anything that was run failed.
    #[must_use]
    pub fn failed(&self) -> bool {
        let contention = [&self.contention, &self.plugin_contention];
        self.programs.iter().any(|program| !program.passed)
            || self.faults.iter().any(|fault| !fault.passed)
            || self.plugin.iter().any(|case| !case.passed)
            || self.pyverbs.iter().any(|suite| !suite.passed)
            || (contention.into_iter().flatten()).any(|it| !it.passed())
            || self.overhead.iter().any(|overhead| !overhead.passed)
    }
}

/// One program of the matrix, both sides together.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ProgramReport {
    /// Its name in the matrix.
    pub name: String,
    /// Whether every check held.
    pub passed: bool,
    /// What it ran, without the library's part.
    pub command: String,
    /// Job profile.
    pub profile: String,
    /// Work requests that the library counted on queue pairs that it schedules.
    pub work_requests: u64,
    /// Their payload.
    pub bytes: u64,
    /// Those that waited for a permit.
    pub deferred: u64,
    /// Work requests passed through (datagrams).
    pub passed_work_requests: u64,
    /// Bytes under permits.
    pub scheduled_bytes: u64,
    /// Bytes that went out unscheduled.
    pub bypassed_bytes: u64,
    /// Messages of connected queue pairs that crossed the router, retransmissions left out.
    pub wire_messages: u64,
    /// Their payload, READs' data included.
    pub wire_bytes: u64,
    /// Packets of theirs that crossed again: the sender did not wait long enough, or some were
    /// lost.
    pub wire_repeats: u64,
    /// DSCPs of all RoCE packets that crossed it, but for connection management.
    pub dscp: BTreeSet<u8>,
    /// Seconds it took.
    pub seconds: f64,
    /// Which checks did not hold, and what there is to go on.
    pub failures: Vec<String>,
}

fn mark(passed: bool) -> &'static str {
    if passed { "ok" } else { "FAILED" }
}

fn new_table(header: &[&str], first_number: usize, last_number: usize) -> Table {
    let mut table = Table::new();
    table
        .load_style(comfy_table::presets::NOTHING)
        .set_header(header.to_vec());
    for column in first_number..=last_number {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Rows of one kind: the name, whether it passed, seconds, and what was seen.
fn cases<'a>(
    kind: &str,
    rows: impl Iterator<Item = (&'a str, bool, f64, &'a str)>,
) -> Option<String> {
    let mut table = new_table(&[kind, "", "s", "what was seen"], 2, 2);
    for (name, passed, seconds, seen) in rows {
        table.add_row([name, mark(passed), &format!("{seconds:.1}"), seen]);
    }
    (!table.is_empty()).then(|| table.to_string())
}

fn programs(report: &VerbsReport) -> Option<String> {
    let header = ["program", "", "WRs", "deferred", "bytes", "DSCP", "s"];
    let mut table = new_table(&header, 2, 6);
    for program in &report.programs {
        let dscp: Vec<String> = program.dscp.iter().map(ToString::to_string).collect();
        table.add_row([
            program.name.clone(),
            mark(program.passed).into(),
            (program.work_requests + program.passed_work_requests).to_string(),
            program.deferred.to_string(),
            program.wire_bytes.max(program.bytes).to_string(),
            dscp.join(","),
            format!("{:.1}", program.seconds),
        ]);
    }
    (!table.is_empty()).then(|| table.to_string())
}

fn faults(report: &VerbsReport) -> Option<String> {
    let mut table = new_table(&["fault", "", "bypassed bytes", "s", "what was seen"], 2, 3);
    for fault in &report.faults {
        table.add_row([
            fault.name.clone(),
            mark(fault.passed).into(),
            fault.bypassed_bytes.to_string(),
            format!("{:.1}", fault.seconds),
            fault.seen.clone(),
        ]);
    }
    (!table.is_empty()).then(|| table.to_string())
}

fn overhead(report: &VerbsReport) -> Option<String> {
    let header = [
        "overhead", "", "without", "with", "change %", "spread %", "pairs",
    ];
    let mut table = new_table(&header, 2, 6);
    for row in &report.overhead.as_ref()?.rows {
        table.add_row([
            row.name.clone(),
            row.unit.clone(),
            format!("{:.2}", row.without_median),
            format!("{:.2}", row.with_median),
            format!("{:+.1}", row.change_percent),
            format!("{:.1}", row.spread_percent),
            row.pairs.to_string(),
        ]);
    }
    Some(table.to_string())
}

/// Each failure with the name of what failed.
fn failures(report: &VerbsReport) -> impl Iterator<Item = String> {
    let programs = (report.programs.iter()).map(|program| (&*program.name, &program.failures));
    let plugin = (report.plugin.iter()).map(|case| (&*case.name, &case.failures));
    let suite = (report.pyverbs.iter()).map(|suite| ("pyverbs", &suite.failures));
    let faults = (report.faults.iter()).map(|fault| (&*fault.name, &fault.failures));
    (programs.chain(plugin).chain(suite).chain(faults))
        .flat_map(|(name, failures)| failures.iter().map(move |why| format!("{name}: {why}")))
}

/// The report for people.
#[must_use]
pub fn table(report: &VerbsReport) -> String {
    let plugin = (report.plugin.iter()).map(|c| (&*c.name, c.passed, c.seconds, &*c.seen));
    let suite = (report.pyverbs.iter()).map(|s| ("pyverbs", s.passed, s.seconds, &*s.seen));
    let with_plugin = report.plugin_contention.as_ref();
    let parts = [
        programs(report),
        cases("NCCL plugin", plugin),
        cases("test suite", suite),
        faults(report),
        report.contention.as_ref().map(ToString::to_string),
        with_plugin.map(|it| format!("The collective is the NCCL plugin's:\n{it}")),
        overhead(report),
    ];
    let parts: Vec<String> = parts
        .into_iter()
        .flatten()
        .chain(failures(report))
        .collect();
    parts.join("\n\n")
}
