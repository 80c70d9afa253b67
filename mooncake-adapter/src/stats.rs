//! Statistics of this process for users and tests.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;

use laxity_client::hints;
use pyo3::exceptions::PyRuntimeWarning;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::scope;

#[pyfunction]
pub(crate) fn attached(py: Python<'_>) -> PyResult<bool> {
    static WARNED: AtomicBool = AtomicBool::new(false);
    let client = hints::client();
    if client.is_attached() {
        return Ok(true);
    }
    if let Some(refusal) = client.refusal()
        && !WARNED.swap(true, Ordering::Relaxed)
    {
        let text = format!(
            "laxityd refuses this process, whose transfers go out unscheduled: {refusal}. Install \
             a \
             package and a daemon of the same release\0"
        );
        let text = core::ffi::CStr::from_bytes_with_nul(text.as_bytes()).unwrap_or_default();
        PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), text, 1)?;
    }
    Ok(false)
}

#[pyfunction]
pub(crate) fn stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let client = hints::client();
    let flows = client.stats();
    let said = hints::stats();
    let counts = said.counts;
    let dict = PyDict::new(py);
    dict.set_item("attached", client.is_attached())?;
    dict.set_item("scheduled", client.is_scheduled())?;
    dict.set_item("refused", client.refusal().unwrap_or_default())?;
    dict.set_item("preloaded", hints::is_preloaded())?;
    let unscheduled = Duration::from_nanos(flows.unscheduled_ns);
    dict.set_item("unscheduled_s", unscheduled.as_secs_f64())?;
    for (name, value) in [
        ("reattaches", flows.reattaches),
        ("scheduled_bytes", flows.scheduled_bytes),
        ("bypassed_bytes", flows.bypassed_bytes),
        ("bypassed_flows", flows.bypassed_flows),
        ("observed_bytes", flows.observed_bytes),
        ("lane_full", flows.lane_full),
        ("requests", said.requests as u64),
        ("batches", said.batches as u64),
        ("hints", said.hints),
        ("requests_evicted", counts.requests_evicted),
        ("batches_evicted", counts.batches_evicted),
        ("requests_begun_twice", counts.requests_begun_twice),
        ("requests_ended_twice", counts.requests_ended_twice),
        ("requests_unknown", counts.requests_unknown),
        ("batches_begun_twice", counts.batches_begun_twice),
        ("batches_unknown", counts.batches_unknown),
        ("layers_unknown", counts.layers_unknown),
        ("layers_backwards", counts.layers_backwards),
        ("deadlines_passed", counts.deadlines_passed),
        ("scopes_crossed", scope::CROSSED.load(Ordering::Relaxed)),
        ("tickets_dropped", said.tickets_dropped),
    ] {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

#[pyfunction]
pub(crate) fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// Does nothing with the arguments of a hint. The benchmark measures the cost of a call with it.
#[pyfunction]
#[pyo3(name = "_empty", signature = (batch_id, layer))]
pub(crate) fn empty_call(batch_id: crate::id::Id, layer: i64) {
    core::hint::black_box((batch_id.0, layer));
}
