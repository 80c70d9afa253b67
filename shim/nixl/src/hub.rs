//! The agents, requests and prepared lists of a process, and the thread for agents that nobody
//! calls.
//!
//! Locks are taken in this order: an agent's calls, a request's state, then any of the others.

use core::sync::atomic::{AtomicBool, Ordering};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use laxity_client::hints::{self, Transfers};
use laxity_job::exit::at_exit;
use laxity_job::fork::{Leaked, PerProcess};
use laxity_job::monitor::Monitor;
use parking_lot::RwLock;

use crate::abi::{AgentPtr, ListPtr, NixlStatus, OptionalArgs, RequestPtr};
use crate::agent::Agent;
use crate::lists::PreparedList;
use crate::report::{self, COUNTERS};
use crate::request::{NixlRequest, PostedLoad};
use crate::settings;

/// Largest number of recorded requests, and of recorded lists. Transfers of others are unscheduled.
const RECORDED_MAX: usize = 1 << 20;
/// Time between two looks of the thread at agents with open requests.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// Longest wait for the thread at the process's end.
const END_WITHIN: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(crate) struct NixlHub {
    agents: RwLock<HashMap<usize, Arc<Agent>>>,
    requests: RwLock<HashMap<usize, Arc<NixlRequest>>>,
    lists: RwLock<HashMap<usize, (usize, Arc<PreparedList>)>>,
    transfers: Transfers,
    thread: TendingThread,
}

#[derive(Debug, Default)]
struct TendingThread {
    /// Agents with open requests.
    list: Monitor<Vec<Arc<Agent>>>,
    start: OnceLock<()>,
    ends: AtomicBool,
    /// Whether the thread is in an agent, or about to be.
    is_busy: AtomicBool,
}

static HUB: PerProcess<NixlHub> = PerProcess::none();

/// Returns the state, or `None` if [`make`] has not created it in this process.
pub(crate) fn known() -> Option<&'static NixlHub> {
    HUB.get()
}

/// Returns the state, and creates it if there is none. Attaches to the daemon or warns. Returns
/// `None` if no request of this process waits for permits.
pub(crate) fn make() -> Option<&'static NixlHub> {
    static WANTED: Leaked<bool> = Leaked::none();
    let make = || {
        if at_exit(end) {
            COUNTERS.reset();
        }
        let transfers = hints::transfers();
        hints::warn_if_alone("NIXL's transfers");
        NixlHub {
            agents: RwLock::default(),
            requests: RwLock::default(),
            lists: RwLock::default(),
            transfers,
            thread: TendingThread::default(),
        }
    };
    WANTED.get_or_make(settings::is_wanted).then(|| HUB.get_or_make(make))
}

/// Stops the thread and writes the report. It was registered after NIXL's library was loaded, so it
/// runs before that library's objects are destroyed.
fn end() {
    if let Some(hub) = known() {
        hub.stop();
        report::write();
    }
}

impl NixlHub {
    pub(crate) fn agent(&self, address: AgentPtr) -> Option<Arc<Agent>> {
        self.agents.read().get(&(address as usize)).cloned()
    }

    pub(crate) fn request(
        &self,
        agent: AgentPtr,
        handle: RequestPtr,
    ) -> Option<(Arc<Agent>, Arc<NixlRequest>)> {
        let request = self.requests.read().get(&(handle as usize)).cloned()?;
        Some((self.agent(agent).filter(|agent| agent.address == request.agent)?, request))
    }

    /// Records a request that NIXL has created. An old one with this address was released without
    /// this library.
    pub(crate) fn created(&self, agent: AgentPtr, handle: RequestPtr, load: PostedLoad) {
        let new = || Arc::new(Agent::new(agent));
        self.agents.write().entry(agent as usize).or_insert_with(new);
        let mut requests = self.requests.write();
        if requests.len() < RECORDED_MAX || requests.contains_key(&(handle as usize)) {
            let request = Arc::new(NixlRequest::new(agent, handle, load));
            requests.insert(handle as usize, request);
        }
    }

    /// Removes a request before it is released, since another may get its address at once.
    pub(crate) fn forget(&self, handle: RequestPtr) -> Option<Arc<NixlRequest>> {
        self.requests.write().remove(&(handle as usize))
    }

    /// Records a request again that could not be released.
    pub(crate) fn remember(&self, handle: RequestPtr, request: Arc<NixlRequest>) {
        self.requests.write().insert(handle as usize, request);
    }

    pub(crate) fn prepared(&self, agent: AgentPtr, handle: ListPtr, list: PreparedList) {
        let mut lists = self.lists.write();
        if lists.len() < RECORDED_MAX || lists.contains_key(&(handle as usize)) {
            lists.insert(handle as usize, (agent as usize, Arc::new(list)));
        }
    }

    pub(crate) fn list(&self, handle: *const core::ffi::c_void) -> Option<Arc<PreparedList>> {
        self.lists.read().get(&(handle as usize)).map(|(_, list)| Arc::clone(list))
    }

    pub(crate) fn forget_list(&self, handle: ListPtr) {
        self.lists.write().remove(&(handle as usize));
    }

    /// Forgets an agent before it is destroyed, and drops its deferred posts.
    pub(crate) fn destroyed(&self, address: AgentPtr) {
        let Some(agent) = self.agents.write().remove(&(address as usize)) else { return };
        agent.alone(|| {
            let is_theirs = |request: &Arc<NixlRequest>| request.agent == agent.address;
            let mut requests = self.requests.write();
            let theirs: Vec<_> = requests.extract_if(|_, it| is_theirs(it)).collect();
            drop(requests);
            for (_, request) in theirs {
                request.state.lock().end();
            }
            self.lists.write().retain(|_, (of, _)| *of != agent.address);
        });
    }

    /// Posts a request of the program, or defers the post.
    ///
    /// # Safety
    /// The conditions of `nixl.h` hold, and the caller is in the agent.
    pub(crate) unsafe fn post(
        &'static self,
        agent: &Arc<Agent>,
        request: &Arc<NixlRequest>,
        extra: OptionalArgs,
    ) -> NixlStatus {
        if self.thread.ends.load(Ordering::SeqCst) {
            // Without the thread, a program that waits for its peer would wait for ever.
            COUNTERS.passed.add(1);
            // SAFETY: upheld by the caller.
            return unsafe { request.pass(extra) };
        }
        let mut state = request.state.lock();
        // SAFETY: upheld by the caller.
        let code = unsafe { request.post(&mut state, &self.transfers, extra) };
        if state.is_open() {
            agent.list(request, &mut state);
            drop(state);
            self.attend(agent);
        }
        code
    }

    /// Adds an agent to the thread's list.
    fn attend(&'static self, agent: &Arc<Agent>) {
        let thread = &self.thread;
        thread.start.get_or_init(|| self.start());
        let mut list = thread.list.lock();
        if !list.iter().any(|listed| Arc::ptr_eq(listed, agent)) {
            list.push(Arc::clone(agent));
            thread.list.notify();
        }
    }

    fn start(&'static self) {
        let builder = std::thread::Builder::new().name(String::from("laxity-nixl"));
        let started = laxity_job::thread::spawn(builder, move || self.work());
        if let Err(error) = started {
            eprintln!(
                "laxity: cannot start a thread ({error}); NIXL's transfers go out unscheduled"
            );
            self.thread.ends.store(true, Ordering::SeqCst);
        }
    }

    fn work(&'static self) {
        let thread = &self.thread;
        loop {
            let agents = {
                let mut list = thread.list.lock();
                while list.is_empty() {
                    list = thread.list.wait(list);
                }
                list.clone()
            };
            std::thread::sleep(LOOK_EVERY);
            for agent in agents {
                // SeqCst, here and in `stop`, so that one of the two sees the other's store.
                thread.is_busy.store(true, Ordering::SeqCst);
                if thread.ends.load(Ordering::SeqCst) {
                    thread.is_busy.store(false, Ordering::SeqCst);
                    return;
                }
                if !agent.tend_if_quiet() {
                    let mut list = thread.list.lock();
                    // A post lists its request first and then takes this lock.
                    list.retain(|listed| !Arc::ptr_eq(listed, &agent) || agent.has_open());
                }
                thread.is_busy.store(false, Ordering::SeqCst);
            }
        }
    }

    fn stop(&self) {
        self.thread.ends.store(true, Ordering::SeqCst);
        let end = Instant::now() + END_WITHIN;
        while self.thread.is_busy.load(Ordering::SeqCst) && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

/// Counts a request whose bytes are not known, and says so once.
pub(crate) fn unknown() {
    static SAID: AtomicBool = AtomicBool::new(false);
    COUNTERS.unknown.add(1);
    if !SAID.swap(true, Ordering::Relaxed) {
        eprintln!(
            "laxity: the bytes of a transfer are not known (a release of NIXL with other \
             descriptors, or a list from before a fork); such transfers go out unscheduled"
        );
    }
}
