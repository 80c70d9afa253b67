//! pyverbs' own test suite (rdma-core's `tests`) without the library, with it, with the secret of
//! bundles, and under a daemon that permits one work request at a time. The same tests must pass
//! each time.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;

use super::Lab;
use super::case::{CaseReport, read_report};
use super::catalogue::SECRET;
use super::daemon::{GuestDaemon, TIGHT_SOCKET};
use super::program::patience;
use crate::error::LabError;
use crate::vm::network::DEVICES;

pub(super) const NAME: &str = "pyverbs";
const SCRIPT: &str = scratch!("pyverbs_suite.py");
const REPORT: &str = scratch!("report.pyverbs");
const SCRIPT_PY: &str = include_str!("pyverbs_suite.py");
const LIMIT: Duration = Duration::from_secs(300);
/// Fewest tests that must pass without the library. With fewer the suite itself does not work.
const PASSED_MIN: usize = 40;
/// Number of times that a test which only fails with the library runs again, with and without it.
/// SoftRoCE itself fails a test sometimes.
const AGAIN: usize = 2;

#[derive(Debug, Default, Deserialize)]
struct SuiteResults {
    ended: BTreeMap<String, String>,
    why: BTreeMap<String, String>,
}

impl SuiteResults {
    fn passed(&self) -> impl Iterator<Item = &str> {
        let passed = self.ended.iter().filter(|(_, how)| *how == "passed");
        passed.map(|(name, _)| name.as_str())
    }

    fn has_passed(&self, name: &str) -> bool {
        self.ended.get(name).is_some_and(|how| how == "passed")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Under {
    /// Without the library and without a daemon.
    Nothing,
    Daemon,
    /// With the secret of bundles.
    Bundles,
    /// With the library, under a daemon that permits one work request at a time.
    Tight,
}

impl Under {
    const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "without the library",
            Self::Daemon => "under the daemon",
            Self::Bundles => "with the secret of bundles",
            Self::Tight => "one at a time",
        }
    }
}

/// Runs the suite, or only the given tests of it.
fn suite(lab: &Lab<'_>, under: Under, only: &[&str]) -> Result<SuiteResults, LabError> {
    let folder = lab
        .programs
        .pyverbs
        .as_ref()
        .ok_or_else(|| LabError::missing("pyverbs", "run without --without-pyverbs"))?;
    let text = |path: &Path| path.display().to_string();
    let gid = lab.guest.facts.gid_index.to_string();
    let tests = text(&folder.join("tests"));
    let mut argv = vec!["/usr/bin/python3", SCRIPT, &tests, DEVICES[0], &gid];
    argv.extend(only);
    let mut task = lab.guest.task(argv, LIMIT);
    let modules = text(&folder.join("modules"));
    task.env.push(("PYTHONPATH".into(), modules));
    if under != Under::Nothing {
        let library = text(&lab.programs.library);
        task.env.push(("LD_PRELOAD".into(), library));
        task.env.extend(patience());
    }
    if under == Under::Bundles {
        let _ = fs::remove_file(REPORT);
        task.env.push(("LAXITY_BUNDLES".into(), SECRET.into()));
        task.env.push(("LAXITY_REPORT".into(), REPORT.into()));
    }
    if under == Under::Tight {
        let socket = TIGHT_SOCKET.to_owned();
        task.env.push(("LAXITY_SOCKET".into(), socket));
    }
    let report = task.start()?.wait();
    let line = report.stdout.lines().rfind(|line| line.starts_with("{\""));
    let Some(line) = line else {
        let how = format!("{} {report}", under.name());
        return Err(LabError::program("pyverbs' suite", how));
    };
    serde_json::from_str(line)
        .map_err(|error| LabError::unreadable(format!("pyverbs' suite said: {line}"), error))
}

/// Compares two runs. Adds a failure for each test that differs every time.
fn compare(
    lab: &Lab<'_>,
    before: &SuiteResults,
    under: Under,
    case: &mut CaseReport,
) -> Result<(), LabError> {
    let mut with = suite(lab, under, &[])?;
    let (passed, mut differ): (Vec<&str>, Vec<&str>) =
        before.passed().partition(|name| with.has_passed(name));
    for _ in 0..AGAIN {
        if differ.is_empty() {
            break;
        }
        let without = suite(lab, Under::Nothing, &differ)?;
        with = suite(lab, under, &differ)?;
        differ.retain(|name| without.has_passed(name) && !with.has_passed(name));
    }
    case.seen += &format!(", {} {}", passed.len(), under.name());
    for name in differ {
        let why = with.why.get(name).map_or("it was skipped", String::as_str);
        case.fail(format!("{name}, {}: {}", under.name(), why.trim()));
    }
    Ok(())
}

pub(super) fn run(lab: &Lab<'_>, case: &mut CaseReport) -> Result<(), LabError> {
    fs::write(SCRIPT, SCRIPT_PY).map_err(LabError::file("writing", SCRIPT))?;
    let before = suite(lab, Under::Nothing, &[])?;
    case.cases = before.passed().count();
    case.seen = format!("{} pass without the library", case.cases);
    if case.cases < PASSED_MIN {
        let why = before.why.iter().next();
        let how = format!("does not work: {} of {}: {why:?}", case.seen, before.ended.len());
        return Err(LabError::program("pyverbs' suite", how));
    }
    compare(lab, &before, Under::Daemon, case)?;
    compare(lab, &before, Under::Bundles, case)?;
    let bundles = read_report(REPORT)?.unwrap_or_default().bundles;
    // Most queue pairs of the suite end before an agreement.
    case.seen += &format!(" ({bundles} made)");
    let _tight = GuestDaemon::start_tight(lab)?;
    compare(lab, &before, Under::Tight, case)
}
