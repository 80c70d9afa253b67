//! One batch of a gated engine: the transfers that Mooncake has, and those that wait.
//!
//! A program asks for a transfer's status by its index in the batch. Transfers are therefore handed
//! to Mooncake in the order in which they were submitted, whole, and once each. Those that Mooncake
//! has are a prefix of the submitted ones, with the same numbers. This library answers for the
//! others: they wait.
//!
//! # What is handed on unchanged
//! * A call that is permitted at once, or without a daemon, is handed on as it came, in one call.
//! * A call with a notification is never split, because Mooncake sends it when everything that the
//!   batch *has by then* is complete. For the same reason, no other transfer of its batch waits.
//! * A call that exceeds the batch's size, since Mooncake refuses it.
//!
//! # What Mooncake refuses late
//! A transfer that was accepted here and that Mooncake refuses later fails when the program asks
//! for its status. All transfers behind it in its batch fail, too, and none of them is tried.
//!
//! # Locks
//! A batch is locked while Mooncake is called for it, so that no thread asks for a batch that
//! another one frees. The worker's list and then the client's lanes may be locked under it.
//!
//! # Safety
//! Unless a function says otherwise, its callers uphold the conditions of the function of
//! `transfer_engine_c.h` that the program called.

mod submit;

use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::collections::VecDeque;
use std::time::Duration;

use laxity_client::hints::Transfer;
use parking_lot::Mutex;

use crate::abi::{EnginePtr, TransferRequest, TransferStatus, status};
use crate::calls::{Notification, ask_after, hand_on};
use crate::hub::Hub;
use crate::report::{COUNTERS, UNASKED_BYTES};
use crate::runs::Run;

/// Largest number of requests that wait in a process, 40 bytes each. Calls beyond that go
/// unscheduled.
const WAITING_MAX: usize = 1 << 18;
/// Number of requests that wait. Relaxed: calls of several threads at once may exceed the limit.
static WAITING: AtomicUsize = AtomicUsize::new(0);
/// Resets the number in a forked child, which has none of its parent's batches.
pub(crate) fn forget_waiting() {
    WAITING.store(0, Ordering::Relaxed);
}

/// A batch that the program allocated and has not freed.
#[derive(Debug)]
pub(crate) struct TransferBatch {
    pub(crate) engine: usize,
    pub(crate) id: u64,
    capacity: usize,
    pub(crate) state: Mutex<BatchState>,
}

#[derive(Debug, Default)]
pub(crate) struct BatchState {
    submitted: usize,
    /// Number of submitted transfers that Mooncake has. They are the first ones.
    handed: usize,
    waiting: VecDeque<TransferGroup>,
    /// The notification of the waiting transfers, which are then one group.
    notification: Option<Notification>,
    under_way: Vec<UnderWay>,
    /// Whether each transfer that Mooncake has is known to be over.
    over: Vec<bool>,
    /// The error of a late refusal. The transfers that Mooncake doesn't have failed.
    refusal: Option<c_int>,
    /// Whether the batch has a notification or an error, so that no further transfer of it waits.
    passes: bool,
    /// Whether the batch is freed or its engine is gone, and Mooncake must not be called for it.
    gone: bool,
    /// Whether the batch is in the worker's list.
    pub(crate) listed: bool,
}

/// Transfers that wait together.
#[derive(Debug)]
struct TransferGroup {
    requests: Vec<TransferRequest>,
    run: Run,
    /// The flow of the group. Only the first group submits one, as the others can't go before it.
    transfer: Option<Transfer>,
}

/// Transfers that Mooncake has, and that are not known to be over.
#[derive(Debug)]
struct UnderWay {
    transfer: Transfer,
    /// Index of the first transfer that is not known to be over.
    next: usize,
    end: usize,
    failed: bool,
}

fn is_over(answer: &TransferStatus) -> bool {
    !matches!(answer.status, status::WAITING | status::PENDING)
}

impl TransferBatch {
    pub(crate) fn new(engine: EnginePtr, id: u64, capacity: usize) -> Self {
        Self { engine: engine as usize, id, capacity, state: Mutex::default() }
    }

    fn engine(&self) -> EnginePtr {
        self.engine as *mut c_void
    }

    /// Hands on all permitted groups. Reports whether there were any.
    pub(crate) fn advance(&self, state: &mut BatchState, hub: &'static Hub) -> bool {
        let mut moved = false;
        while !state.gone
            && let Some(group) = state.waiting.front_mut()
        {
            let run = group.run;
            let transfer = group.transfer.get_or_insert_with(|| hub.ask(self.engine(), &run));
            match transfer.wait_whole(Duration::ZERO) {
                None => break,
                // No daemon schedules any more.
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

    /// Hands on all waiting groups, unscheduled.
    pub(crate) fn flush(&self, state: &mut BatchState) {
        while !state.gone && !state.waiting.is_empty() {
            self.hand_on_first(state);
        }
    }

    fn hand_on_first(&self, state: &mut BatchState) {
        let Some(mut group) = state.waiting.pop_front() else { return };
        let count = group.requests.len();
        WAITING.fetch_sub(count, Ordering::Relaxed);
        // A notification belongs to the only group and is never split.
        let notify = state.notification.take();
        // SAFETY: the requests are copies of the program's, which keeps their memory until they are
        // over. The batch is not freed, since that takes the lock that the caller holds. Mooncake
        // reads the array only during the call.
        let code = unsafe {
            let notify = notify.as_ref().map(Notification::message);
            hand_on(self.engine(), self.id, group.requests.as_mut_ptr(), count, notify)
        };
        if code == 0 {
            match group.transfer.take_if(|transfer| transfer.is_done()) {
                Some(transfer) => state.handed_on(transfer, count),
                None => {
                    let permitted = group.transfer.as_ref().map_or(0, Transfer::permitted);
                    state.handed_unseen(count, group.run.bytes.saturating_sub(permitted));
                }
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
        COUNTERS.failed_late.add((state.submitted - state.handed) as u64);
        static IS_SAID: AtomicBool = AtomicBool::new(false);
        if !IS_SAID.swap(true, Ordering::Relaxed) {
            eprintln!(
                "laxity: Mooncake refused a transfer ({code}) that had to wait for its turn; \
                 getTransferStatus says that it failed, and those behind it in its batch"
            );
        }
    }

    /// Asks Mooncake for the status of its transfers and reports completions to the daemon. Reports
    /// whether any transfer was over.
    pub(crate) fn settle(&self, state: &mut BatchState) -> bool {
        if state.gone {
            return false;
        }
        let BatchState { under_way, over, .. } = state;
        let mut happened = false;
        under_way.retain_mut(|part| {
            while part.next < part.end {
                if !over[part.next] {
                    let mut answer =
                        TransferStatus { status: status::WAITING, transferred_bytes: 0 };
                    let code =
                        // SAFETY: Mooncake has the transfer, and nobody frees the batch meanwhile.
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

    /// Answers `getTransferStatus`.
    pub(crate) unsafe fn status(
        &self,
        state: &mut BatchState,
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
            // SAFETY: `answer` is not null, and Mooncake wrote it.
            if code == 0 && !answer.is_null() && is_over(unsafe { &*answer }) {
                // SAFETY: `answer` is not null, and Mooncake wrote it.
                let failed = unsafe { (*answer).status } != status::COMPLETED;
                state.heard(task, failed);
            }
            return code;
        }
        let waits = state.refusal.is_none();
        // SAFETY: upheld by the caller, since `answer` is not null.
        unsafe {
            answer.write(TransferStatus {
                status: if waits { status::WAITING } else { status::FAILED },
                transferred_bytes: 0,
            });
        }
        0
    }

    /// Implements `freeBatchID` with Mooncake's `real`, which decides whether it is freed.
    pub(crate) fn free(&self, state: &mut BatchState, real: impl FnOnce() -> c_int) -> c_int {
        // Mooncake has to report a busy batch itself, and can't do so for transfers that it doesn't
        // have.
        self.flush(state);
        let code = real();
        if code == 0 {
            self.end_transfers(state);
        }
        code
    }

    /// Ends the flows of a batch that Mooncake found complete, or whose engine is destroyed.
    pub(crate) fn end_transfers(&self, state: &mut BatchState) {
        state.gone = true;
        for part in &mut state.under_way {
            end(part);
        }
        state.under_way.clear();
        state.over = Vec::new();
    }
}

/// Reports to the daemon that no bytes of these transfers are in flight.
fn end(part: &UnderWay) {
    if part.failed {
        part.transfer.cancel();
    } else {
        // The permitted bytes are those that were handed on, so the number can't be too large.
        let _ = part.transfer.complete(part.transfer.permitted());
    }
}

impl BatchState {
    /// Reports whether no transfer waits or is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.gone || self.waiting.is_empty() && self.under_way.is_empty()
    }

    /// Reports whether a transfer waits for its permit.
    pub(crate) fn waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Reports whether a transfer is in flight.
    pub(crate) fn moves(&self) -> bool {
        !self.under_way.is_empty()
    }

    fn handed_on(&mut self, transfer: Transfer, count: usize) {
        let next = self.handed;
        self.handed += count;
        self.over.resize(self.handed, false);
        self.under_way.push(UnderWay { transfer, next, end: self.handed, failed: false });
    }

    /// Counts transfers that were handed on unscheduled. Their end is not reported to the daemon.
    /// `unasked` is the number of their bytes that no flow of the client has counted.
    fn handed_unseen(&mut self, count: usize, unasked: u64) {
        UNASKED_BYTES.fetch_add(unasked, Ordering::Relaxed);
        self.handed += count;
        self.over.resize(self.handed, true);
    }

    /// Copies the transfers that have to wait. `requests` holds those of `asked` first, and then
    /// those of `runs`.
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
            self.waiting.push_back(TransferGroup {
                requests: these.to_vec(),
                run,
                transfer: transfer.take(),
            });
        }
    }

    /// Records that the program was told that a transfer is over, so the worker need not ask.
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
