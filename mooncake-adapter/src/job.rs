//! What the operator says of this kind of job (docs/running-jobs.md): its profile, and its objective. Read once, when the
//! package is imported.
//!
//! The preload library reads the same, for what it sees; here it holds for transfers that ask for leave before a library
//! gets them. Nothing in it stops a job: what can't be used is said in a warning, and replaced by what is cautious.

use std::ffi::CString;
use std::sync::OnceLock;

use laxity_client::{Stage, hints};
use laxity_profile::Profile;
use pyo3::exceptions::{PyRuntimeWarning, PyValueError};
use pyo3::prelude::*;

#[derive(Debug, Default)]
pub(crate) struct Job {
    profile: Profile,
    /// For transfers of requests that have no deadline, 0 for none.
    pub(crate) objective_ns: u64,
}

static JOB: OnceLock<Job> = OnceLock::new();

pub(crate) fn job() -> &'static Job {
    JOB.get_or_init(|| Job::read().0)
}

impl Job {
    /// What there is, and what is wrong with it.
    fn read() -> (Self, Vec<String>) {
        let mut problems = Vec::new();
        let profile = Profile::from_env().unwrap_or_else(|error| {
            problems.push(format!("{error}; going on with the profile `default`"));
            Profile::default()
        });
        let objective = profile.objective().unwrap_or_else(|error| {
            problems.push(format!("{error}; going on without an objective"));
            None
        });
        let ns = |objective: std::time::Duration| u64::try_from(objective.as_nanos());
        let job = Self {
            profile,
            objective_ns: objective.map_or(0, |objective| ns(objective).unwrap_or(u64::MAX)),
        };
        (job, problems)
    }
}

/// When the package is imported: before anything attaches to a daemon.
pub(crate) fn begin(py: Python<'_>) -> PyResult<()> {
    let (job, problems) = Job::read();
    if let Some(mode) = job.profile.mode {
        hints::limit_mode(mode);
    }
    // An import that is tried again finds the first one's.
    if JOB.set(job).is_ok() {
        let kind = py.get_type::<PyRuntimeWarning>();
        for problem in problems {
            let text = CString::new(format!("laxity: {problem}"))?;
            PyErr::warn(py, &kind, &text, 1)?;
        }
    }
    Ok(())
}

/// The number of the stage that a transfer has in this kind of job, by its opcode (`"write"` or `"read"`), if nobody says
/// one. Of the package's own.
#[pyfunction]
#[pyo3(name = "_stage_of")]
pub(crate) fn stage_of(opcode: &str) -> PyResult<u8> {
    let stages = &job().profile.stage;
    let stage: Stage = match opcode {
        "write" => stages.write,
        "read" => stages.read,
        other => {
            return Err(PyValueError::new_err(format!(
                "{other:?} is no opcode; it is \"write\" or \"read\""
            )));
        }
    };
    Ok(stage as u8)
}
