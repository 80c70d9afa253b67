//! What the operator says of this kind of job (docs/running-jobs.md): its profile, and its
//! objective. Read once, when the package is imported.
//!
//! The preload library reads the same, for what it sees; here it holds for transfers that ask for
//! leave before a library gets them. Nothing in it stops a job: what can't be used is said in a
//! warning, and replaced by what is cautious.

use std::ffi::CString;

use laxity_client::Stage;
use laxity_job::Job;
use pyo3::exceptions::{PyRuntimeWarning, PyValueError};
use pyo3::prelude::*;

pub(crate) fn job() -> &'static Job {
    Job::of_this_process()
}

/// The objective for transfers of requests that have no deadline, 0 for none.
pub(crate) fn objective_ns() -> u64 {
    job().objective_ns()
}

/// When the package is imported: before anything attaches to a daemon.
pub(crate) fn begin(py: Python<'_>) -> PyResult<()> {
    let kind = py.get_type::<PyRuntimeWarning>();
    for problem in job().take_problems() {
        let text = CString::new(format!("laxity: {problem}"))?;
        PyErr::warn(py, &kind, &text, 1)?;
    }
    Ok(())
}

/// The number of the stage that a transfer has in this kind of job, by its opcode (`"write"` or
/// `"read"`), if nobody says one. Of the package's own.
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
