//! The operator's profile and objective for this kind of job (docs/running-jobs.md). They are read
//! once, when the package is imported.
//!
//! The preload library reads the same settings for the transfers that it sees. Here they apply to
//! transfers that wait for permits before a library gets them. No setting stops a job: an unusable
//! one causes a warning and is replaced by a cautious value.

use std::ffi::CString;

use laxity_client::Stage;
use laxity_job::Job;
use pyo3::exceptions::{PyRuntimeWarning, PyValueError};
use pyo3::prelude::*;

pub(crate) fn job() -> &'static Job {
    Job::of_this_process()
}

/// Returns the objective for transfers of requests without a deadline, or 0 for none.
pub(crate) fn objective_ns() -> u64 {
    job().objective_ns()
}

/// Reports problems of the settings when the package is imported, before any client attaches.
pub(crate) fn begin(py: Python<'_>) -> PyResult<()> {
    let kind = py.get_type::<PyRuntimeWarning>();
    for problem in job().take_problems() {
        let text = CString::new(format!("laxity: {problem}"))?;
        PyErr::warn(py, &kind, &text, 1)?;
    }
    Ok(())
}

/// Returns the number of the stage that transfers with this opcode (`"write"` or `"read"`) have in
/// this kind of job by default. Internal to the package.
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
