//! A call that submits transfers, and its split into those that go at once and those that wait.

use core::ffi::c_int;
use core::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{BatchState, Notification, TransferBatch, WAITING, WAITING_MAX};
use crate::abi::NotifyMsg;
use crate::calls::{Call, hand_on};
use crate::hub::Hub;
use crate::report::COUNTERS;
use crate::runs::{self, Run, TOGETHER_BYTES};

/// Longest wait of a call for an immediate permit. A daemon that is awake answers sooner, and a
/// program doesn't notice a wait of this length.
const ANSWER: Duration = Duration::from_micros(500);
impl TransferBatch {
    /// Implements `submitTransfer` and `submitTransferWithNotify`.
    pub(crate) unsafe fn submit(
        &self,
        state: &mut BatchState,
        hub: &'static Hub,
        call: &Call,
    ) -> c_int {
        if let Some(code) = state.refusal {
            return code;
        }
        // SAFETY: upheld by the caller for the duration of this call.
        let requests = unsafe { call.requests() };
        let together = if call.notify.is_some() { u64::MAX } else { TOGETHER_BYTES };
        let said_of = laxity_client::hints::said_of;
        // Mooncake itself handles an invalid notification.
        let is_odd = |notify: NotifyMsg| notify.name.is_null() || notify.msg.is_null();
        let whole = state.passes
            || state.gone
            || call.notify.is_some_and(is_odd)
            || call.notify.is_some() && state.submitted > 0
            || state.submitted.saturating_add(call.count) > self.capacity
            || call.count > WAITING_MAX.saturating_sub(WAITING.load(Ordering::Relaxed));
        let split = if whole { None } else { runs::split(requests, together, said_of) };
        state.passes |= call.notify.is_some();
        let Some(mut runs) = split else {
            // SAFETY: upheld by the caller.
            return unsafe { self.pass(state, call) };
        };
        if call.notify.is_some() {
            // A call with a notification is never split, whatever the hints are.
            let bytes = sum(runs.iter().map(|run| run.bytes));
            runs.truncate(1);
            runs[0].bytes = bytes;
            runs[0].count = call.count;
        }
        // SAFETY: upheld by the caller.
        unsafe { self.gate(state, hub, call, &runs) }
    }

    unsafe fn gate(
        &self,
        state: &mut BatchState,
        hub: &'static Hub,
        call: &Call,
        runs: &[Run],
    ) -> c_int {
        let end = Instant::now() + ANSWER;
        let mut at = 0;
        let mut asked = None;
        let mut rest = runs.iter();
        let mut unasked = sum(runs.iter().map(|run| run.bytes));
        if state.waiting.is_empty() {
            for run in rest.by_ref() {
                let transfer = hub.ask(self.engine(), run);
                unasked = unasked.saturating_sub(run.bytes);
                let left = end.saturating_duration_since(Instant::now());
                let Some(bypassed) = transfer.wait_whole(left) else {
                    asked = Some((run, transfer));
                    break;
                };
                // Without a scheduler, the rest is handed on unchanged.
                let count = if bypassed { call.count - at } else { run.count };
                // SAFETY: upheld by the caller. The entries are a part of its array.
                let code = unsafe {
                    let entries = call.entries.add(at);
                    hand_on(self.engine(), self.id, entries, count, call.notify)
                };
                if code != 0 {
                    transfer.cancel();
                    return self.refused(state, code, at, call.count);
                }
                at += count;
                if bypassed {
                    transfer.cancel();
                    state.handed_unseen(count, unasked);
                    break;
                }
                state.handed_on(transfer, count);
            }
        }
        state.submitted += call.count;
        if at < call.count {
            // SAFETY: upheld by the caller.
            let requests = unsafe { &call.requests()[at..] };
            state.wait(requests, asked, rest);
            state.notification = call
                .notify
                // SAFETY: upheld by the caller. `submit` checked that the pointers are not null.
                .map(|notify| unsafe { Notification::copy(notify) });
        }
        0
    }

    /// Handles Mooncake's refusal of a part of a call, of which Mooncake has `at` transfers. If it
    /// is the first part, the program gets the error. Otherwise the transfers of that part fail
    /// later, since those before them go on and the program has to wait for them.
    fn refused(&self, state: &mut BatchState, code: c_int, at: usize, count: usize) -> c_int {
        state.passes = true;
        if at == 0 {
            return code;
        }
        COUNTERS.failed_late.add((count - at) as u64);
        state.refusal = Some(code);
        state.submitted += count;
        0
    }

    /// Hands a call on unchanged, after all waiting transfers.
    unsafe fn pass(&self, state: &mut BatchState, call: &Call) -> c_int {
        self.flush(state);
        if let Some(code) = state.refusal {
            return code;
        }
        // SAFETY: upheld by the caller.
        let code =
            unsafe { hand_on(self.engine(), self.id, call.entries, call.count, call.notify) };
        if code == 0 {
            COUNTERS.passed.add(call.count as u64);
            state.submitted += call.count;
            // SAFETY: upheld by the caller.
            let requests = unsafe { call.requests() };
            state.handed_unseen(call.count, sum(requests.iter().map(|request| request.length)));
        } else {
            // Mooncake may have taken a part of the call, and their number is unknown.
            state.passes = true;
        }
        code
    }
}

/// Adds lengths that a program wrote, whose sum may be too large.
fn sum(lengths: impl Iterator<Item = u64>) -> u64 {
    lengths.fold(0, u64::saturating_add)
}
