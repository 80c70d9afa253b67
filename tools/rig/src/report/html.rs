//! placeholder
use super::measure::LabReport;
/// page
#[must_use]
pub fn html(_report: &LabReport) -> String { String::new() }
