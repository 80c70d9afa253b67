//! `laxity._laxity`: the compiled part of the Python package `laxity`.
//!
//! It converts Python's arguments into those of [`laxity_client::hints`], and errors into
//! exceptions. It makes no decisions. `python/laxity/_laxity.pyi` documents each function.
//!
//! * *The GIL* is released only where something can wait, in [`ticket`]. A hint takes a lock for
//!   less time than releasing and taking the GIL.
//! * *abi3 for Python 3.9*: one wheel works for all later versions.

#![forbid(unsafe_code)]

mod exceptions;
mod hints;
mod id;
mod job;
mod scope;
mod stage;
mod stats;
mod ticket;

#[pyo3::pymodule]
mod _laxity {
    #[pymodule_export]
    use crate::exceptions::{DeadlinePassed, HintError, RegionOverlap, RequestEnded, UnknownLayer};
    #[pymodule_export]
    use crate::hints::{
        batch_begin, batch_end, batch_join, batch_queued, compute_end, layer_begin, memory_forget,
        memory_layer, memory_own, memory_owner, memory_runs, number, request_begin,
        request_deadline_s, request_end,
    };
    #[pymodule_export]
    use crate::job::stage_of;
    #[pymodule_export]
    use crate::scope::PyScope;
    #[pymodule_export]
    use crate::stats::{attached, empty_call, stats, version};
    #[pymodule_export]
    use crate::ticket::{PyPermit, PyTicket, PyTransfers, submit};

    #[pymodule_init]
    fn init(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
        crate::job::begin(module.py())
    }
}
