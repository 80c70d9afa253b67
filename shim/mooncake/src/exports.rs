//! The functions of `transfer_engine_c.h` that this library interposes. Each calls Mooncake's own
//! with the program's arguments and returns its result. No failure here prevents that.
//!
//! # Safety
//! Callers of each function here uphold the conditions of `transfer_engine_c.h`. A text is a C
//! string, or null.

#![allow(clippy::missing_safety_doc, missing_docs, reason = "said above, once for all functions")]

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicBool, Ordering};
use std::panic::{AssertUnwindSafe, catch_unwind};

use laxity_client::{hints, peers};

use crate::abi::{
    BufferEntry, EnginePtr, INVALID_BATCH, NotifyMsg, TransferRequest, TransferStatus,
};
use crate::calls::{Call, REFUSED, ask_after, hand_on};
use crate::engines::{EngineEnv, Handling};
use crate::hub::{self, Hub};
use crate::real::interpose;
use crate::report::COUNTERS;

/// Runs this library's part of a call. A panic in it must not reach C.
pub(crate) fn besides(body: impl FnOnce()) {
    guarded((), body);
}

/// Returns the result of `body`, or `otherwise` if it panics.
fn guarded<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(otherwise)
}

/// Runs this library's part of a call in a process that has made an engine.
fn on_hub(body: impl FnOnce(&'static Hub)) {
    besides(|| hub::known().map_or((), body));
}

/// # Safety
/// `array` is null or has `count` entries, for as long as the result is used.
pub(crate) unsafe fn array<'a, T>(array: *const T, count: usize) -> &'a [T] {
    // SAFETY: upheld by the caller, since the pointer is not null.
    if array.is_null() { &[] } else { unsafe { core::slice::from_raw_parts(array, count) } }
}

unsafe fn text<'a>(text: *const c_char) -> Option<&'a str> {
    // SAFETY: upheld by the caller, since the pointer is not null.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_str().ok())?
}

interpose! {
    fn createTransferEngine(metadata: *const c_char, local: *const c_char, host: *const c_char,
        port: u64, auto_discover: c_int) -> EnginePtr, ptr::null_mut(),
    |real| {
        let engine = real(metadata, local, host, port, auto_discover);
        if !engine.is_null() {
            besides(|| {
                let around = EngineEnv::here();
                hub::make().engines.write().made(engine, auto_discover != 0, &around);
            });
        }
        engine
    }

    fn destroyTransferEngine(engine: EnginePtr)
    |real| {
        on_hub(|hub| hub.leave_engine(engine));
        real(engine);
    }

    fn installTransport(engine: EnginePtr, protocol: *const c_char, args: *mut *mut c_void)
        -> EnginePtr, ptr::null_mut(),
    |real| {
        let (transport, name) = (real(engine, protocol, args), text(protocol));
        if let Some(name) = name.filter(|_| !transport.is_null()) {
            on_hub(|hub| hub.engines.write().installed(engine, name));
        }
        transport
    }

    fn uninstallTransport(engine: EnginePtr, protocol: *const c_char) -> c_int, REFUSED,
    |real| {
        let (code, name) = (real(engine, protocol), text(protocol));
        if let Some(name) = name.filter(|_| code == 0) {
            on_hub(|hub| hub.engines.write().uninstalled(engine, name));
        }
        code
    }

    fn openSegment(engine: EnginePtr, name: *const c_char) -> i32, REFUSED,
    |real| {
        opened(engine, real(engine, name), name)
    }

    fn openSegmentNoCache(engine: EnginePtr, name: *const c_char) -> i32, REFUSED,
    |real| {
        opened(engine, real(engine, name), name)
    }

    fn registerLocalMemory(engine: EnginePtr, address: *mut c_void, length: usize,
        location: *const c_char, remote_accessible: c_int) -> c_int, REFUSED,
    |real| {
        let code = real(engine, address, length, location, remote_accessible);
        if code == 0 {
            on_hub(|hub| hub.engines.write().registered(engine, address, length));
        }
        code
    }

    fn registerLocalMemoryBatch(engine: EnginePtr, buffers: *mut BufferEntry, count: usize,
        location: *const c_char) -> c_int, REFUSED,
    |real| {
        let code = real(engine, buffers, count, location);
        if code == 0 {
            on_hub(|hub| {
                let mut engines = hub.engines.write();
                // Mooncake has just read all of them.
                for buffer in array(buffers, count) {
                    engines.registered(engine, buffer.addr, buffer.length);
                }
            });
        }
        code
    }

    fn unregisterLocalMemory(engine: EnginePtr, address: *mut c_void) -> c_int, REFUSED,
    |real| {
        disown(engine, &[address]);
        real(engine, address)
    }

    fn unregisterLocalMemoryBatch(engine: EnginePtr, addresses: *mut *mut c_void, count: usize)
        -> c_int, REFUSED,
    |real| {
        disown(engine, array(addresses, count));
        real(engine, addresses, count)
    }

    fn allocateBatchID(engine: EnginePtr, size: usize) -> u64, INVALID_BATCH,
    |real| {
        let batch = real(engine, size);
        if batch != INVALID_BATCH {
            on_hub(|hub| hub.allocated(engine, batch, size));
        }
        batch
    }

    fn freeBatchID(engine: EnginePtr, id: u64) -> c_int, REFUSED,
    |real| {
        if let Some(hub) = hub::known()
            && let Some(batch) = guarded(None, || hub.batch(engine, id))
        {
            return guarded(REFUSED, || {
                let mut state = batch.state.lock();
                hub.forget(&batch);
                let code = batch.free(&mut state, || real(engine, id));
                if code != 0 {
                    hub.remember(&batch);
                }
                code
            });
        }
        real(engine, id)
    }
}

/// Returns the number of the peer whose segment has this name, `HOST:PORT`. Returns 0, unknown, for
/// a name without an address. Names are not looked up, which could take long.
fn peer_of(segment: &str) -> u8 {
    let host = segment.rsplit_once(':').map_or(segment, |(host, _)| host);
    peers::named(host.trim_start_matches('[').trim_end_matches(']'))
}

/// Records the peer of a segment if it was opened. Returns the segment.
unsafe fn opened(engine: EnginePtr, segment: i32, name: *const c_char) -> i32 {
    // SAFETY: upheld by the caller.
    if let Some(name) = unsafe { text(name) }.filter(|_| segment >= 0) {
        on_hub(|hub| hub.engines.write().opened(engine, segment, peer_of(name)));
    }
    segment
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
    on_hub(|hub| {
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
    });
}

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
unsafe fn note(hub: Option<&Hub>, engine: EnginePtr, call: &Call) {
    if call.entries.is_null() {
        return;
    }
    // SAFETY: upheld by the caller.
    let requests = unsafe { call.requests() };
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
