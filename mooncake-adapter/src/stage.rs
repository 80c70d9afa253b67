//! The number of a `laxity.Stage`, which Python defines.

use laxity_client::Stage;
use pyo3::prelude::*;

use crate::exceptions::HintError;

/// A stage that a caller passed.
#[derive(Clone, Copy)]
pub(crate) struct Given(pub(crate) Stage);

impl<'py> FromPyObject<'_, 'py> for Given {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let number: i64 = object.extract()?;
        let stage = u8::try_from(number).ok().and_then(Stage::from_number);
        stage.map(Self).ok_or_else(|| {
            HintError::new_err(format!("{number} is no stage; use a member of laxity.Stage"))
        })
    }
}
