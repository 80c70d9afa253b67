//! The Python exception of each error. Those of hints are `ValueError`s, which suggest what to do.

use laxity_client::hints;
use laxity_client::memory::MemoryError;
use pyo3::PyErr;
use pyo3::create_exception;
use pyo3::exceptions::{PyMemoryError, PyValueError};

create_exception!(
    laxity,
    HintError,
    PyValueError,
    "An invalid hint; the daemon was not told. No transfer is affected."
);
create_exception!(
    laxity,
    UnknownLayer,
    HintError,
    "A layer that the batch does not have, or none that a model can have."
);
create_exception!(
    laxity,
    RegionOverlap,
    HintError,
    "Memory that is registered as another layer's."
);
create_exception!(laxity, RequestEnded, HintError, "The request has ended before.");
create_exception!(laxity, DeadlinePassed, HintError, "A deadline that is not in the future.");

pub(crate) fn of_hint(error: hints::HintError) -> PyErr {
    let text = error.to_string();
    match error {
        hints::HintError::NoId => HintError::new_err(text),
        hints::HintError::DeadlinePassed { .. } => DeadlinePassed::new_err(text),
        hints::HintError::RequestEnded { .. } => RequestEnded::new_err(text),
        hints::HintError::UnknownLayer { .. } | hints::HintError::NoLayers { .. } => {
            UnknownLayer::new_err(text)
        }
    }
}

pub(crate) fn of_memory(error: MemoryError) -> PyErr {
    let text = error.to_string();
    match error {
        MemoryError::NoRange { .. } => HintError::new_err(text),
        MemoryError::Overlap { .. } => RegionOverlap::new_err(text),
        MemoryError::Full => PyMemoryError::new_err(text),
    }
}
