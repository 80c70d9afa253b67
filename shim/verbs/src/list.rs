//! Lists of work requests, and posting them to the provider.

use core::ffi::c_int;
use core::ptr;

use laxity_ibverbs::{ibv_qp, ibv_send_wr};

use crate::contexts::PostSend;
use crate::exports::within;
use crate::report::COUNTERS;
use crate::work;

/// The result of a post. An error has the return value and the first work request not taken.
pub(crate) type PostResult = Result<(), (c_int, *mut ibv_send_wr)>;

/// Reports whether an error of a provider means that its queue is full. Some providers negate it.
pub(crate) const fn is_full(error: c_int) -> bool {
    error == libc::ENOMEM || error == -libc::ENOMEM
}

/// Calls the provider's function. Some providers change a queue pair in it, and hold its lock.
///
/// # Safety
/// The conditions of `ibv_post_send` hold.
#[inline]
pub(crate) unsafe fn call(real: PostSend, ibv: *mut ibv_qp, list: *mut ibv_send_wr) -> PostResult {
    let mut bad = ptr::null_mut();
    // SAFETY: upheld by the caller.
    match within(|| unsafe { real(ibv, list, &mut bad) }) {
        0 => Ok(()),
        error => Err((error, bad)),
    }
}

/// Calls the provider with the first `count` work requests of a list. The list stays unchanged,
/// because other threads of the program may read it.
///
/// # Safety
/// The conditions of `ibv_post_send` hold. The list has more than `count` work requests.
pub(crate) unsafe fn call_prefix(
    real: PostSend,
    ibv: *mut ibv_qp,
    list: *mut ibv_send_wr,
    count: usize,
) -> PostResult {
    if count == 0 {
        return Ok(());
    }
    let mut at = list;
    let mut copies = Vec::with_capacity(count);
    for _ in 0..count {
        // SAFETY: upheld by the caller. Plain data, and the list is long enough.
        let copy = unsafe { ptr::read(at) };
        at = copy.next;
        copies.push(copy);
    }
    for index in (0..count - 1).rev() {
        copies[index].next = &raw mut copies[index + 1];
    }
    copies[count - 1].next = ptr::null_mut();
    // SAFETY: upheld by the caller.
    let result = unsafe { call(real, ibv, copies.as_mut_ptr()) };
    result.map_err(|(error, bad)| {
        // SAFETY: `bad` is one of the copies. The list is at least as long.
        unsafe {
            let mut at = list;
            for _ in 0..position(copies.as_mut_ptr(), bad) {
                at = (*at).next;
            }
            (error, at)
        }
    })
}

/// Posts a list unscheduled.
///
/// # Safety
/// The conditions of `ibv_post_send` hold.
pub(crate) unsafe fn pass(real: PostSend, ibv: *mut ibv_qp, list: *mut ibv_send_wr) -> PostResult {
    // SAFETY: upheld by the caller.
    let result = unsafe { call(real, ibv, list) };
    let end = result.err().map_or(ptr::null_mut(), |(_, bad)| bad);
    let (mut count, mut bytes) = (0, 0);
    let mut at = list;
    // SAFETY: upheld by the caller. The list ends.
    while let Some(wr) = unsafe { at.as_ref() } {
        if ptr::eq(wr, end) {
            break;
        }
        count += 1;
        // SAFETY: upheld by the caller.
        bytes += work::length(unsafe { work::sges(wr) });
        at = wr.next;
    }
    COUNTERS.passed_work_requests.add(count);
    COUNTERS.passed_bytes.add(bytes);
    result
}

/// Returns the number of work requests before `bad` in a list.
///
/// # Safety
/// The list ends.
pub(crate) unsafe fn position(list: *mut ibv_send_wr, bad: *mut ibv_send_wr) -> usize {
    let mut at = list;
    let mut count = 0;
    while !at.is_null() && at != bad {
        // SAFETY: upheld by the caller.
        at = unsafe { (*at).next };
        count += 1;
    }
    count
}
