//! The matrix: unmodified programs run on real verbs under `enforce`, and every byte and work
//! request is accounted for. Then daemons and programs are killed.
//!
//! ```text
//! prepare.rs    on the host: builds the check programs, gets the Transfer Engine
//! catalogue.rs  which programs, and what they post, from catalogue.toml
//! program.rs    one program of the catalogue: its command, and what it must report
//! daemon.rs     the guest's laxityd: its configuration, start and status
//! pair.rs       runs one and judges it, by the library's report and by the wire (wire.rs)
//! faults.rs     SIGKILL of the daemon and of applications; valgrind and the address sanitizer
//! campaign.rs   a fault campaign: many faults at a time, from a seed
//! plugin.rs     the NCCL plugin, driven as NCCL does, on the same devices (nccl_cases.toml)
//! paths.rs      the map of RDMA paths, against programs that run
//! pyverbs.rs    pyverbs' own test suite, with the library and without
//! case.rs       the result of one case
//! report.rs     all of it as JSON and as a table
//! ```

/// Returns the path of a file in the guest's `/tmp`, which is in the guest's memory.
macro_rules! scratch {
    ($name:literal) => {
        concat!("/tmp/", $name)
    };
}

mod campaign;
mod case;
mod catalogue;
mod daemon;
mod faults;
mod pair;
mod paths;
pub mod plugin;
pub mod prepare;
mod program;
mod pyverbs;
mod report;
mod wire;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::guest::Guest;
use crate::error::LabError;
use crate::faults::Plant;
pub use case::{CaseReport, LibraryReport};
use daemon::GuestDaemon;
pub use report::{ProgramReport, VerbsReport, table};

/// Paths on the host of the programs that many cases use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Programs {
    pub laxity: PathBuf,
    pub laxityd: PathBuf,
    pub library: PathBuf,
    pub checks: PathBuf,
    pub python: Option<PathBuf>,
    pub pyverbs: Option<PathBuf>,
    pub nccl: Option<plugin::Nccl>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VerbsConfig {
    pub programs: Programs,
    pub matrix: Matrix,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Matrix {
    /// Folder with the programs of `tests/verbs`, built with the address sanitizer. They need the
    /// sanitizer's library to be loaded first.
    pub checks_asan: PathBuf,
    pub libasan: PathBuf,
    pub only: Vec<String>,
    pub keep_going: bool,
    pub cycles: u32,
    pub faults: u64,
    pub seed: u64,
    pub plant: Option<Plant>,
}

impl Matrix {
    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == name)
    }
}

pub(super) struct Lab<'a> {
    guest: &'a Guest,
    programs: &'a Programs,
    matrix: &'a Matrix,
}

/// Returns the names of all programs, cases of the NCCL plugin, and faults of the matrix.
pub fn names(gid_index: u32) -> Vec<String> {
    let all = Programs { python: Some(PathBuf::new()), ..Programs::default() };
    let programs = catalogue::all(gid_index, &all).into_iter().map(|program| program.name);
    let others = [pyverbs::NAME].into_iter().chain(faults::NAMES).map(String::from);
    programs.chain(plugin::names()).chain(others).collect()
}

pub fn run(guest: &mut Guest, config: &VerbsConfig) -> Result<VerbsReport, LabError> {
    fs::write(catalogue::MOONCAKE, catalogue::MOONCAKE_PY)
        .map_err(LabError::system("writing transfer_engine.py"))?;
    // The library refuses a secret that other users can read.
    fs::write(catalogue::SECRET, "the secret of this matrix, 32 bytes")
        .and_then(|()| fs::set_permissions(catalogue::SECRET, Permissions::from_mode(0o600)))
        .map_err(LabError::system("writing the job's secret"))?;
    let mut report = VerbsReport::default();
    let lab = Lab { guest, programs: &config.programs, matrix: &config.matrix };
    run_matrix(&lab, &mut report)?;
    Ok(report)
}

fn run_matrix(lab: &Lab<'_>, report: &mut VerbsReport) -> Result<(), LabError> {
    let known = names(lab.guest.facts.gid_index);
    if let Some(unknown) = lab.matrix.only.iter().find(|name| !known.contains(name)) {
        return Err(LabError::Plan(format!(
            "no program or fault `{unknown}`; `laxity lab verbs --list` lists them"
        )));
    }
    let mut daemon = Some(GuestDaemon::start(lab)?);
    let nccl = lab.programs.nccl.as_ref();
    let plugin = nccl.map_or_else(Vec::new, |_| plugin::names());
    let suite: Vec<String> =
        lab.programs.pyverbs.iter().map(|_| pyverbs::NAME.to_owned()).collect();
    let mut suites = Vec::new();
    let _ = run_programs(lab, report)?
        && run_cases(lab, &plugin, &mut report.plugin, plugin::run)?
        && run_cases(lab, &suite, &mut suites, |_, lab, case| pyverbs::run(lab, case))?;
    report.pyverbs = suites.pop();
    if report.failed() {
        let log = daemon.as_ref().map(GuestDaemon::log).unwrap_or_default();
        lab.guest.say(&format!("laxityd's log: {log}"))?;
        if !lab.matrix.keep_going {
            return Ok(());
        }
    }
    let can_run = |name: &&str| *name != faults::WITH_MOONCAKE || lab.programs.python.is_some();
    let faults: Vec<&str> = faults::NAMES.into_iter().filter(can_run).collect();
    run_cases(lab, &faults, &mut report.faults, |name, lab, case| {
        faults::run(name, lab, &mut daemon, case)
    })?;
    Ok(())
}

fn run_cases(
    lab: &Lab<'_>,
    names: &[impl AsRef<str>],
    reports: &mut Vec<CaseReport>,
    mut run: impl FnMut(&str, &Lab<'_>, &mut CaseReport) -> Result<(), LabError>,
) -> Result<bool, LabError> {
    for name in names.iter().map(AsRef::as_ref).filter(|name| lab.matrix.wants(name)) {
        let report = CaseReport::of(name, lab.guest, |case| run(name, lab, case))?;
        let passed = report.passed;
        reports.push(report);
        if !passed && !lab.matrix.keep_going {
            return Ok(false);
        }
    }
    Ok(true)
}

fn run_programs(lab: &Lab<'_>, report: &mut VerbsReport) -> Result<bool, LabError> {
    let all = catalogue::all(lab.guest.facts.gid_index, lab.programs);
    let wanted = |program: &program::Program| lab.matrix.wants(&program.name);
    let wanted: Vec<_> = all.into_iter().filter(wanted).collect();
    if wanted.is_empty() {
        return Ok(true);
    }
    let mut env = wanted.iter().flat_map(|program| &program.client.env);
    let is_tight = env.any(|(_, value)| value == daemon::TIGHT_SOCKET);
    let _tight = is_tight.then(|| GuestDaemon::start_tight(lab)).transpose()?;
    let mut capture = wire::Capture::start(lab.guest)?;
    let mut go_on = true;
    for program in wanted {
        let result = pair::run(lab, &program, &mut capture)?;
        go_on = result.case.passed || lab.matrix.keep_going;
        report.programs.push(result);
        if !go_on {
            break;
        }
    }
    let missed = capture.finish();
    if missed > 0 {
        lab.guest
            .say(&format!("the capture missed {missed} packets; counts of messages are too low"))?;
    }
    Ok(go_on)
}
