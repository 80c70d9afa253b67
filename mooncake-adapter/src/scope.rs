//! The scopes of `with laxity.scope(...)`.

use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;
use std::thread::{self, ThreadId};

use laxity_client::hints;
use laxity_client::scope::Scope;
use pyo3::prelude::*;

use crate::hints::{layer, moment};
use crate::id::{Id, or_unknown};
use crate::stage::Given;

/// Number of exits from a scope by a thread that had not entered it. Relaxed, because it is a
/// statistic.
pub(crate) static CROSSED: AtomicU64 = AtomicU64::new(0);

/// The stage, batch, request and layer of the thread's transfers. Several threads may enter it.
#[pyclass(name = "Scope", module = "laxity", frozen)]
pub(crate) struct PyScope {
    scope: Scope,
    /// The threads that have entered the scope, once per entry.
    entered: Mutex<Vec<ThreadId>>,
}

#[pymethods]
impl PyScope {
    #[new]
    #[pyo3(signature = (*, stage=None, layer=None, batch=None, request=None, deadline_s=None))]
    fn new(
        stage: Option<Given>,
        layer: Option<i64>,
        batch: Option<Id>,
        request: Option<Id>,
        deadline_s: Option<f64>,
    ) -> PyResult<Self> {
        Ok(Self {
            scope: Scope {
                stage: stage.map(|given| given.0),
                layer: layer.map(self::layer).transpose()?,
                batch: or_unknown(batch),
                request: or_unknown(request),
                deadline_ns: moment("deadline_s", deadline_s)?,
            },
            entered: Mutex::default(),
        })
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        hints::scope_push(slf.scope);
        slf.threads().push(thread::current().id());
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        let own = thread::current().id();
        let mut entered = self.threads();
        // A thread that didn't enter this scope may have another one open, which must stay open.
        match entered.iter().rposition(|thread| *thread == own) {
            Some(at) => {
                entered.swap_remove(at);
                hints::scope_pop();
            }
            None => {
                CROSSED.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

impl PyScope {
    fn threads(&self) -> std::sync::MutexGuard<'_, Vec<ThreadId>> {
        self.entered.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
