//! The part of `laxity.h` that says what the inference engine knows, from any thread and without a
//! lane.

use core::ffi::{c_char, c_int};

use super::{INVALID, guarded, text};
use crate::hints::{self, Facts, HintError};

/// `lax_request`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaxRequest {
    size: u32,
    priority: i32,
    deadline_ns: u64,
    bytes: u64,
    tenant: *const c_char,
}

/// `lax_hint_stats`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct LaxHintStats {
    size: u32,
    reserved: u32,
    hints: u64,
    requests: u64,
    batches: u64,
    requests_evicted: u64,
    batches_evicted: u64,
    requests_begun_twice: u64,
    requests_ended_twice: u64,
    requests_unknown: u64,
    batches_begun_twice: u64,
    batches_unknown: u64,
    layers_unknown: u64,
    layers_backwards: u64,
    deadlines_passed: u64,
}

const _: () = {
    assert!(size_of::<LaxRequest>() == 32);
    assert!(size_of::<LaxHintStats>() == 112);
};

fn answer(how: impl FnOnce() -> Result<(), HintError>) -> c_int {
    guarded(INVALID, || match how() {
        Ok(()) => 0,
        Err(HintError::NoId | HintError::NoLayers { .. }) => INVALID,
        Err(HintError::DeadlinePassed { .. }) => -libc::ETIME,
        Err(HintError::RequestEnded { .. }) => -libc::EALREADY,
        Err(HintError::UnknownLayer { .. }) => -libc::ERANGE,
    })
}

/// The number that stands for a text.
///
/// # Safety
/// `id` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_number(id: *const c_char) -> u64 {
    // SAFETY: upheld by the caller.
    unsafe { text(id) }.map_or(0, |id| hints::number_of(id.to_bytes()))
}

/// A request came in.
///
/// # Safety
/// `facts` is null or valid for the size it says, with null or a C string in it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_request_begin(request: u64, facts: *const LaxRequest) -> c_int {
    let facts = if facts.is_null() {
        Facts::default()
    } else {
        // SAFETY: upheld by the caller; the size is read before anything else is touched.
        let given = unsafe {
            if ((&raw const (*facts).size).read() as usize) < size_of::<LaxRequest>() {
                return INVALID;
            }
            *facts
        };
        // SAFETY: upheld by the caller.
        let tenant = unsafe { text(given.tenant) };
        Facts {
            deadline_ns: given.deadline_ns,
            bytes: given.bytes,
            priority: given.priority,
            tenant: tenant.map_or_else(Box::default, |tenant| tenant.to_string_lossy().into()),
        }
    };
    answer(|| hints::request_begin(request, facts))
}

/// A request has its first token, or was aborted.
#[unsafe(no_mangle)]
pub extern "C" fn lax_request_end(request: u64) -> c_int {
    answer(|| hints::request_end(request))
}

/// A batch was formed.
#[unsafe(no_mangle)]
pub extern "C" fn lax_batch_begin(batch: u64, layers: u16, layer_time_ns: u64) -> c_int {
    answer(|| hints::batch_begin(batch, layers, layer_time_ns))
}

/// A request is a member of a batch.
#[unsafe(no_mangle)]
pub extern "C" fn lax_batch_join(batch: u64, request: u64) -> c_int {
    answer(|| hints::batch_join(batch, request))
}

/// A batch waits behind another.
#[unsafe(no_mangle)]
pub extern "C" fn lax_batch_queued(batch: u64, ahead: u64) -> c_int {
    answer(|| hints::batch_queued(batch, ahead))
}

/// A batch now computes a layer.
#[unsafe(no_mangle)]
pub extern "C" fn lax_layer_begin(batch: u64, layer: u16) -> c_int {
    answer(|| hints::layer_begin(batch, layer))
}

/// A batch has computed its last layer.
#[unsafe(no_mangle)]
pub extern "C" fn lax_compute_end(batch: u64) -> c_int {
    answer(|| hints::compute_end(batch))
}

/// Nothing of a batch is left.
#[unsafe(no_mangle)]
pub extern "C" fn lax_batch_end(batch: u64) -> c_int {
    answer(|| hints::batch_end(batch))
}

/// What is known and what was counted of hints.
///
/// # Safety
/// `stats` is null or valid for the size it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_get_hint_stats(stats: *mut LaxHintStats) -> c_int {
    // SAFETY: upheld by the caller; the size is read before anything else is touched.
    let stats = unsafe {
        if stats.is_null()
            || ((&raw const (*stats).size).read() as usize) < size_of::<LaxHintStats>()
        {
            return INVALID;
        }
        &mut *stats
    };
    guarded(INVALID, || {
        let now = hints::stats();
        let counts = now.counts;
        *stats = LaxHintStats {
            size: stats.size,
            reserved: 0,
            hints: counts.hints,
            requests: now.requests as u64,
            batches: now.batches as u64,
            requests_evicted: counts.requests_evicted,
            batches_evicted: counts.batches_evicted,
            requests_begun_twice: counts.requests_begun_twice,
            requests_ended_twice: counts.requests_ended_twice,
            requests_unknown: counts.requests_unknown,
            batches_begun_twice: counts.batches_begun_twice,
            batches_unknown: counts.batches_unknown,
            layers_unknown: counts.layers_unknown,
            layers_backwards: counts.layers_backwards,
            deadlines_passed: counts.deadlines_passed,
        };
        0
    })
}
