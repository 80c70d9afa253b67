//! Ids of requests and batches: the application's own numbers, or texts that are mapped to numbers.

use laxity_client::hints;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyString};

use crate::exceptions::HintError;

/// The number of a request or batch, never 0.
#[derive(Clone, Copy)]
pub(crate) struct Id(pub(crate) u64);

impl<'py> FromPyObject<'_, 'py> for Id {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(text) = object.cast::<PyString>() {
            return Ok(Self(hints::number(&text.to_cow()?)));
        }
        if object.is_instance_of::<PyInt>() {
            return match object.extract::<u64>() {
                Ok(0) | Err(_) => Err(HintError::new_err(format!(
                    "{} is no id of a request or batch: a number has to be 1 … 2**64-1",
                    object.str()?
                ))),
                Ok(number) => Ok(Self(number)),
            };
        }
        Err(PyTypeError::new_err(format!(
            "an id of a request or batch is a str or an int, not {}",
            object.get_type().name()?
        )))
    }
}

/// Returns the number of an id, or 0 for none.
pub(crate) fn or_unknown(id: Option<Id>) -> u64 {
    id.map_or(0, |id| id.0)
}
