//! One batch of a gated engine: what of it Mooncake has, and what waits for its turn.
//!
//! A program asks after a transfer by its place in the batch, so transfers are handed on in the
//! order in which they were submitted, whole, and once each: those that Mooncake has are a prefix
//! of those that the program submitted, with the same numbers. For the others this library answers:
//! they wait.
//!
//! # What is handed on as it came
//! * A call for which there is leave at once, or no daemon: the program's own array, in one call.
//! * A call with a notification, never in parts: Mooncake sends it when all that the batch *has by
//!   then* is complete. For the same reason what follows or precedes it in its batch doesn't wait.
//! * What Mooncake will refuse: more than the batch holds.
//!
//! # What Mooncake refuses late
//! It had been accepted here, so it fails when it is asked after, and
//! so does all behind it in its batch; none of those is tried.
//!
//! # Locks
//! A batch is locked for as long as Mooncake is called for it, so that nobody asks after a
//! batch that another thread frees. Under it, in this order: the list of the worker, the lanes of
//! the client.

mod submit;

use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use laxity_client::hints::Transfer;
use parking_lot::Mutex;

use crate::abi::{Handle, TransferRequest, TransferStatus, status};
use crate::calls::{Notification, ask_after, hand_on};
use crate::hub::Hub;
use crate::report::COUNTERS;
use crate::runs::Run;

/// Requests that may wait in a process, 40 bytes each. A call beyond that has its batch handed on
/// as it is.
const WAITING_MAX: usize = 1 << 18;
/// Requests that wait. Relaxed: a bound that may be overshot by what other threads submit at that
/// moment.
static WAITING: AtomicUsize = AtomicUsize::new(0);
/// Nothing of this process waits so far: a forked child has none of its parent's batches.
pub(crate) fn forget_waiting() {
    WAITING.store(0, Ordering::Relaxed);
}

/// A batch that the program allocated and has not freed.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) engine: usize,
    pub(crate) id: u64,
    capacity: usize,
    pub(crate) state: Mutex<State>,
}

/// What became of it so far.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// Transfers that the program submitted.
    submitted: usize,
    /// How many of those Mooncake has: the first.
    handed: usize,
    waiting: VecDeque<Group>,
    /// What goes with what waits: then that is one group.
    notification: Option<Notification>,
    under_way: Vec<UnderWay>,
    /// Of each that Mooncake has, whether it is known to be over.
    over: Vec<bool>,
    /// What Mooncake refused late: those that it doesn't have failed.
    refusal: Option<c_int>,
    /// It carries a notification, or something went wrong in it: nothing more of it waits.
    passes: bool,
    /// Freed, or its engine is gone: Mooncake must not be asked after it.
    gone: bool,
    /// It is in the worker's list.
    pub(crate) listed: bool,
}

/// Transfers that wait.
#[derive(Debug)]
struct Group {
    requests: Vec<TransferRequest>,
    run: Run,
    /// Once it is the first: one at a time asks, as the others couldn't go before it.
    transfer: Option<Transfer>,
}

/// Transfers that Mooncake has, and that are not known to be over.
#[derive(Debug)]
struct UnderWay {
    transfer: Transfer,
    /// The first that is not known to be over.
    next: usize,
    end: usize,
    failed: bool,
}

/// Waits for all of the leave that a transfer asked for: whether it came without the daemon.
fn wait_for_permits(transfer: &Transfer, limit: Duration) -> Option<bool> {
    let end = Instant::now() + limit;
    let mut bypassed = false;
    loop {
        let permit = if limit.is_zero() {
            transfer.poll()
        } else {
            transfer.wait(Some(end.saturating_duration_since(Instant::now())))
        };
        bypassed |= permit?.bypassed;
        if transfer.is_done() {
            return Some(bypassed);
        }
    }
}

fn is_over(answer: &TransferStatus) -> bool {
    !matches!(answer.status, status::WAITING | status::PENDING)
}

impl Batch {
    pub(crate) fn new(engine: Handle, id: u64, capacity: usize) -> Self {
        Self {
            engine: engine as usize,
            id,
            capacity,
            state: Mutex::default(),
        }
    }

    fn engine(&self) -> Handle {
        self.engine as *mut c_void
    }

    /// Hands on what there is leave for; whether there was any.
    pub(crate) fn advance(&self, state: &mut State, hub: &'static Hub) -> bool {
        let mut moved = false;
        while !state.gone
            && let Some(group) = state.waiting.front_mut()
        {
            let run = group.run;
            let transfer = group
                .transfer
                .get_or_insert_with(|| hub.ask(self.engine(), &run));
            match wait_for_permits(transfer, Duration::ZERO) {
                None => break,
                // Nobody schedules any more.
                Some(true) => {
                    self.flush(state);
                    return true;
                }
                Some(false) => {
                    moved = true;
                    self.hand_on_first(state);
                }
            }
        }
        moved
    }

    /// Hands on all that waits, without leave.
    pub(crate) fn flush(&self, state: &mut State) {
        while !state.gone && !state.waiting.is_empty() {
            self.hand_on_first(state);
        }
    }

    fn hand_on_first(&self, state: &mut State) {
        let Some(mut group) = state.waiting.pop_front() else {
            return;
        };
        let count = group.requests.len();
        WAITING.fetch_sub(count, Ordering::Relaxed);
        // A notification is never in parts: it belongs to the one group that there is.
        let notify = state.notification.take();
        // SAFETY: copies of what the program submitted, and it keeps the memory that they name
        // until they are over, as it has to. The batch is not freed, which takes the lock that the
        // caller holds; Mooncake reads the array during the call only.
        let code = unsafe {
            let notify = notify.as_ref().map(Notification::message);
            hand_on(
                self.engine(),
                self.id,
                group.requests.as_mut_ptr(),
                count,
                notify,
            )
        };
        if code == 0 {
            match group.transfer.take_if(|transfer| transfer.is_done()) {
                Some(transfer) => state.handed_on(transfer, count),
                None => state.handed_unseen(count),
            }
        }
        if let Some(transfer) = group.transfer {
            transfer.cancel();
        }
        if code == 0 {
            return;
        }
        state.refusal = Some(code);
        state.passes = true;
        for group in state.waiting.drain(..) {
            WAITING.fetch_sub(group.requests.len(), Ordering::Relaxed);
        }
        COUNTERS
            .failed_late
            .add((state.submitted - state.handed) as u64);
        static SAID: std::sync::Once = std::sync::Once::new();
        SAID.call_once(|| {
            eprintln!(
                "laxity: Mooncake refused a transfer ({code}) that had to wait for its turn; \
                 getTransferStatus says that it \
                 failed, and those behind it in its batch"
            );
        });
    }

    /// Asks after what Mooncake has and tells the daemon what is complete; whether anything was
    /// over.
    pub(crate) fn settle(&self, state: &mut State) -> bool {
        if state.gone {
            return false;
        }
        let State {
            under_way, over, ..
        } = state;
        let mut happened = false;
        under_way.retain_mut(|part| {
            while part.next < part.end {
                if !over[part.next] {
                    let mut answer = TransferStatus {
                        status: status::WAITING,
                        transferred_bytes: 0,
                    };
                    let code =
                        // SAFETY: a transfer that Mooncake has, of a batch that nobody frees
                        // meanwhile.
                        unsafe { ask_after(self.engine(), self.id, part.next, &raw mut answer) };
                    if code == 0 && !is_over(&answer) {
                        return true;
                    }
                    part.failed |= code != 0 || answer.status != status::COMPLETED;
                    over[part.next] = true;
                }
                part.next += 1;
            }
            happened = true;
            end(part);
            false
        });
        happened
    }

    /// `getTransferStatus`.
    ///
    /// # Safety
    /// As the program has to call it.
    pub(crate) unsafe fn status(
        &self,
        state: &mut State,
        hub: &'static Hub,
        task: usize,
        answer: *mut TransferStatus,
    ) -> c_int {
        if !state.gone && (state.handed..state.submitted).contains(&task) {
            self.advance(state, hub);
        }
        if state.gone || answer.is_null() || !(state.handed..state.submitted).contains(&task) {
            // SAFETY: upheld by the caller.
            let code = unsafe { ask_after(self.engine(), self.id, task, answer) };
            // SAFETY: not null, and Mooncake filled it in.
            if code == 0 && !answer.is_null() && is_over(unsafe { &*answer }) {
                // SAFETY: as above.
                let failed = unsafe { (*answer).status } != status::COMPLETED;
                state.heard(task, failed);
            }
            return code;
        }
        let waits = state.refusal.is_none();
        // SAFETY: not null, so the caller vouches for it.
        unsafe {
            answer.write(TransferStatus {
                status: if waits {
                    status::WAITING
                } else {
                    status::FAILED
                },
                transferred_bytes: 0,
            });
        }
        0
    }

    /// `freeBatchID`, with `real` for Mooncake's; it says whether it is free.
    pub(crate) fn free(&self, state: &mut State, real: impl FnOnce() -> c_int) -> c_int {
        // Mooncake shall say itself that a batch is busy, which it doesn't know of what it doesn't
        // have.
        self.flush(state);
        let code = real();
        if code == 0 {
            self.end_transfers(state);
        }
        code
    }

    /// It is over: Mooncake found all of it complete, or its engine goes.
    pub(crate) fn end_transfers(&self, state: &mut State) {
        state.gone = true;
        for part in &mut state.under_way {
            end(part);
        }
        state.under_way.clear();
        state.over = Vec::new();
    }
}

/// The daemon is told that nothing of it is in flight.
fn end(part: &UnderWay) {
    if part.failed {
        part.transfer.cancel();
    } else {
        // What was permitted is what was handed on; it can't be too much.
        let _ = part.transfer.complete(part.transfer.permitted());
    }
}

impl State {
    /// Nothing of it waits, nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.gone || self.waiting.is_empty() && self.under_way.is_empty()
    }

    /// Something of it waits for leave.
    pub(crate) fn waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Something of it is in flight.
    pub(crate) fn moves(&self) -> bool {
        !self.under_way.is_empty()
    }

    fn handed_on(&mut self, transfer: Transfer, count: usize) {
        let next = self.handed;
        self.handed += count;
        self.over.resize(self.handed, false);
        self.under_way.push(UnderWay {
            transfer,
            next,
            end: self.handed,
            failed: false,
        });
    }

    /// Handed on without leave: the daemon is not to be told when it is over.
    fn handed_unseen(&mut self, count: usize) {
        self.handed += count;
        self.over.resize(self.handed, true);
    }

    /// Copies what has to wait: `requests`, which are those of `asked` and of `runs` behind it.
    fn wait<'a>(
        &mut self,
        mut requests: &[TransferRequest],
        asked: Option<(&Run, Transfer)>,
        runs: impl Iterator<Item = &'a Run>,
    ) {
        let (first, transfer) =
            asked.map_or((None, None), |(run, transfer)| (Some(*run), Some(transfer)));
        let mut transfer = transfer;
        for run in first.into_iter().chain(runs.copied()) {
            let (these, others) = requests.split_at(run.count);
            requests = others;
            COUNTERS.deferred.add(run.count as u64);
            WAITING.fetch_add(run.count, Ordering::Relaxed);
            self.waiting.push_back(Group {
                requests: these.to_vec(),
                run,
                transfer: transfer.take(),
            });
        }
    }

    /// The program heard that a transfer is over: nobody needs to ask again.
    fn heard(&mut self, task: usize, failed: bool) {
        if let Some(over) = self.over.get_mut(task) {
            *over = true;
        }
        if failed {
            let of = |part: &&mut UnderWay| (part.next..part.end).contains(&task);
            if let Some(part) = self.under_way.iter_mut().find(of) {
                part.failed = true;
            }
        }
    }
}
