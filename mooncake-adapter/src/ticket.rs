//! Permits for transfers that no other part of Laxity sees.

use std::time::{Duration, Instant};

use laxity_client::hints::{self, Asked, Transfer, Transfers};
use laxity_client::scope::Scope;
use laxity_client::{Direction, Permit, peers};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::exceptions::HintError;
use crate::hints::moment;
use crate::id::{Id, or_unknown};
use crate::job::objective_ns;
use crate::stage::Given;

/// Longest wait before Python's signals (Ctrl-C) are checked.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// A permit to send.
#[pyclass(name = "Grant", module = "laxity", frozen, get_all)]
pub(crate) struct PyPermit {
    bytes: u64,
    level: u8,
    dscp: u8,
    last: bool,
    bypassed: bool,
}

impl From<Permit> for PyPermit {
    fn from(permit: Permit) -> Self {
        Self {
            bytes: permit.bytes,
            level: permit.level,
            dscp: permit.dscp,
            last: permit.last,
            bypassed: permit.bypassed,
        }
    }
}

#[pymethods]
impl PyPermit {
    fn __repr__(&self) -> String {
        let python = |yes: bool| if yes { "True" } else { "False" };
        format!(
            "Grant(bytes={}, level={}, dscp={}, last={}, bypassed={})",
            self.bytes,
            self.level,
            self.dscp,
            python(self.last),
            python(self.bypassed)
        )
    }
}

/// A transfer that was submitted.
#[pyclass(name = "Ticket", module = "laxity", frozen)]
pub(crate) struct PyTicket {
    transfer: Transfer,
}

#[pymethods]
impl PyTicket {
    #[pyo3(signature = (timeout_s=None))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<Option<PyPermit>> {
        // A flow that is permitted at once need not release the GIL.
        if let Some(permit) = self.transfer.poll() {
            return Ok(Some(permit.into()));
        }
        let limit = match timeout_s {
            None => None,
            Some(seconds) => match Duration::try_from_secs_f64(seconds) {
                Ok(limit) => Some(limit),
                Err(_) if seconds < 0.0 => Some(Duration::ZERO),
                // The time is longer than can be represented, so there is no limit. NaN is an
                // error.
                Err(_) if seconds > 0.0 => None,
                Err(_) => {
                    return Err(HintError::new_err(format!(
                        "timeout_s is {seconds}, which is no time in seconds"
                    )));
                }
            },
        };
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let slice = left.unwrap_or(SIGNALS_EVERY).min(SIGNALS_EVERY);
            if let Some(permit) = py.detach(|| self.transfer.wait(Some(slice))) {
                return Ok(Some(permit.into()));
            }
            if left.is_some_and(|left| left <= slice) {
                return Ok(None);
            }
            py.check_signals()?;
        }
    }

    fn poll(&self) -> Option<PyPermit> {
        self.transfer.poll().map(PyPermit::from)
    }

    fn complete(&self, nbytes: u64) -> PyResult<()> {
        self.transfer.complete(nbytes).map_err(|excess| HintError::new_err(excess.to_string()))
    }

    fn cancel(&self) {
        self.transfer.cancel();
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.transfer.bytes()
    }

    #[getter]
    fn granted(&self) -> u64 {
        self.transfer.permitted()
    }

    #[getter]
    fn done(&self) -> bool {
        self.transfer.is_done()
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.transfer.cancel();
    }

    fn __repr__(&self) -> String {
        format!(
            "<laxity.Ticket: {} of {} bytes granted>",
            self.transfer.permitted(),
            self.transfer.bytes()
        )
    }
}

/// Transfers in one lane, so that one thread can wait for any of them. Internal to the package's
/// wrappers.
#[pyclass(name = "_Transfers", module = "laxity", frozen)]
pub(crate) struct PyTransfers {
    transfers: Transfers,
}

#[pymethods]
impl PyTransfers {
    #[new]
    fn new() -> Self {
        Self { transfers: hints::transfers() }
    }

    /// Submits a transfer of `nbytes` at `address`. Its stage is `otherwise` if neither the
    /// thread's scope nor the memory has one.
    #[pyo3(signature = (otherwise, nbytes, address, direction, peer, whole=false))]
    fn submit(
        &self,
        otherwise: Given,
        nbytes: u64,
        address: u64,
        direction: &str,
        peer: Option<&str>,
        whole: bool,
    ) -> PyResult<PyTicket> {
        Ok(PyTicket {
            transfer: self.transfers.submit(&Asked {
                bytes: nbytes,
                otherwise: Some(otherwise.0),
                address,
                direction: self::direction(direction)?,
                peer: peer.map_or(0, peers::named),
                whole,
                objective_ns: objective_ns(),
                ..Asked::default()
            }),
        })
    }

    fn wait_any(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        let limit = Duration::try_from_secs_f64(timeout_s).unwrap_or(SIGNALS_EVERY);
        py.detach(|| self.transfers.wait_any(limit.min(SIGNALS_EVERY)));
        py.check_signals()
    }
}

fn direction(name: &str) -> PyResult<Direction> {
    match name {
        "egress" => Ok(Direction::Egress),
        "ingress" => Ok(Direction::Ingress),
        other => Err(HintError::new_err(format!(
            "{other:?} is no direction; it is \"egress\" (out of this host) or \"ingress\""
        ))),
    }
}

#[pyfunction]
#[pyo3(signature = (
    stage, nbytes, *, layer=None, batch=None, request=None, deadline_s=None, peer=None,
    direction="egress", whole=false, nic=None, address=None
))]
#[expect(clippy::too_many_arguments, reason = "all but two are keywords, for those who call it")]
pub(crate) fn submit(
    stage: Option<Given>,
    nbytes: u64,
    layer: Option<i64>,
    batch: Option<Id>,
    request: Option<Id>,
    deadline_s: Option<f64>,
    peer: Option<&str>,
    direction: &str,
    whole: bool,
    nic: Option<&str>,
    address: Option<u64>,
) -> PyResult<PyTicket> {
    let deadline_ns = match deadline_s {
        // The flow is late. It is counted, but a deadline never stops a transfer.
        Some(seconds) if seconds <= 0.0 => 1,
        seconds => moment("deadline_s", seconds)?,
    };
    let said = Scope {
        stage: stage.map(|given| given.0),
        // A batch can't have this layer, so the hint is counted as wrong.
        layer: layer.map(|layer| u16::try_from(layer).unwrap_or(u16::MAX)),
        batch: or_unknown(batch),
        request: or_unknown(request),
        deadline_ns,
    };
    Ok(PyTicket {
        transfer: hints::submit(&Asked {
            bytes: nbytes,
            said,
            otherwise: None,
            address: address.unwrap_or(0),
            direction: self::direction(direction)?,
            nic: nic.map(|name| hints::client().nic(name)),
            peer: peer.map_or(0, peers::named),
            whole,
            ..Asked::default()
        }),
    })
}
