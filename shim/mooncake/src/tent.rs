//! TENT, Mooncake's newer runtime, by its own C interface (`tent_*`).
//!
//! Its requests have a priority, 0 (high) to 2 (low). This library sets it if the engine's hints
//! name a stage and the program left the priority at 0. Requests have no deadline in C:
//! `deadline_ns` is only in the C++ `Request`. The layout of that struct, which begins with a
//! `std::optional<std::string>`, changed between releases under the same mangled name, so the field
//! can't be found from outside.
//!
//! # The request
//! Facts, by release of Mooncake (`struct tent_request` in `tent/transfer_engine.h`):
//! * 0.3.8 to 0.3.11: opcode, source, target, offset, length; 40 bytes.
//! * 0.3.11.post1: with `int priority` behind that; 48 bytes.
//! * since 0.3.12: `int transport_hint` behind that, where there was padding; 48 bytes.
//!
//! Requests come in arrays, so their size must be known. `tent_cancel_task` is newer than both
//! fields. A library that has it reads 48 bytes a request, whatever the program was compiled
//! against. With other libraries, requests stay unchanged.
//!
//! No transfer waits here. TENT chooses the transport of each piece, so a call doesn't show whether
//! its work requests wait under `liblaxity.so`.
//!
//! # Safety
//! Callers of each function here uphold the conditions of `tent/transfer_engine.h`.

#![allow(clippy::missing_safety_doc, missing_docs, reason = "said above, once for all functions")]

use core::ffi::{c_char, c_int, c_void};

use laxity_client::{Mode, Stage, hints};
use laxity_job::Job;
use laxity_job::symbol::Symbol;

use crate::abi::EnginePtr;
use crate::calls::REFUSED;
use crate::exports::{besides, own};
use crate::real::interpose;
use crate::report::COUNTERS;

/// A request, `struct tent_request`, since 0.3.11.post1.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TentRequest {
    opcode: c_int,
    source: *mut c_void,
    target_id: u64,
    target_offset: u64,
    length: u64,
    priority: c_int,
    transport_hint: c_int,
}

const _: () = {
    assert!(size_of::<TentRequest>() == 48);
    assert!(core::mem::offset_of!(TentRequest, length) == 32);
    assert!(core::mem::offset_of!(TentRequest, priority) == 40);
};

/// The priority that a program didn't set, which is also the highest.
const UNSET: c_int = 0;
const MEDIUM: c_int = 1;
const LOW: c_int = 2;

/// Reports whether the library reads a priority in requests.
fn has_priority() -> bool {
    static SINCE: Symbol = Symbol::anywhere(c"tent_cancel_task");
    SINCE.address().is_some()
}

/// Returns the priority of a stage, in the order of the levels: early stages, then P2D, then the
/// others.
fn priority(stage: Stage) -> c_int {
    match stage {
        Stage::Collective | Stage::KvReuse => UNSET,
        Stage::P2d => MEDIUM,
        _ => LOW,
    }
}

/// Returns the requests with their priorities set, or `None` if none changes.
fn filled(
    requests: &[TentRequest],
    stage_of: impl Fn(u64) -> Option<Stage>,
) -> Option<Vec<TentRequest>> {
    let wanted = |request: &TentRequest| match request.priority {
        UNSET => stage_of(request.source as u64).map_or(UNSET, priority),
        chosen => chosen,
    };
    let first = requests.iter().position(|request| wanted(request) != request.priority)?;
    let mut copy = requests.to_vec();
    for request in &mut copy[first..] {
        let wanted = wanted(request);
        COUNTERS.prioritized.add(u64::from(wanted != request.priority));
        request.priority = wanted;
    }
    Some(copy)
}

/// Returns the array to hand on instead of the program's, if it differs.
///
/// # Safety
/// `entries` is null or has `count` requests, as the library reads them.
unsafe fn prepare(entries: *mut TentRequest, count: usize) -> Option<Vec<TentRequest>> {
    if entries.is_null() || count == 0 || !has_priority() {
        return None;
    }
    let mut instead = None;
    besides(|| {
        if Job::of_this_process().mode == Mode::Off {
            return;
        }
        // SAFETY: upheld by the caller. The library's requests have this layout.
        let requests = unsafe { core::slice::from_raw_parts(entries, count) };
        own(requests.iter().map(|request| (request.source as u64, request.length)));
        instead = filled(requests, |address| hints::said_of(address).stage);
    });
    instead
}

interpose! {
    fn tent_submit(engine: EnginePtr, batch: u64, entries: *mut TentRequest, count: usize)
        -> c_int, REFUSED,
    |real| {
        // TENT reads the array during the call only.
        let mut instead = prepare(entries, count);
        let entries = instead.as_mut().map_or(entries, Vec::as_mut_ptr);
        real(engine, batch, entries, count)
    }

    fn tent_submit_notif(engine: EnginePtr, batch: u64, entries: *mut TentRequest, count: usize,
        name: *const c_char, message: *const c_char) -> c_int, REFUSED,
    |real| {
        // TENT reads the array during the call only.
        let mut instead = prepare(entries, count);
        let entries = instead.as_mut().map_or(entries, Vec::as_mut_ptr);
        real(engine, batch, entries, count, name, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(source: usize, priority: c_int) -> TentRequest {
        TentRequest {
            opcode: 1,
            source: source as *mut c_void,
            target_id: 2,
            target_offset: 3,
            length: 4,
            priority,
            transport_hint: 7,
        }
    }

    #[test]
    fn a_priority_is_filled_in_where_the_engine_says_the_stage_and_the_program_says_none() {
        let stage = |address| match address {
            1 => Some(Stage::Background),
            2 => Some(Stage::P2d),
            3 => Some(Stage::KvReuse),
            _ => None,
        };
        let given = [(4, 0), (1, 0), (2, 0), (3, 0), (3, LOW), (1, MEDIUM)];
        let requests = given.map(|(source, priority)| request(source, priority));
        let filled = filled(&requests, stage).expect("something to fill in");
        let priorities: Vec<_> = filled.iter().map(|request| request.priority).collect();
        assert_eq!(priorities, [0, LOW, MEDIUM, 0, LOW, MEDIUM]);
        assert!(filled.iter().all(|r| (r.opcode, r.target_id, r.transport_hint) == (1, 2, 7)));
    }

    #[test]
    fn an_array_with_nothing_to_fill_in_stays_the_programs_own() {
        assert!(filled(&[request(1, 0), request(2, 1)], |_| None).is_none());
        assert!(filled(&[request(1, 0)], |_| Some(Stage::KvReuse)).is_none());
    }
}
