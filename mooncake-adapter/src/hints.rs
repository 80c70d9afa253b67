//! Hints about requests, batches, layers and memory, as functions of Python.

use core::time::Duration;

use laxity_client::hints::{self, Facts};
use laxity_client::scope::{self, Scope};
use laxity_client::{Hint, memory};
use pyo3::prelude::*;

use crate::exceptions::{DeadlinePassed, HintError, UnknownLayer, of_hint, of_memory};
use crate::id::{Id, or_unknown};
use crate::stage::Given;

/// Converts a caller's seconds into nanoseconds.
pub(crate) fn nanoseconds(name: &str, seconds: f64) -> PyResult<u64> {
    match Duration::try_from_secs_f64(seconds) {
        Ok(time) => Ok(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
        Err(_) if seconds < 0.0 => Err(DeadlinePassed::new_err(format!(
            "{name} was {} s ago; give one in the future, or None",
            -seconds
        ))),
        // The time is longer than can be represented.
        Err(_) if seconds > 0.0 => Ok(u64::MAX),
        Err(_) => {
            Err(HintError::new_err(format!("{name} is {seconds}, which is no time in seconds")))
        }
    }
}

/// Returns the instant that is this many seconds from now, or 0 for none.
pub(crate) fn moment(name: &str, seconds: Option<f64>) -> PyResult<u64> {
    let Some(seconds) = seconds else { return Ok(0) };
    Ok(hints::now().saturating_add(nanoseconds(name, seconds)?))
}

/// Converts a layer's number. The largest `u16` means "unknown" and is refused.
pub(crate) fn layer(number: i64) -> PyResult<u16> {
    match u16::try_from(number) {
        Ok(layer) if layer < u16::MAX => Ok(layer),
        _ => Err(UnknownLayer::new_err(format!(
            "{number} is no layer: they are counted from 0 to {}",
            u16::MAX - 1
        ))),
    }
}

#[pyfunction]
pub(crate) fn number(id: Id) -> u64 {
    id.0
}

#[pyfunction]
#[pyo3(signature = (
    request_id, *, deadline_s=None, slo_ttft_s=None, tenant="", priority=0, bytes=0, traceparent=""
))]
pub(crate) fn request_begin(
    request_id: Id,
    deadline_s: Option<f64>,
    slo_ttft_s: Option<f64>,
    tenant: &str,
    priority: i32,
    bytes: u64,
    traceparent: &str,
) -> PyResult<u64> {
    let deadline_ns = match deadline_s {
        Some(_) => moment("deadline_s", deadline_s)?,
        None => moment("slo_ttft_s", slo_ttft_s)?,
    };
    let facts = Facts { deadline_ns, bytes, priority, tenant: tenant.into() };
    hints::request_begin(request_id.0, facts).map_err(of_hint)?;
    if let Some(trace) = Hint::of_traceparent(request_id.0, traceparent) {
        hints::tell(trace).map_err(of_hint)?;
    }
    Ok(request_id.0)
}

#[pyfunction]
pub(crate) fn request_end(request_id: Id) -> PyResult<()> {
    hints::tell(Hint::RequestEnd { request: request_id.0 }).map_err(of_hint)
}

#[pyfunction]
pub(crate) fn request_deadline_s(request_id: Id) -> Option<f64> {
    let due = hints::request(request_id.0)?.deadline_ns;
    let now = hints::now();
    let seconds = |from: u64, to: u64| Duration::from_nanos(to - from).as_secs_f64();
    match due {
        0 => None,
        due if due < now => Some(-seconds(due, now)),
        due => Some(seconds(now, due)),
    }
}

#[pyfunction]
#[pyo3(signature = (batch_id, *, layers, layer_time_s=0.0))]
pub(crate) fn batch_begin(batch_id: Id, layers: i64, layer_time_s: f64) -> PyResult<()> {
    let layers = match u16::try_from(layers) {
        Ok(layers) if layers > 0 => layers,
        _ => {
            return Err(UnknownLayer::new_err(format!(
                "{layers} is no number of layers that a model has: 1 to {}",
                u16::MAX
            )));
        }
    };
    let layer_time_ns = nanoseconds("layer_time_s", layer_time_s)?;
    hints::tell(Hint::BatchBegin { batch: batch_id.0, layers, layer_time_ns }).map_err(of_hint)
}

#[pyfunction]
pub(crate) fn batch_join(batch_id: Id, request_id: Id) -> PyResult<()> {
    hints::tell(Hint::RequestJoin {
        batch: batch_id.0,
        request: request_id.0,
        deadline_ns: 0,
        bytes: 0,
    })
    .map_err(of_hint)
}

#[pyfunction]
pub(crate) fn batch_queued(batch_id: Id, ahead: Id) -> PyResult<()> {
    hints::tell(Hint::BatchQueued { batch: batch_id.0, ahead: ahead.0 }).map_err(of_hint)
}

#[pyfunction]
#[pyo3(signature = (batch_id, layer))]
pub(crate) fn layer_begin(batch_id: Id, layer: i64) -> PyResult<()> {
    let layer = self::layer(layer)?;
    hints::tell(Hint::LayerBegin { batch: batch_id.0, layer }).map_err(of_hint)
}

#[pyfunction]
pub(crate) fn compute_end(batch_id: Id) -> PyResult<()> {
    hints::tell(Hint::ComputeEnd { batch: batch_id.0 }).map_err(of_hint)
}

#[pyfunction]
pub(crate) fn batch_end(batch_id: Id) -> PyResult<()> {
    hints::tell(Hint::BatchEnd { batch: batch_id.0 }).map_err(of_hint)
}

#[pyfunction]
#[pyo3(signature = (address, nbytes, layer, stage=None))]
pub(crate) fn memory_layer(
    address: u64,
    nbytes: u64,
    layer: i64,
    stage: Option<Given>,
) -> PyResult<()> {
    let layer = self::layer(layer)?;
    let stage = stage.map(|given| given.0);
    hints::memory_layer(address, nbytes, layer, stage).map_err(of_memory)
}

#[pyfunction]
#[pyo3(signature = (address, nbytes, *, batch=None, request=None, deadline_s=None))]
pub(crate) fn memory_owner(
    address: u64,
    nbytes: u64,
    batch: Option<Id>,
    request: Option<Id>,
    deadline_s: Option<f64>,
) -> PyResult<()> {
    let owner = Scope {
        batch: or_unknown(batch),
        request: or_unknown(request),
        deadline_ns: moment("deadline_s", deadline_s)?,
        ..Scope::default()
    };
    hints::memory_owner(address, nbytes, owner).map_err(of_memory)
}

#[pyfunction]
pub(crate) fn memory_forget(address: u64, nbytes: u64) -> PyResult<()> {
    hints::memory_forget(address, nbytes).map_err(of_memory)
}

/// Returns the index after the last of each run of ranges with the same facts. Internal to the
/// package.
#[pyfunction]
#[pyo3(name = "_memory_runs")]
pub(crate) fn memory_runs(addresses: Vec<u64>) -> Vec<usize> {
    let mut ends = Vec::new();
    let mut before = None;
    let count = addresses.len();
    for (index, address) in addresses.into_iter().enumerate() {
        let known = memory::at(address);
        if before.is_some_and(|before| before != known) {
            ends.push(index);
        }
        before = Some(known);
    }
    if count > 0 {
        ends.push(count);
    }
    ends
}

/// Records that these ranges have the values of the thread's open scope. A thread of the library,
/// which has no scope, posts their transfer. Internal to the package.
#[pyfunction]
#[pyo3(name = "_memory_own")]
pub(crate) fn memory_own(addresses: Vec<u64>, lengths: Vec<u64>) -> PyResult<()> {
    let Some(open) = scope::current() else { return Ok(()) };
    if open.batch == 0 && open.request == 0 && open.deadline_ns == 0 {
        return Ok(());
    }
    for (address, nbytes) in addresses.into_iter().zip(lengths) {
        hints::memory_owner(address, nbytes, open).map_err(of_memory)?;
    }
    Ok(())
}
