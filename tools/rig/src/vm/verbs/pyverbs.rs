//! pyverbs' own test suite (rdma-core's `tests`), without the library, with it, and under a daemon
//! that permits one work request at a time: the same tests pass.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::Deserialize;

use super::Lab;
use super::case::{CaseReport, ended};
use super::daemon::{Daemon, TIGHT_SOCKET};
use super::program::patience;
use crate::vm::network::DEVICES;

/// What it is called among the programs.
pub(super) const NAME: &str = "pyverbs";
const SCRIPT: &str = scratch!("pyverbs_suite.py");
const SCRIPT_PY: &str = include_str!("pyverbs_suite.py");
const LIMIT: Duration = Duration::from_secs(300);
/// Fewer than this pass where the suite itself does not work, and then nothing is compared.
const PASSED_MIN: usize = 40;
/// A test that fails with the library alone is run again this often, both ways by turns: SoftRoCE
/// itself fails one now and then.
const AGAIN: usize = 2;

/// How the tests ended, by name.
#[derive(Debug, Default, Deserialize)]
struct Ended {
    ended: BTreeMap<String, String>,
    why: BTreeMap<String, String>,
}

impl Ended {
    fn passed(&self) -> impl Iterator<Item = &str> {
        let passed = self.ended.iter().filter(|(_, how)| *how == "passed");
        passed.map(|(name, _)| name.as_str())
    }

    fn has_passed(&self, name: &str) -> bool {
        self.ended.get(name).is_some_and(|how| how == "passed")
    }
}

/// How the suite is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Under {
    /// Without the library.
    Nothing,
    /// With it, under the daemon of the matrix.
    Daemon,
    /// With it, under a daemon that permits one work request at a time.
    Tight,
}

impl Under {
    const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "without the library",
            Self::Daemon => "under the daemon",
            Self::Tight => "one at a time",
        }
    }
}

/// Runs the suite, or those tests of it.
fn suite(lab: &Lab<'_>, under: Under, only: &[&str]) -> anyhow::Result<Ended> {
    let folder = lab
        .programs
        .pyverbs
        .as_ref()
        .context("pyverbs is missing")?;
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
    if under == Under::Tight {
        let socket = TIGHT_SOCKET.to_owned();
        task.env.push(("LAXITY_SOCKET".into(), socket));
    }
    let report = task.start()?.wait();
    let line = report.stdout.lines().rfind(|line| line.starts_with("{\""));
    let Some(line) = line else {
        bail!("pyverbs' suite {} {}", under.name(), ended(&report));
    };
    serde_json::from_str(line).with_context(|| format!("pyverbs' suite said: {line}"))
}

/// Compares two ways to run it; a line for each test that differs every time.
fn compare(
    lab: &Lab<'_>,
    before: &Ended,
    under: Under,
    case: &mut CaseReport,
) -> anyhow::Result<()> {
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

/// Runs the suite in all three ways.
pub(super) fn run(lab: &Lab<'_>, case: &mut CaseReport) -> anyhow::Result<()> {
    fs::write(SCRIPT, SCRIPT_PY).context("writing pyverbs_suite.py")?;
    let before = suite(lab, Under::Nothing, &[])?;
    case.cases = before.passed().count();
    case.seen = format!("{} pass without the library", case.cases);
    if case.cases < PASSED_MIN {
        let why = before.why.iter().next();
        bail!("{} of {}: {why:?}", case.seen, before.ended.len());
    }
    compare(lab, &before, Under::Daemon, case)?;
    let _tight = Daemon::start_tight(lab)?;
    compare(lab, &before, Under::Tight, case)
}
