//! TENT, Mooncake's newer runtime, by its own C interface (`tent_*`).
//!
//! Its requests have a priority, 0 (high) to 2 (low), which this library fills in where the
//! engine's hints say what a transfer is for and the program left it at 0. They have no deadline:
//! `deadline_ns` is in the C++ `Request` only, whose layout (it has a `std::optional<std::string>`
//! in front) changed from release to release under one and the same mangled name, so nobody can
//! know from outside where it is.
//!
//! # The request
//! Facts, by release of Mooncake (`struct tent_request` in `tent/transfer_engine.h`):
//! * 0.3.8 to 0.3.11: opcode, source, target, offset, length; 40 bytes.
//! * 0.3.11.post1: with `int priority` behind that; 48 bytes.
//! * since 0.3.12: `int transport_hint` behind that, where there was padding; 48 bytes.
//!
//! Requests come in arrays, so their size has to be known. `tent_cancel_task` came after both
//! fields: where the library has it, it reads 48 bytes a request, whatever the program was compiled
//! against. Elsewhere nothing is touched.
//!
//! Nothing waits here: TENT chooses the transport of each piece itself, so whether its work
//! requests wait under `liblaxity.so` can't be seen from a call.
//!
//! # Safety
//! Callers of each function here uphold what `tent/transfer_engine.h` asks of them.

#![allow(
    clippy::missing_safety_doc,
    missing_docs,
    reason = "said above, once for all functions"
)]

use core::ffi::{c_char, c_int, c_void};

use laxity_client::{Mode, Stage, hints};
use laxity_job::Job;
use laxity_job::symbol::Symbol;

use crate::abi::Handle;
use crate::calls::REFUSED;
use crate::exports::{besides, own};
use crate::real::real;
use crate::report::COUNTERS;

/// `struct tent_request`, since 0.3.11.post1.
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

/// What it is if nobody sets it; also the highest.
const UNSET: c_int = 0;
const MEDIUM: c_int = 1;
const LOW: c_int = 2;

/// What the library reads.
fn has_priority() -> bool {
    static SINCE: Symbol = Symbol::anywhere(c"tent_cancel_task");
    SINCE.address().is_some()
}

/// As the levels are: early stages before the last one, both before what nobody waits for.
fn priority(stage: Stage) -> c_int {
    match stage {
        Stage::Collective | Stage::KvReuse => UNSET,
        Stage::P2d => MEDIUM,
        _ => LOW,
    }
}

/// The same requests with their priorities filled in; `None` if there is nothing to fill in.
fn filled(
    requests: &[TentRequest],
    stage_of: impl Fn(u64) -> Option<Stage>,
) -> Option<Vec<TentRequest>> {
    let wanted = |request: &TentRequest| match request.priority {
        UNSET => stage_of(request.source as u64).map_or(UNSET, priority),
        chosen => chosen,
    };
    let first = requests
        .iter()
        .position(|request| wanted(request) != request.priority)?;
    let mut copy = requests.to_vec();
    for request in &mut copy[first..] {
        let wanted = wanted(request);
        COUNTERS
            .prioritized
            .add(u64::from(wanted != request.priority));
        request.priority = wanted;
    }
    Some(copy)
}

/// What to hand on instead of the program's array, if anything.
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
        // SAFETY: upheld by the caller, and the library's requests have this layout.
        let requests = unsafe { core::slice::from_raw_parts(entries, count) };
        own(requests
            .iter()
            .map(|request| (request.source as u64, request.length)));
        instead = filled(requests, |address| hints::said_of(address).stage);
    });
    instead
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn tent_submit(
    engine: Handle,
    batch: u64,
    entries: *mut TentRequest,
    count: usize,
) -> c_int {
    let real = real!(
        c"tent_submit",
        fn(Handle, u64, *mut TentRequest, usize) -> c_int
    );
    let Some(real) = real else { return REFUSED };
    // SAFETY: upheld by the caller. TENT reads the array during the call only.
    unsafe {
        let mut instead = prepare(entries, count);
        let entries = instead.as_mut().map_or(entries, Vec::as_mut_ptr);
        real(engine, batch, entries, count)
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn tent_submit_notif(
    engine: Handle,
    batch: u64,
    entries: *mut TentRequest,
    count: usize,
    name: *const c_char,
    message: *const c_char,
) -> c_int {
    let real = real!(
        c"tent_submit_notif",
        fn(Handle, u64, *mut TentRequest, usize, *const c_char, *const c_char) -> c_int
    );
    let Some(real) = real else { return REFUSED };
    // SAFETY: as for `tent_submit`.
    unsafe {
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
        assert!(
            filled
                .iter()
                .all(|r| (r.opcode, r.target_id, r.transport_hint) == (1, 2, 7))
        );
    }

    #[test]
    fn an_array_with_nothing_to_fill_in_stays_the_programs_own() {
        assert!(filled(&[request(1, 0), request(2, 1)], |_| None).is_none());
        assert!(filled(&[request(1, 0)], |_| Some(Stage::KvReuse)).is_none());
    }
}
