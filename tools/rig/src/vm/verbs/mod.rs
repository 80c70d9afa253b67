//! The matrix: programs that know nothing of Laxity, on real verbs, under `enforce`, each with every byte
//! and every work request accounted for; then what happens when something is killed.
//!
//! ```text
//! prepare.rs    on the host: builds the check programs, gets the Transfer Engine
//! catalogue.rs  which programs, and what they post
//! pair.rs       runs one and judges it, by the library's report and by what crossed the wire (wire.rs)
//! faults.rs     SIGKILL of the daemon and of applications; valgrind and the address sanitizer
//! overhead.rs   with the library against without
//! report.rs     all of it as JSON and as a table
//! ```

mod catalogue;
pub mod contention;
mod daemon;
pub mod faults;
pub mod overhead;
mod pair;
pub mod prepare;
mod program;
pub mod report;
mod wire;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

use super::guest::Guest;
use daemon::Daemon;
pub use report::{ProgramReport, VerbsReport, table};

/// What to run, and where the host has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerbsConfig {
    /// This program.
    pub laxity: PathBuf,
    /// The daemon.
    pub laxityd: PathBuf,
    /// `liblaxity.so`.
    pub library: PathBuf,
    /// Folder with the programs of `tests/verbs`.
    pub checks: PathBuf,
    /// The same, built with the address sanitizer, whose library has to be loaded first.
    pub checks_asan: PathBuf,
    /// `libasan.so`.
    pub libasan: PathBuf,
    /// A Python that has the Mooncake Transfer Engine.
    pub python: Option<PathBuf>,
    /// Names of programs and faults to run; empty for all.
    pub only: Vec<String>,
    /// Go on after a failure.
    pub keep_going: bool,
    /// How many applications are killed.
    pub cycles: u32,
    /// Pairs of runs with and without the library; `None`: the matrix instead.
    pub overhead_pairs: Option<usize>,
}

impl VerbsConfig {
    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == name)
    }
}

/// Names of all programs and faults.
#[must_use]
pub fn names(gid_index: u32) -> Vec<String> {
    let config = VerbsConfig {
        python: Some(PathBuf::new()),
        ..VerbsConfig::default()
    };
    let programs = catalogue::all(gid_index, &config);
    let programs = programs.into_iter().map(|program| program.name);
    programs.chain(faults::NAMES.map(String::from)).collect()
}

/// *guest*: runs what was ordered.
///
/// # Errors
/// The guest lacks something, or the host is gone. What programs did wrong is in the report.
pub fn run(guest: &Guest, config: &VerbsConfig) -> anyhow::Result<VerbsReport> {
    fs::write(catalogue::MOONCAKE, catalogue::MOONCAKE_PY).context("writing transfer_engine.py")?;
    let mut report = VerbsReport::default();
    if let Some(pairs) = config.overhead_pairs {
        let _daemon = Daemon::start_default(guest, config)?;
        report.overhead = Some(overhead::run(guest, config, pairs)?);
        return Ok(report);
    }
    let known = names(guest.facts.gid_index);
    if let Some(unknown) = config.only.iter().find(|name| !known.contains(name)) {
        bail!("no program or fault `{unknown}`; `laxity lab verbs --list` lists them");
    }
    let daemon = Daemon::start(guest, config)?;
    let go_on = matrix(guest, config, &mut report)?;
    if go_on {
        let mut daemon = Some(daemon);
        for name in faults::NAMES.into_iter().filter(|name| config.wants(name)) {
            if daemon.is_none() {
                daemon = Some(Daemon::start(guest, config)?);
            }
            let fault = faults::run(name, guest, config, &mut daemon)?;
            let passed = fault.passed;
            guest.say(&progress(name, passed, fault.seconds))?;
            report.faults.push(fault);
            if !passed && !config.keep_going {
                break;
            }
        }
    } else {
        guest.say(&format!("laxityd's log: {}", daemon.log()))?;
    }
    Ok(report)
}

fn progress(name: &str, passed: bool, seconds: f64) -> String {
    let how = if passed { "ok" } else { "FAILED" };
    format!("{name}: {how}, {seconds:.1} s")
}

/// Runs the programs; whether to go on.
fn matrix(guest: &Guest, config: &VerbsConfig, report: &mut VerbsReport) -> anyhow::Result<bool> {
    let programs = catalogue::all(guest.facts.gid_index, config);
    let wanted: Vec<_> = (programs.into_iter())
        .filter(|program| config.wants(&program.name))
        .collect();
    if wanted.is_empty() {
        return Ok(true);
    }
    let is_tight = |program: &&program::Program| {
        let env = &program.client.env;
        env.iter().any(|(_, value)| value == daemon::TIGHT_SOCKET)
    };
    let _tight = match wanted.iter().find(is_tight) {
        Some(_) => Some(Daemon::start_tight(guest, config)?),
        None => None,
    };
    let mut capture = wire::Capture::start(guest)?;
    let mut go_on = true;
    for program in wanted {
        let result = pair::run(guest, config, &program, &mut capture)?;
        guest.say(&progress(&result.name, result.passed, result.seconds))?;
        go_on = result.passed || config.keep_going;
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
