//! The part of `laxity.h` for an engine's hints, in a lane or from any thread.

use core::ffi::{c_char, c_int};

use super::{INVALID, guarded, on_lane, sized, text};
use crate::hints::{self, Facts, HintCounts, HintError};
use crate::{Hint, Lane};

/// Facts about a request, `lax_request`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaxRequest {
    size: u32,
    priority: i32,
    deadline_ns: u64,
    bytes: u64,
    tenant: *const c_char,
}

/// Counters of hints, `lax_hint_stats`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct LaxHintStats {
    size: u32,
    reserved: u32,
    hints: u64,
    requests: u64,
    batches: u64,
    counts: HintCounts,
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

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_number(id: *const c_char) -> u64 {
    // SAFETY: upheld by the caller.
    unsafe { text(id) }.map_or(0, |id| hints::number_of(id.to_bytes()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_request_begin(request: u64, facts: *const LaxRequest) -> c_int {
    let facts = if facts.is_null() {
        Facts::default()
    } else {
        // SAFETY: upheld by the caller.
        let Some(given) = (unsafe { sized(facts.cast_mut()).map(|facts| *facts) }) else {
            return INVALID;
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

/// Tells the trace of a request. An invalid header is ignored, as the W3C demands.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_request_trace(request: u64, traceparent: *const c_char) -> c_int {
    // SAFETY: upheld by the caller.
    let header = unsafe { text(traceparent) }.and_then(|header| header.to_str().ok());
    let hint = header.and_then(|header| Hint::of_traceparent(request, header));
    hint.map_or(0, |hint| answer(|| hints::tell(hint)))
}

/// Defines the functions for each hint: the first for a lane, the second for the process.
macro_rules! hints {
    ($($in_lane:ident, $of_process:ident => $hint:ident { $($field:ident: $type:ty),* };)*) => {$(
        /// Sends a hint to the daemon in a lane, see [`Hint`].
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $in_lane(lane: *mut Lane, $($field: $type),*) -> c_int {
            // SAFETY: upheld by the caller.
            unsafe { tell_in(lane, Hint::$hint { $($field),* }) }
        }

        /// Sends a hint to the daemon, see [`Hint`].
        #[unsafe(no_mangle)]
        pub extern "C" fn $of_process($($field: $type),*) -> c_int {
            answer(|| hints::tell(Hint::$hint { $($field),* }))
        }
    )*};
}

hints! {
    lax_hint_batch_begin, lax_batch_begin
        => BatchBegin { batch: u64, layers: u16, layer_time_ns: u64 };
    lax_hint_request_end, lax_request_end => RequestEnd { request: u64 };
    lax_hint_batch_queued, lax_batch_queued => BatchQueued { batch: u64, ahead: u64 };
    lax_hint_layer_begin, lax_layer_begin => LayerBegin { batch: u64, layer: u16 };
    lax_hint_compute_end, lax_compute_end => ComputeEnd { batch: u64 };
    lax_hint_batch_end, lax_batch_end => BatchEnd { batch: u64 };
}

unsafe fn tell_in(lane: *mut Lane, hint: Hint) -> c_int {
    // SAFETY: upheld by the caller.
    unsafe {
        on_lane(lane, |lane| {
            lane.hint(hint);
            0
        })
    }
}

fn join(batch: u64, request: u64, deadline_ns: u64, bytes: u64) -> Hint {
    Hint::RequestJoin { batch, request, deadline_ns, bytes }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_hint_request_join(
    lane: *mut Lane,
    batch: u64,
    request: u64,
    deadline_ns: u64,
    bytes: u64,
) -> c_int {
    // SAFETY: upheld by the caller.
    unsafe { tell_in(lane, join(batch, request, deadline_ns, bytes)) }
}

#[unsafe(no_mangle)]
pub extern "C" fn lax_batch_join(batch: u64, request: u64) -> c_int {
    answer(|| hints::tell(join(batch, request, 0, 0)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_get_hint_stats(stats: *mut LaxHintStats) -> c_int {
    // SAFETY: upheld by the caller.
    let Some(stats) = (unsafe { sized(stats).map(|stats| &mut *stats) }) else { return INVALID };
    guarded(INVALID, || {
        let now = hints::stats();
        *stats = LaxHintStats {
            size: stats.size,
            reserved: 0,
            hints: now.hints,
            requests: now.requests as u64,
            batches: now.batches as u64,
            counts: now.counts,
        };
        0
    })
}
