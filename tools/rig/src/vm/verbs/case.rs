//! What one case came to: a program, a fault, a case of the NCCL plugin, or pyverbs' suite; and what
//! the library counted meanwhile.

use std::fs;
use std::ops::AddAssign;
use std::time::Instant;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::vm::guest::Guest;
use crate::vm::task::TaskReport;

/// What the library counted, as its report says (`LAXITY_REPORT`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LibraryReport {
    /// Work requests on queue pairs that it schedules.
    pub work_requests: u64,
    /// Their payload.
    pub bytes: u64,
    /// Those that waited for a permit.
    pub deferred: u64,
    /// Work requests passed through (datagrams).
    pub passed_work_requests: u64,
    /// Their payload.
    pub passed_bytes: u64,
    /// Those that the provider refused after their permit.
    pub failed_late: u64,
    /// Those that were taken from the program and never posted.
    pub dropped: u64,
    /// Bytes under permits.
    pub scheduled_bytes: u64,
    /// Bytes that went out unscheduled.
    pub bypassed_bytes: u64,
    /// How often it found another daemon.
    pub reattaches: u64,
}

impl AddAssign for LibraryReport {
    fn add_assign(&mut self, other: Self) {
        self.work_requests += other.work_requests;
        self.bytes += other.bytes;
        self.deferred += other.deferred;
        self.passed_work_requests += other.passed_work_requests;
        self.passed_bytes += other.passed_bytes;
        self.failed_late += other.failed_late;
        self.dropped += other.dropped;
        self.scheduled_bytes += other.scheduled_bytes;
        self.bypassed_bytes += other.bypassed_bytes;
        self.reattaches += other.reattaches;
    }
}

/// The sum of a report's lines; `None` if there is no report.
pub(super) fn read_report(path: &str) -> anyhow::Result<Option<LibraryReport>> {
    let Ok(text) = fs::read_to_string(path) else {
        return Ok(None);
    };
    let mut sum = LibraryReport::default();
    for line in text.lines() {
        sum += serde_json::from_str(line).with_context(|| format!("{path}: {line}"))?;
    }
    Ok(Some(sum))
}

/// What a case came to.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CaseReport {
    /// Its name in the matrix.
    pub name: String,
    /// Whether every check held.
    pub passed: bool,
    /// Parts of it that passed, where it has some.
    pub cases: usize,
    /// What was seen, in words.
    pub seen: String,
    /// Seconds it took.
    pub seconds: f64,
    /// Which checks did not hold, and what there is to go on.
    pub failures: Vec<String>,
    /// What the library counted, in all processes.
    #[serde(flatten)]
    pub library: LibraryReport,
}

impl CaseReport {
    /// Runs a case, and says on the console how it ended. An error of `case` is a failure.
    pub(super) fn of(
        name: &str,
        guest: &Guest,
        case: impl FnOnce(&mut Self) -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let began = Instant::now();
        let mut report = Self {
            name: name.into(),
            ..Self::default()
        };
        if let Err(error) = case(&mut report) {
            report.fail(format!("{error:#}"));
        }
        report.seconds = began.elapsed().as_secs_f64();
        report.passed = report.failures.is_empty();
        let how = if report.passed { "ok" } else { "FAILED" };
        guest.say(&format!("{name}: {how}, {:.1} s", report.seconds))?;
        Ok(report)
    }

    pub(super) fn fail(&mut self, why: impl Into<String>) {
        self.failures.push(why.into());
    }

    /// A failure, unless it `holds`.
    pub(super) fn check(&mut self, holds: bool, otherwise: impl Into<String>) {
        if !holds {
            self.fail(otherwise);
        }
    }

    /// A failure, unless the task ended with 0 by itself.
    pub(super) fn check_ended(&mut self, what: &str, task: &TaskReport) {
        if !task.succeeded() {
            self.fail(format!("{what} {}", ended(task)));
        }
    }
}

/// How a task ended, and the last lines that it said.
pub(super) fn ended(task: &TaskReport) -> String {
    let how = match (task.timed_out, task.code) {
        (true, _) => "was killed at its time limit".into(),
        (_, Some(code)) => format!("ended with {code}"),
        _ => format!("was ended by signal {}", task.signal.unwrap_or(0)),
    };
    let last = |text: &str| {
        let lines: Vec<&str> = text.trim_end().lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    };
    format!(
        "{how} and said: {}\n{}",
        last(&task.stdout),
        last(&task.stderr)
    )
}
