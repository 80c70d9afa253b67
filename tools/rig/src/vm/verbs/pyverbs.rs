//! pyverbs' own test suite (rdma-core's `tests`), without the library, with it, and under a daemon
//! that lets one work request go at a time: the same tests pass.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

use super::daemon::{Daemon, TIGHT_SOCKET};
use super::pair::{ATTACH_MS, STALL_MS, tail};
use super::{Matrix, Programs};
use crate::vm::guest::Guest;
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

/// What the suite came to.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SuiteReport {
    /// Whether the same tests passed.
    pub passed: bool,
    /// Tests that pass without the library.
    pub cases: usize,
    /// What was seen, in words.
    pub seen: String,
    /// Seconds it took.
    pub seconds: f64,
    /// Tests that pass without the library and not with it, and why.
    pub failures: Vec<String>,
}

/// How the tests ended, by name.
#[derive(Debug, Default, Deserialize)]
struct Ended {
    ended: BTreeMap<String, String>,
    why: BTreeMap<String, String>,
}

impl Ended {
    fn passed(&self) -> impl Iterator<Item = &String> {
        let passed = self.ended.iter().filter(|(_, how)| *how == "passed");
        passed.map(|(name, _)| name)
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
    /// With it, under a daemon that lets one work request go at a time.
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
fn suite(
    guest: &Guest,
    programs: &Programs,
    folder: &Path,
    under: Under,
    only: &[&str],
) -> anyhow::Result<Ended> {
    let text = |path: &Path| path.display().to_string();
    let gid = guest.facts.gid_index.to_string();
    let tests = text(&folder.join("tests"));
    let mut argv = vec!["/usr/bin/python3", SCRIPT, &tests, DEVICES[0], &gid];
    argv.extend(only);
    let mut task = guest.task(argv, LIMIT);
    let mut set = |name: &str, value: &str| task.env.push((name.into(), value.into()));
    set("PYTHONPATH", &text(&folder.join("modules")));
    if under != Under::Nothing {
        set("LD_PRELOAD", &text(&programs.library));
        set("LAXITY_STALL_MS", STALL_MS);
        set("LAXITY_ATTACH_MS", ATTACH_MS);
    }
    if under == Under::Tight {
        set("LAXITY_SOCKET", TIGHT_SOCKET);
    }
    let ended = task.start()?.wait();
    let line = ended.stdout.lines().rfind(|line| line.starts_with("{\""));
    let Some(line) = line else {
        bail!(
            "pyverbs' suite {} ended with {:?} and said: {}{}",
            under.name(),
            ended.code,
            tail(&ended.stdout),
            tail(&ended.stderr)
        );
    };
    serde_json::from_str(line).with_context(|| format!("pyverbs' suite said: {line}"))
}

/// Compares two ways to run it; a line for each test that differs every time.
fn compare(
    guest: &Guest,
    programs: &Programs,
    folder: &Path,
    before: &Ended,
    under: Under,
    report: &mut SuiteReport,
) -> anyhow::Result<()> {
    let mut with = suite(guest, programs, folder, under, &[])?;
    let passed = before.passed().filter(|name| with.has_passed(name)).count();
    let mut differ: Vec<&str> = before
        .passed()
        .filter(|name| !with.has_passed(name))
        .map(String::as_str)
        .collect();
    for _ in 0..AGAIN {
        if differ.is_empty() {
            break;
        }
        let without = suite(guest, programs, folder, Under::Nothing, &differ)?;
        with = suite(guest, programs, folder, under, &differ)?;
        differ.retain(|name| without.has_passed(name) && !with.has_passed(name));
    }
    report.seen += &format!(", {passed} {}", under.name());
    for name in differ {
        let why = with.why.get(name).map_or("it was skipped", String::as_str);
        report
            .failures
            .push(format!("{name}, {}: {}", under.name(), why.trim()));
    }
    Ok(())
}

fn compare_all(
    guest: &Guest,
    programs: &Programs,
    folder: &Path,
    report: &mut SuiteReport,
) -> anyhow::Result<()> {
    fs::write(SCRIPT, SCRIPT_PY).context("writing pyverbs_suite.py")?;
    let before = suite(guest, programs, folder, Under::Nothing, &[])?;
    report.cases = before.passed().count();
    report.seen = format!("{} pass without the library", report.cases);
    if report.cases < PASSED_MIN {
        let why = before.why.iter().next();
        bail!("{} of {}: {why:?}", report.seen, before.ended.len());
    }
    compare(guest, programs, folder, &before, Under::Daemon, report)?;
    let _tight = Daemon::start_tight(guest, programs)?;
    compare(guest, programs, folder, &before, Under::Tight, report)
}

/// Runs the suite, if it is wanted.
pub(super) fn run(
    guest: &Guest,
    programs: &Programs,
    matrix: &Matrix,
) -> anyhow::Result<Option<SuiteReport>> {
    let Some(folder) = programs.pyverbs.as_ref().filter(|_| matrix.wants(NAME)) else {
        return Ok(None);
    };
    let began = Instant::now();
    let mut report = SuiteReport::default();
    if let Err(error) = compare_all(guest, programs, folder, &mut report) {
        report.failures.push(format!("{error:#}"));
    }
    report.seconds = began.elapsed().as_secs_f64();
    report.passed = report.failures.is_empty();
    guest.say(&super::progress(NAME, report.passed, report.seconds))?;
    Ok(Some(report))
}
