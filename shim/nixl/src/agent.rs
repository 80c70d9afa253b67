//! An agent of the program: which threads are in its calls, and its open requests.

use core::cell::Cell;
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use laxity_client::hints::now;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use crate::abi::AgentPtr;
use crate::request::{NixlRequest, PostState};

/// Time without a call of the agent after which the thread posts its permitted requests. A program
/// that asks for the state of its transfers calls more often, and posts them itself.
pub(crate) const QUIET: Duration = Duration::from_millis(5);
/// Least time between two calls of the program that tend other requests than their own.
const TEND_EVERY: Duration = Duration::from_micros(500);
/// Number of requests that are tended at once. The others follow the next time.
const TENDED: usize = 16;

thread_local! {
    /// Number of calls of agents that this thread is in. NIXL's functions call each other by the
    /// interposed symbols, and may hold the agent's lock then.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) address: usize,
    /// Calls of the program share this lock, as they share the agent. The thread takes it alone.
    calls: RwLock<()>,
    /// Times of the last call, and of the last that tended the open requests. Relaxed: hints.
    called_ns: AtomicU64,
    tended_ns: AtomicU64,
    /// Requests that wait for permits or are in flight.
    open: Mutex<VecDeque<Arc<NixlRequest>>>,
}

/// Reports whether this thread is in a call of an agent, so that a call comes from NIXL itself.
pub(crate) fn is_nested() -> bool {
    DEPTH.with(Cell::get) > 0
}

/// A call of an agent, until it is dropped.
pub(crate) struct Inside<'a> {
    agent: Option<(&'a Agent, RwLockReadGuard<'a, ()>)>,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        if let Some((agent, _)) = &self.agent {
            agent.called_ns.store(now(), Ordering::Relaxed);
        }
        DEPTH.with(|depth| depth.set(depth.get() - 1));
    }
}

impl Inside<'_> {
    /// Tends the agent's open requests, unless that was done just now.
    pub(crate) fn tend(&self) {
        let Some((agent, _)) = &self.agent else { return };
        let (now, last) = (now(), agent.tended_ns.load(Ordering::Relaxed));
        if now.saturating_sub(last) >= TEND_EVERY.as_nanos() as u64 {
            agent.tended_ns.store(now, Ordering::Relaxed);
            agent.tend();
        }
    }
}

impl Agent {
    pub(crate) fn new(address: AgentPtr) -> Self {
        Self {
            address: address as usize,
            calls: RwLock::default(),
            called_ns: AtomicU64::new(0),
            tended_ns: AtomicU64::new(0),
            open: Mutex::default(),
        }
    }

    /// Enters the agent for a call of the program. Waits for the thread to leave it.
    pub(crate) fn enter(&self) -> Inside<'_> {
        let is_nested = DEPTH.with(|depth| depth.replace(depth.get() + 1)) > 0;
        Inside { agent: (!is_nested).then(|| (self, self.calls.read_recursive())) }
    }

    /// Waits until no thread is in the agent, and keeps all out of it during `body`.
    pub(crate) fn alone(&self, body: impl FnOnce()) {
        let _all = (!is_nested()).then(|| self.calls.write());
        self.open.lock().clear();
        body();
    }

    /// Tends the open requests for a program that does not call the agent. Reports whether there
    /// are any.
    pub(crate) fn tend_if_quiet(&self) -> bool {
        let quiet = now().saturating_sub(self.called_ns.load(Ordering::Relaxed));
        if quiet >= QUIET.as_nanos() as u64
            && let Some(_alone) = self.calls.try_write()
        {
            DEPTH.with(|depth| depth.set(depth.get() + 1));
            self.tend();
            DEPTH.with(|depth| depth.set(depth.get() - 1));
        }
        !self.open.lock().is_empty()
    }

    fn tend(&self) {
        let count = self.open.lock().len().min(TENDED);
        for _ in 0..count {
            // The request stays listed meanwhile, so that the thread goes on looking at the agent.
            let next = {
                let mut open = self.open.lock();
                let next = open.pop_front();
                open.extend(next.clone());
                next
            };
            let Some(request) = next else { return };
            // SAFETY: the calling thread is in the agent. A request is released in its agent, too,
            // and is not open afterwards.
            unsafe { request.tend(self) };
        }
    }

    /// Reports whether requests of this agent are open.
    pub(crate) fn has_open(&self) -> bool {
        !self.open.lock().is_empty()
    }

    /// Lists a request that was posted. Its state is locked.
    pub(crate) fn list(&self, request: &Arc<NixlRequest>, state: &mut PostState) {
        if !core::mem::replace(&mut state.is_listed, true) {
            self.open.lock().push_back(Arc::clone(request));
        }
    }

    /// Takes a request off the list once it is not open. Its state is locked, so that a post by
    /// another thread can't list it meanwhile.
    pub(crate) fn unlist(&self, request: &NixlRequest, state: &mut PostState) {
        if !state.is_open() && core::mem::take(&mut state.is_listed) {
            let mut open = self.open.lock();
            let at = open.iter().rposition(|listed| core::ptr::eq(&raw const **listed, request));
            at.map(|at| open.remove(at));
        }
    }
}
