//! The replacement of the provider's `ibv_poll_cq`.

use core::ffi::c_int;

use laxity_ibverbs::{ibv_cq, ibv_wc, ibv_wc_opcode, ibv_wc_status};

use crate::bundle::{self, agent, candidate};
use crate::contexts::{self, HookedContext, PollCq};
use crate::exports::within;
use crate::lanes;
use crate::table;

/// Replaces `context->ops.poll_cq`.
///
/// # Safety
/// The conditions of `ibv_poll_cq` hold.
pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: upheld by the caller.
    unsafe {
        let Some(context) = contexts::find((*cq).context) else { return -libc::EINVAL };
        let Some(real) = context.poll_cq() else { return -libc::EINVAL };
        if !context.is_ours() {
            return real(cq, entries, wc);
        }
        context.note_poll(cq);
        candidate::note_polled(cq);
        lanes::pump_all();
        if table::has_aliases() {
            return poll_bundled(context, real, cq, entries, wc);
        }
        let got = within(|| real(cq, entries, wc));
        // A bundle may have begun since, and another thread may have used it.
        if got > 0 && table::has_aliases() {
            return pass_bundled(context, cq, (wc, got), entries, Vec::new());
        }
        for index in 0..usize::try_from(got).unwrap_or(0) {
            account(context, cq, &mut *wc.add(index));
        }
        got
    }
}

/// Reports a completion to its queue pair.
#[inline]
fn account(context: &HookedContext, cq: *mut ibv_cq, wc: &mut ibv_wc) {
    // A failed completion has no opcode.
    let received = wc.status == ibv_wc_status::IBV_WC_SUCCESS && is_receive(wc.opcode);
    if !received
        && let Some(queue_pair) = context.queue_pairs.find(wc.qp_num)
        && let Some(status) = queue_pair.completed(cq, wc.wr_id, wc.status)
    {
        wc.status = status;
    }
}

/// Polls a queue in which siblings may complete. The program gets at most as many completions as
/// the provider returned, and those that were held back before.
///
/// # Safety
/// The conditions of `ibv_poll_cq` hold. `real` is the provider's function.
#[cold]
unsafe fn poll_bundled(
    context: &'static HookedContext,
    real: PollCq,
    cq: *mut ibv_cq,
    entries: c_int,
    wc: *mut ibv_wc,
) -> c_int {
    let mut out = Vec::new();
    if bundle::has_held() {
        let room = usize::try_from(entries).unwrap_or(0);
        for queue_pair in agent::watched() {
            queue_pair.release_held(cq, &mut out, room);
        }
    }
    // SAFETY: upheld by the caller. The array has room for `entries`.
    unsafe {
        let got = within(|| real(cq, entries - out.len() as c_int, wc));
        if got <= 0 && out.is_empty() {
            return got;
        }
        pass_bundled(context, cq, (wc, got), entries, out)
    }
}

/// Passes the completions on that the provider returned, behind those in `out`.
///
/// # Safety
/// The array has room for `entries`, and the provider wrote `got` of them.
unsafe fn pass_bundled(
    context: &'static HookedContext,
    cq: *mut ibv_cq,
    (wc, got): (*mut ibv_wc, c_int),
    entries: c_int,
    mut out: Vec<ibv_wc>,
) -> c_int {
    let room = usize::try_from(entries).unwrap_or(0);
    let got = usize::try_from(got).unwrap_or(0);
    for index in 0..got {
        // SAFETY: the provider wrote so many.
        let mut one = unsafe { *wc.add(index) };
        // The rest of what the provider returned needs its room.
        let limit = room - (got - index - 1);
        let queue_pair = context.queue_pairs.find(one.qp_num);
        if queue_pair.is_some_and(|it| it.complete_bundled(cq, &mut one, (&mut out, limit))) {
            continue;
        }
        if context.queue_pairs.pass_ended(&mut one) {
            account(context, cq, &mut one);
            out.push(one);
        }
    }
    for (index, one) in out.iter().enumerate() {
        // SAFETY: `out` has at most `entries`.
        unsafe { wc.add(index).write(*one) };
    }
    out.len() as c_int
}

pub(crate) const fn is_receive(opcode: ibv_wc_opcode::Type) -> bool {
    opcode & ibv_wc_opcode::IBV_WC_RECV != 0
}
