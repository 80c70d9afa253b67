//! The matrix: programs that know nothing of Laxity, on real verbs, under `enforce`, each with
//! every byte and every work request accounted for; then what happens when something is killed.
//!
//! ```text
//! prepare.rs    on the host: builds the check programs, gets the Transfer Engine
//! catalogue.rs  which programs, and what they post
//! pair.rs       runs one and judges it, by the library's report and by what crossed the wire (wire.rs)
//! faults.rs     SIGKILL of the daemon and of applications; valgrind and the address sanitizer
//! contention.rs a collective against bulk transfers on a shaped port
//! overhead.rs   with the library against without
//! plugin.rs     the NCCL plugin, driven as NCCL does, on the same devices
//! pyverbs.rs    pyverbs' own test suite, with the library and without
//! report.rs     all of it as JSON and as a table
//! ```

/// A file in the guest's `/tmp`: its own memory, gone with it.
macro_rules! scratch {
    ($name:literal) => {
        concat!("/tmp/", $name)
    };
}

mod catalogue;
pub mod contention;
mod daemon;
pub mod faults;
pub mod overhead;
mod pair;
pub mod plugin;
pub mod prepare;
mod program;
pub mod pyverbs;
pub mod report;
mod wire;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

use super::guest::Guest;
use super::network::NetworkConfig;
use contention::ContentionConfig;
use daemon::Daemon;
pub use report::{ProgramReport, VerbsReport, table};

/// Where the host has the programs that are used throughout.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Programs {
    /// `laxity`, whose `run` starts some of them.
    pub laxity: PathBuf,
    /// The daemon.
    pub laxityd: PathBuf,
    /// `liblaxity.so`.
    pub library: PathBuf,
    /// Folder with the programs of `tests/verbs`.
    pub checks: PathBuf,
    /// A Python that has the Mooncake Transfer Engine.
    pub python: Option<PathBuf>,
    /// Folder with pyverbs and its test suite.
    #[serde(default)]
    pub pyverbs: Option<PathBuf>,
    /// The NCCL plugin, and what drives it.
    pub nccl: Option<plugin::Nccl>,
}

/// What to run, all in one boot and in this order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VerbsConfig {
    /// The programs.
    pub programs: Programs,
    /// The matrix, and what is killed.
    pub matrix: Option<Matrix>,
    /// A collective against bulk transfers.
    pub contention: Option<ContentionConfig>,
    /// The same with the collective through the NCCL plugin.
    pub plugin_contention: Option<ContentionConfig>,
    /// Pairs of runs of perftest with and without the library.
    pub overhead_pairs: Option<usize>,
}

/// Which programs and faults.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Matrix {
    /// The programs of `tests/verbs`, built with the address sanitizer, whose library has to be
    /// loaded first.
    pub checks_asan: PathBuf,
    /// `libasan.so`.
    pub libasan: PathBuf,
    /// Names of programs and faults to run; empty for all.
    pub only: Vec<String>,
    /// Go on after a failure.
    pub keep_going: bool,
    /// How many applications are killed.
    pub cycles: u32,
}

impl Matrix {
    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == name)
    }
}

/// Names of all programs, cases of the NCCL plugin, and faults of the matrix.
#[must_use]
pub fn names(gid_index: u32) -> Vec<String> {
    let all = Programs {
        python: Some(PathBuf::new()),
        ..Programs::default()
    };
    let programs = catalogue::all(gid_index, &all);
    let programs = programs.into_iter().map(|program| program.name);
    programs
        .chain(plugin::NAMES.map(String::from))
        .chain([String::from(pyverbs::NAME)])
        .chain(faults::NAMES.map(String::from))
        .collect()
}

/// *guest*: runs what was ordered.
///
/// # Errors
/// The guest lacks something, or the host is gone. What programs did wrong is in the report.
pub fn run(guest: &mut Guest, config: &VerbsConfig) -> anyhow::Result<VerbsReport> {
    fs::write(catalogue::MOONCAKE, catalogue::MOONCAKE_PY).context("writing transfer_engine.py")?;
    let programs = &config.programs;
    let mut report = VerbsReport::default();
    if let Some(matrix) = &config.matrix {
        run_matrix(guest, programs, matrix, &mut report)?;
        if !report.passed() && !matrix.keep_going {
            return Ok(report);
        }
    }
    if let Some(config) = &config.contention {
        guest.reshape(config.network())?;
        report.contention = Some(contention::run(guest, programs, config)?);
    }
    if let Some(config) = &config.plugin_contention {
        guest.reshape(config.network())?;
        report.plugin_contention = Some(contention::run(guest, programs, config)?);
    }
    if let Some(pairs) = config.overhead_pairs {
        guest.reshape(NetworkConfig::default())?;
        let _daemon = Daemon::start_default(guest, programs)?;
        report.overhead = Some(overhead::run(guest, programs, pairs)?);
    }
    Ok(report)
}

fn run_matrix(
    guest: &Guest,
    programs: &Programs,
    matrix: &Matrix,
    report: &mut VerbsReport,
) -> anyhow::Result<()> {
    let known = names(guest.facts.gid_index);
    if let Some(unknown) = matrix.only.iter().find(|name| !known.contains(name)) {
        bail!("no program or fault `{unknown}`; `laxity lab verbs --list` lists them");
    }
    let daemon = Daemon::start(guest, programs)?;
    let go_on = run_programs(guest, programs, matrix, report)?
        && plugin::run_all(guest, programs, matrix, &mut report.plugin)?;
    if go_on {
        report.pyverbs = pyverbs::run(guest, programs, matrix)?;
    }
    if report.failed() {
        guest.say(&format!("laxityd's log: {}", daemon.log()))?;
        if !matrix.keep_going {
            return Ok(());
        }
    }
    let mut daemon = Some(daemon);
    for name in faults::NAMES {
        let can_run = name != faults::WITH_MOONCAKE || programs.python.is_some();
        if !matrix.wants(name) || !can_run {
            continue;
        }
        if daemon.is_none() {
            daemon = Some(Daemon::start(guest, programs)?);
        }
        let fault = faults::run(name, guest, programs, matrix, &mut daemon)?;
        let passed = fault.passed;
        guest.say(&progress(name, passed, fault.seconds))?;
        report.faults.push(fault);
        if !passed && !matrix.keep_going {
            break;
        }
    }
    Ok(())
}

fn progress(name: &str, passed: bool, seconds: f64) -> String {
    let how = if passed { "ok" } else { "FAILED" };
    format!("{name}: {how}, {seconds:.1} s")
}

/// Runs the programs; whether to go on.
fn run_programs(
    guest: &Guest,
    programs: &Programs,
    matrix: &Matrix,
    report: &mut VerbsReport,
) -> anyhow::Result<bool> {
    let wanted: Vec<_> = (catalogue::all(guest.facts.gid_index, programs).into_iter())
        .filter(|program| matrix.wants(&program.name))
        .collect();
    if wanted.is_empty() {
        return Ok(true);
    }
    let is_tight = |program: &&program::Program| {
        let env = &program.client.env;
        env.iter().any(|(_, value)| value == daemon::TIGHT_SOCKET)
    };
    let _tight = match wanted.iter().find(is_tight) {
        Some(_) => Some(Daemon::start_tight(guest, programs)?),
        None => None,
    };
    let mut capture = wire::Capture::start(guest)?;
    let mut go_on = true;
    for program in wanted {
        let result = pair::run(guest, programs, &program, &mut capture)?;
        guest.say(&progress(&result.name, result.passed, result.seconds))?;
        go_on = result.passed || matrix.keep_going;
        report.programs.push(result);
        if !go_on {
            break;
        }
    }
    let missed = capture.finish();
    if missed > 0 {
        guest.say(&format!(
            "the capture missed {missed} packets; counts of messages are too low"
        ))?;
    }
    Ok(go_on)
}
