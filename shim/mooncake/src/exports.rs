//! The functions of `transfer_engine_c.h` that this library interposes. Each calls Mooncake's own
//! with the program's arguments and returns its result. No failure here prevents that.
//!
//! # Safety
//! Callers of each function here uphold the conditions of `transfer_engine_c.h`.

#![allow(clippy::missing_safety_doc, missing_docs, reason = "said above, once for all functions")]

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicBool, Ordering};
use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};

use laxity_client::{hints, peers};

use crate::abi::{
    BufferEntry, EnginePtr, INVALID_BATCH, NotifyMsg, TransferRequest, TransferStatus,
};
use crate::calls::{Call, REFUSED, ask_after, hand_on};
use crate::engines::{EngineEnv, Handling};
use crate::hub::{self, Hub};
use crate::real::real;
use crate::report::COUNTERS;

/// Runs this library's part of a call. A panic in it must not reach C.
pub(crate) fn besides(body: impl FnOnce()) {
    guarded((), body);
}

/// Returns the result of `body`, or `otherwise` if it panics.
fn guarded<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(otherwise)
}

/// # Safety
/// `text` is null or a C string.
unsafe fn text<'a>(text: *const c_char) -> Option<&'a str> {
    // SAFETY: upheld by the caller, since the pointer is not null.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_str().ok())?
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn createTransferEngine(
    metadata: *const c_char,
    local: *const c_char,
    host: *const c_char,
    port: u64,
    auto_discover: c_int,
) -> EnginePtr {
    let real = real!(
        c"createTransferEngine",
        fn(*const c_char, *const c_char, *const c_char, u64, c_int) -> EnginePtr
    );
    let Some(real) = real else {
        return core::ptr::null_mut();
    };
    // SAFETY: upheld by the caller.
    let engine = unsafe { real(metadata, local, host, port, auto_discover) };
    if !engine.is_null() {
        besides(|| {
            let around = EngineEnv::here();
            let mut engines = hub::make().engines.write();
            engines.made(engine, auto_discover != 0, &around);
        });
    }
    engine
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn destroyTransferEngine(engine: EnginePtr) {
    besides(|| {
        if let Some(hub) = hub::known() {
            hub.leave_engine(engine);
        }
    });
    if let Some(real) = real!(c"destroyTransferEngine", fn(EnginePtr)) {
        // SAFETY: upheld by the caller.
        unsafe { real(engine) };
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn installTransport(
    engine: EnginePtr,
    protocol: *const c_char,
    args: *mut *mut c_void,
) -> EnginePtr {
    let real =
        real!(c"installTransport", fn(EnginePtr, *const c_char, *mut *mut c_void) -> EnginePtr);
    let Some(real) = real else {
        return core::ptr::null_mut();
    };
    // SAFETY: upheld by the caller.
    let transport = unsafe { real(engine, protocol, args) };
    if !transport.is_null() {
        besides(|| {
            // SAFETY: upheld by the caller.
            if let (Some(hub), Some(protocol)) = (hub::known(), unsafe { text(protocol) }) {
                hub.engines.write().installed(engine, protocol);
            }
        });
    }
    transport
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn uninstallTransport(engine: EnginePtr, protocol: *const c_char) -> c_int {
    let Some(real) = real!(c"uninstallTransport", fn(EnginePtr, *const c_char) -> c_int) else {
        return REFUSED;
    };
    // SAFETY: upheld by the caller.
    let code = unsafe { real(engine, protocol) };
    if code == 0 {
        besides(|| {
            // SAFETY: upheld by the caller.
            if let (Some(hub), Some(protocol)) = (hub::known(), unsafe { text(protocol) }) {
                hub.engines.write().uninstalled(engine, protocol);
            }
        });
    }
    code
}

/// Returns the number of the peer whose segment has this name, `HOST:PORT`. Returns 0, unknown, for
/// a name without an address. Names are not looked up, which could take long.
fn peer_of(segment: &str) -> u8 {
    let host = segment.rsplit_once(':').map_or(segment, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    match host.parse() {
        Ok(IpAddr::V4(v4)) => peers::number(v4.to_ipv6_mapped().octets()),
        Ok(IpAddr::V6(v6)) => peers::number(v6.octets()),
        Err(_) => 0,
    }
}

/// Opens a segment by a function of Mooncake's.
///
/// # Safety
/// `engine` is one of Mooncake's, and `name` is null or a C string.
unsafe fn open_by(real: Option<OpenSegment>, engine: EnginePtr, name: *const c_char) -> i32 {
    let Some(real) = real else {
        return REFUSED;
    };
    // SAFETY: upheld by the caller.
    let segment = unsafe { real(engine, name) };
    if segment >= 0 {
        besides(|| {
            // SAFETY: upheld by the caller.
            if let (Some(hub), Some(name)) = (hub::known(), unsafe { text(name) }) {
                hub.engines.write().opened(engine, segment, peer_of(name));
            }
        });
    }
    segment
}

type OpenSegment = unsafe extern "C" fn(EnginePtr, *const c_char) -> i32;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn openSegment(engine: EnginePtr, name: *const c_char) -> i32 {
    let real = real!(c"openSegment", fn(EnginePtr, *const c_char) -> i32);
    // SAFETY: upheld by the caller.
    unsafe { open_by(real, engine, name) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn openSegmentNoCache(engine: EnginePtr, name: *const c_char) -> i32 {
    let real = real!(c"openSegmentNoCache", fn(EnginePtr, *const c_char) -> i32);
    // SAFETY: upheld by the caller.
    unsafe { open_by(real, engine, name) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn registerLocalMemory(
    engine: EnginePtr,
    address: *mut c_void,
    length: usize,
    location: *const c_char,
    remote_accessible: c_int,
) -> c_int {
    let real = real!(
        c"registerLocalMemory",
        fn(EnginePtr, *mut c_void, usize, *const c_char, c_int) -> c_int
    );
    let Some(real) = real else { return REFUSED };
    // SAFETY: upheld by the caller.
    let code = unsafe { real(engine, address, length, location, remote_accessible) };
    if code == 0 {
        besides(|| registered(engine, &[(address, length)]));
    }
    code
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn registerLocalMemoryBatch(
    engine: EnginePtr,
    buffers: *mut BufferEntry,
    count: usize,
    location: *const c_char,
) -> c_int {
    let real = real!(
        c"registerLocalMemoryBatch",
        fn(EnginePtr, *mut BufferEntry, usize, *const c_char) -> c_int
    );
    let Some(real) = real else { return REFUSED };
    // SAFETY: upheld by the caller.
    let code = unsafe { real(engine, buffers, count, location) };
    if code == 0 && !buffers.is_null() {
        besides(|| {
            // SAFETY: upheld by the caller. Mooncake has just read all of them.
            let buffers = unsafe { core::slice::from_raw_parts(buffers, count) };
            let known: Vec<_> = buffers.iter().map(|b| (b.addr, b.length)).collect();
            registered(engine, &known);
        });
    }
    code
}

fn registered(engine: EnginePtr, buffers: &[(*mut c_void, usize)]) {
    if let Some(hub) = hub::known() {
        let mut engines = hub.engines.write();
        for (address, length) in buffers {
            engines.registered(engine, *address, *length);
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unregisterLocalMemory(engine: EnginePtr, address: *mut c_void) -> c_int {
    let Some(real) = real!(c"unregisterLocalMemory", fn(EnginePtr, *mut c_void) -> c_int) else {
        return REFUSED;
    };
    besides(|| disown(engine, &[address]));
    // SAFETY: upheld by the caller.
    unsafe { real(engine, address) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unregisterLocalMemoryBatch(
    engine: EnginePtr,
    addresses: *mut *mut c_void,
    count: usize,
) -> c_int {
    let real =
        real!(c"unregisterLocalMemoryBatch", fn(EnginePtr, *mut *mut c_void, usize) -> c_int);
    let Some(real) = real else { return REFUSED };
    if !addresses.is_null() {
        besides(|| {
            // SAFETY: upheld by the caller.
            disown(engine, unsafe { core::slice::from_raw_parts(addresses, count) });
        });
    }
    // SAFETY: upheld by the caller.
    unsafe { real(engine, addresses, count) }
}

/// Whether [`own`] recorded any memory. Relaxed: a thread that unregisters memory while another
/// submits it has no order.
static OWNED: AtomicBool = AtomicBool::new(false);

/// Records that the values of the thread's open scope hold for memory that is about to be moved.
/// Mooncake posts from its own threads, which have no scope.
pub(crate) fn own(places: impl Iterator<Item = (u64, u64)>) {
    let open = hints::said_of(0);
    if open.batch == 0 && open.request == 0 && open.deadline_ns == 0 {
        return;
    }
    OWNED.store(true, Ordering::Relaxed);
    for (address, bytes) in places {
        if hints::memory_owner(address, bytes, open).is_ok() {
            COUNTERS.hinted.add(1);
        }
    }
}

/// Removes the memory owner of memory that is unregistered, if [`own`] recorded it.
fn disown(engine: EnginePtr, addresses: &[*mut c_void]) {
    let Some(hub) = hub::known() else { return };
    for address in addresses {
        let length = hub.engines.write().unregistered(engine, *address);
        if let Some(length) = length
            && OWNED.load(Ordering::Relaxed)
        {
            let nobody = laxity_client::scope::Scope::default();
            // An empty buffer has no memory owner.
            let _ = hints::memory_owner(*address as u64, length as u64, nobody);
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn allocateBatchID(engine: EnginePtr, size: usize) -> u64 {
    let Some(real) = real!(c"allocateBatchID", fn(EnginePtr, usize) -> u64) else {
        return INVALID_BATCH;
    };
    // SAFETY: upheld by the caller.
    let batch = unsafe { real(engine, size) };
    if batch != INVALID_BATCH {
        besides(|| {
            if let Some(hub) = hub::known() {
                hub.allocated(engine, batch, size);
            }
        });
    }
    batch
}

/// # Safety
/// The conditions of `transfer_engine_c.h` hold.
unsafe fn submit(engine: EnginePtr, id: u64, call: &Call) -> c_int {
    let hub = hub::known();
    // SAFETY: upheld by the caller.
    besides(|| unsafe { note(hub, engine, call) });
    if let Some(hub) = hub
        && let Some(batch) = guarded(None, || hub.batch(engine, id))
    {
        // After a panic it is unknown whether Mooncake got the call. The program gets an error, and
        // nothing is sent twice.
        return guarded(REFUSED, || {
            let mut state = batch.state.lock();
            // SAFETY: upheld by the caller.
            let code = unsafe { batch.submit(&mut state, hub, call) };
            hub.attend(&batch, &mut state);
            code
        });
    }
    // SAFETY: upheld by the caller.
    unsafe { hand_on(engine, id, call.entries, call.count, call.notify) }
}

/// Counts a call, and records the memory owner where that is useful.
///
/// # Safety
/// The conditions of [`submit`] hold.
unsafe fn note(hub: Option<&Hub>, engine: EnginePtr, call: &Call) {
    if call.entries.is_null() {
        return;
    }
    // SAFETY: upheld by the caller.
    let requests = unsafe { core::slice::from_raw_parts(call.entries, call.count) };
    COUNTERS.calls.add(1);
    COUNTERS.transfers.add(call.count as u64);
    COUNTERS.bytes.add(requests.iter().fold(0, |sum: u64, r| sum.wrapping_add(r.length)));
    if hub.is_some_and(|hub| hub.handling(engine) == Handling::Hint) {
        own(requests.iter().map(|r| (r.source as u64, r.length)));
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn submitTransfer(
    engine: EnginePtr,
    batch: u64,
    entries: *mut TransferRequest,
    count: usize,
) -> c_int {
    let call = Call { entries, count, notify: None };
    // SAFETY: upheld by the caller.
    unsafe { submit(engine, batch, &call) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn submitTransferWithNotify(
    engine: EnginePtr,
    batch: u64,
    entries: *mut TransferRequest,
    count: usize,
    notify: NotifyMsg,
) -> c_int {
    let call = Call { entries, count, notify: Some(notify) };
    // SAFETY: upheld by the caller.
    unsafe { submit(engine, batch, &call) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getTransferStatus(
    engine: EnginePtr,
    id: u64,
    task: usize,
    status: *mut TransferStatus,
) -> c_int {
    if let Some(hub) = hub::known()
        && let Some(batch) = guarded(None, || hub.batch(engine, id))
    {
        return guarded(REFUSED, || {
            let mut state = batch.state.lock();
            // SAFETY: upheld by the caller.
            unsafe { batch.status(&mut state, hub, task, status) }
        });
    }
    // SAFETY: upheld by the caller.
    unsafe { ask_after(engine, id, task, status) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn freeBatchID(engine: EnginePtr, id: u64) -> c_int {
    let Some(real) = real!(c"freeBatchID", fn(EnginePtr, u64) -> c_int) else {
        return REFUSED;
    };
    if let Some(hub) = hub::known()
        && let Some(batch) = guarded(None, || hub.batch(engine, id))
    {
        return guarded(REFUSED, || {
            let mut state = batch.state.lock();
            hub.forget(&batch);
            // SAFETY: upheld by the caller.
            let code = batch.free(&mut state, || unsafe { real(engine, id) });
            if code != 0 {
                hub.remember(&batch);
            }
            code
        });
    }
    // SAFETY: upheld by the caller.
    unsafe { real(engine, id) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_with_an_address_has_a_peer_and_a_name_has_none() {
        let known = peer_of("192.0.2.7:12345");
        assert_ne!(known, 0);
        assert_eq!(peer_of("192.0.2.7"), known);
        assert_ne!(peer_of("[2001:db8::1]:12345"), known);
        assert_eq!(peer_of("decode-3:12345"), 0);
        assert_eq!(peer_of(""), 0);
    }
}
