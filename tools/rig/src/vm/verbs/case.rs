//! The result of one case: a program, a fault, a case of the NCCL plugin, or pyverbs' suite. It
//! includes the library's counters.

use std::fs;
use std::ops::AddAssign;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::error::LabError;
use crate::vm::guest::Guest;
use crate::vm::task::TaskReport;

/// Counters of the library, in the form of its report (`LAXITY_REPORT`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LibraryReport {
    pub work_requests: u64,
    pub bytes: u64,
    /// Work requests that were deferred until a permit came.
    pub deferred: u64,
    pub passed_work_requests: u64,
    pub passed_bytes: u64,
    pub failed_late: u64,
    /// Work requests that the library accepted from the program and never posted.
    pub dropped: u64,
    pub scheduled_bytes: u64,
    pub bypassed_bytes: u64,
    pub reattaches: u64,
    /// Queue pairs that got siblings, and the work requests that siblings carried.
    pub bundles: u64,
    pub by_siblings: u64,
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
        self.bundles += other.bundles;
        self.by_siblings += other.by_siblings;
    }
}

/// Returns the sum of a report's lines, or `None` if there is no report.
pub(super) fn read_report(path: &str) -> Result<Option<LibraryReport>, LabError> {
    let Ok(text) = fs::read_to_string(path) else { return Ok(None) };
    let mut sum = LibraryReport::default();
    for line in text.lines() {
        sum += serde_json::from_str(line)
            .map_err(|error| LabError::unreadable(format!("{path}: {line}"), error))?;
    }
    Ok(Some(sum))
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CaseReport {
    pub name: String,
    pub passed: bool,
    /// Subtests that passed, if the case has some.
    pub cases: usize,
    pub seen: String,
    pub seconds: f64,
    pub failures: Vec<String>,
    #[serde(flatten)]
    pub library: LibraryReport,
}

impl CaseReport {
    /// Runs a case and prints its result on the console. An error of `case` counts as a failure.
    pub(super) fn of(
        name: &str,
        guest: &Guest,
        case: impl FnOnce(&mut Self) -> Result<(), LabError>,
    ) -> Result<Self, LabError> {
        let began = Instant::now();
        let mut report = Self { name: name.into(), ..Self::default() };
        if let Err(error) = case(&mut report) {
            report.fail(error.to_string());
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

    pub(super) fn check(&mut self, holds: bool, otherwise: impl Into<String>) {
        if !holds {
            self.fail(otherwise);
        }
    }

    /// Adds a failure unless the task ended with 0 by itself.
    pub(super) fn check_ended(&mut self, what: &str, task: &TaskReport) {
        if !task.succeeded() {
            self.fail(format!("{what} {task}"));
        }
    }
}
