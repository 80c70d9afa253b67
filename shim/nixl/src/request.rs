//! A transfer request, from its creation to its release, and the permit for each of its posts.
//!
//! # Safety
//! Unless a function says otherwise, its callers uphold the conditions of `nixl.h` for the request
//! and the arguments, and are in the request's agent.

use core::ffi::c_void;
use std::time::{Duration, Instant};

use laxity_client::Direction;
use laxity_client::hints::{Asked, Transfer, Transfers};
use laxity_job::Job;
use parking_lot::Mutex;

use crate::abi::{AgentPtr, NixlStatus, OptionalArgs, RequestPtr, WRITE, status};
use crate::agent::Agent;
use crate::real;
use crate::report::COUNTERS;

/// How long a post waits for its permit before it is deferred, as in `laxity.nixl`. A daemon that
/// is awake has answered by then.
const ANSWER: Duration = Duration::from_micros(200);
/// Longest wait of a post with optional arguments. A program expects a post to return soon.
pub(crate) const ARGUMENTS_WAIT: Duration = Duration::from_millis(10);
/// Longest time that a post is deferred, as in `laxity.nixl`.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// What a request moves. A repost moves the same bytes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PostedLoad {
    pub(crate) operation: i32,
    pub(crate) bytes: u64,
    /// Address of the first descriptor in this process.
    pub(crate) address: u64,
}

#[derive(Debug)]
pub(crate) struct NixlRequest {
    pub(crate) agent: usize,
    handle: usize,
    load: PostedLoad,
    pub(crate) state: Mutex<PostState>,
}

#[derive(Debug, Default)]
pub(crate) struct PostState {
    phase: Phase,
    /// Whether the request is in its agent's list of open requests.
    pub(crate) is_listed: bool,
}

#[derive(Debug, Default)]
enum Phase {
    /// NIXL's own status counts: not posted, over, or posted unscheduled.
    #[default]
    Theirs,
    /// The program has posted it. NIXL gets it with the permit.
    Deferred { transfer: Transfer, since: Instant },
    /// Posted to NIXL with a permit, and not known to be complete.
    InFlight(Transfer),
    /// NIXL's error for a deferred post. It stays until the next post, since NIXL itself may not
    /// know of the failed one.
    Refused(NixlStatus),
}

impl PostState {
    /// Reports whether the request waits for a permit, or its end is to be reported.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Deferred { .. } | Phase::InFlight(_))
    }

    pub(crate) fn is_deferred(&self) -> bool {
        matches!(self.phase, Phase::Deferred { .. })
    }

    /// Ends a flow without bytes in flight: its request was released, or its agent is destroyed.
    pub(crate) fn end(&mut self) {
        match core::mem::take(&mut self.phase) {
            Phase::Deferred { transfer, .. } => {
                COUNTERS.dropped.add(1);
                transfer.cancel();
            }
            Phase::InFlight(transfer) => {
                transfer.cancel();
            }
            Phase::Theirs | Phase::Refused(_) => {}
        }
    }

    /// Records NIXL's status of a transfer in flight, and reports its end to the daemon.
    fn hear(&mut self, heard: NixlStatus) {
        if heard == status::IN_PROG {
            return;
        }
        if let Phase::InFlight(transfer) = core::mem::take(&mut self.phase) {
            report_end(&transfer, heard);
        }
    }
}

fn report_end(transfer: &Transfer, heard: NixlStatus) {
    if heard == status::SUCCESS {
        // All bytes were permitted before the post, so the number can't be too large.
        let _ = transfer.complete(transfer.permitted());
    }
    transfer.cancel();
}

impl NixlRequest {
    pub(crate) fn new(agent: AgentPtr, handle: RequestPtr, load: PostedLoad) -> Self {
        let state = Mutex::default();
        Self { agent: agent as usize, handle: handle as usize, load, state }
    }

    fn agent(&self) -> AgentPtr {
        self.agent as *const c_void
    }

    fn handle(&self) -> RequestPtr {
        self.handle as *mut c_void
    }

    unsafe fn ask(&self) -> NixlStatus {
        // SAFETY: upheld by the caller.
        unsafe { real::status_of(self.agent(), self.handle()) }
    }

    /// Hands a post to NIXL without a flow.
    pub(crate) unsafe fn pass(&self, extra: OptionalArgs) -> NixlStatus {
        // SAFETY: upheld by the caller.
        unsafe { real::post(self.agent(), self.handle(), extra) }
    }

    /// Submits the flow of a post. Never blocks.
    fn submit(&self, transfers: &Transfers) -> Transfer {
        let job = Job::of_this_process();
        // The bytes of a READ arrive here, so they load this host's ingress port.
        let (otherwise, direction) = match self.load.operation {
            WRITE => (job.profile.stage.write, Direction::Egress),
            _ => (job.profile.stage.read, Direction::Ingress),
        };
        transfers.submit(&Asked {
            bytes: self.load.bytes,
            said: laxity_client::hints::said_of(self.load.address),
            otherwise: Some(otherwise),
            direction,
            whole: true,
            objective_ns: job.objective_ns(),
            ..Asked::default()
        })
    }

    /// Implements `postXferReq`.
    pub(crate) unsafe fn post(
        &self,
        state: &mut PostState,
        transfers: &Transfers,
        extra: OptionalArgs,
    ) -> NixlStatus {
        match state.phase {
            Phase::Deferred { .. } => return status::REPOST_ACTIVE,
            Phase::InFlight(_) => {
                // SAFETY: upheld by the caller.
                let heard = unsafe { self.ask() };
                state.hear(heard);
                if heard == status::IN_PROG {
                    return status::REPOST_ACTIVE;
                }
            }
            Phase::Theirs | Phase::Refused(_) => state.phase = Phase::Theirs,
        }
        let transfer = self.submit(transfers);
        COUNTERS.bytes.add(self.load.bytes);
        let limit = if extra.is_null() { ANSWER } else { ARGUMENTS_WAIT };
        match transfer.wait_whole(limit) {
            Some(is_bypassed) => {
                // SAFETY: upheld by the caller.
                unsafe { self.hand_on(state, transfer, extra, is_bypassed) }
            }
            None if extra.is_null() => {
                COUNTERS.deferred.add(1);
                state.phase = Phase::Deferred { transfer, since: Instant::now() };
                status::IN_PROG
            }
            None => {
                COUNTERS.expired.add(1);
                // SAFETY: upheld by the caller.
                unsafe { self.hand_on(state, transfer, extra, true) }
            }
        }
    }

    /// Gives a post to NIXL. Its flow ends here if it is unscheduled.
    unsafe fn hand_on(
        &self,
        state: &mut PostState,
        transfer: Transfer,
        extra: OptionalArgs,
        is_unscheduled: bool,
    ) -> NixlStatus {
        state.phase = Phase::Theirs;
        // SAFETY: upheld by the caller.
        let code = unsafe { real::post(self.agent(), self.handle(), extra) };
        if is_unscheduled {
            COUNTERS.passed.add(1);
            transfer.cancel();
        } else if code == status::IN_PROG {
            state.phase = Phase::InFlight(transfer);
        } else {
            report_end(&transfer, code);
        }
        code
    }

    /// Posts a deferred request if it has its permit by now.
    unsafe fn advance(&self, state: &mut PostState) {
        let Phase::Deferred { transfer, since } = &state.phase else { return };
        let is_unscheduled = match transfer.wait_whole(Duration::ZERO) {
            Some(is_bypassed) => is_bypassed,
            None if since.elapsed() < PATIENCE => return,
            None => {
                COUNTERS.expired.add(1);
                true
            }
        };
        let Phase::Deferred { transfer, .. } = core::mem::take(&mut state.phase) else { return };
        // SAFETY: upheld by the caller. The post had no optional arguments.
        let code = unsafe { self.hand_on(state, transfer, core::ptr::null(), is_unscheduled) };
        if code < 0 {
            COUNTERS.failed_late.add(1);
            state.phase = Phase::Refused(code);
        }
    }

    /// Implements `getXferStatus`.
    pub(crate) unsafe fn status(&self, state: &mut PostState) -> NixlStatus {
        // SAFETY: upheld by the caller.
        unsafe { self.advance(state) };
        match state.phase {
            Phase::Deferred { .. } => status::IN_PROG,
            Phase::Refused(code) => code,
            Phase::InFlight(_) | Phase::Theirs => {
                // SAFETY: upheld by the caller.
                let heard = unsafe { self.ask() };
                state.hear(heard);
                heard
            }
        }
    }

    /// Does what the program's next call for this request would do. Afterwards the request is in
    /// its agent's list only if it is open.
    ///
    /// # Safety
    /// The request is not released, and the caller is in its agent.
    pub(crate) unsafe fn tend(&self, agent: &Agent) {
        // A thread that has the lock handles the request.
        let Some(mut state) = self.state.try_lock() else { return };
        if state.is_open() {
            // SAFETY: upheld by the caller.
            unsafe { self.status(&mut state) };
        }
        agent.unlist(self, &mut state);
    }
}
