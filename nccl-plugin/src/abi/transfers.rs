//! Slots of NCCL's network tables for memory, sends, receives, and tests for completion.

use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

use super::{Code, Opaque, OpaqueOut, guarded, not_null, pointing};
use crate::backend::{Buffer, Memory, POINTER_DMABUF};
use crate::comm::{Comm, CommRequest, CommSide, MemoryHandle, TestOutcome};
use crate::fault::{Fault, Result};
use crate::origin::{self, Callback};
use crate::plugin;

/// NCCL's profiler callback, from the last `init` that passed one.
static CALLBACK: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());

pub(super) fn set_callback(callback: Option<Callback>) {
    if let Some(callback) = callback {
        CALLBACK.store(callback as *mut (), Ordering::Relaxed);
    }
}

fn callback() -> Option<Callback> {
    let callback = CALLBACK.load(Ordering::Relaxed);
    // SAFETY: `set_callback` stored the pointer, so it is a `Callback`.
    (!callback.is_null()).then(|| unsafe { core::mem::transmute::<*mut (), Callback>(callback) })
}

unsafe fn register(comm: Opaque, memory: Memory, handle: OpaqueOut) -> Code {
    // SAFETY: upheld by the caller.
    let made = || unsafe { Comm::at(comm)?.register(memory) };
    // SAFETY: upheld by the caller.
    unsafe { pointing("regMr", handle, || made().map(|it| Some(Box::into_raw(it).cast()))) }
}

/// Converts a size, which NCCL never passes as a negative number.
fn bytes(size: impl TryInto<usize>) -> usize {
    size.try_into().unwrap_or(0)
}

/// Registers `size` bytes for a connection.
pub(super) unsafe extern "C" fn reg_mr<Size: TryInto<usize>>(
    comm: Opaque,
    data: Opaque,
    size: Size,
    kind: c_int,
    handle: OpaqueOut,
) -> Code {
    let memory = Memory { address: data as usize, bytes: bytes(size), kind, dma_buf: None };
    // SAFETY: upheld by the caller.
    unsafe { register(comm, memory, handle) }
}

/// Registers `size` bytes of a GPU, from `offset` bytes of the DMA-BUF `descriptor`.
pub(super) unsafe extern "C" fn reg_mr_dma_buf(
    comm: Opaque,
    data: Opaque,
    size: usize,
    _kind: c_int,
    offset: u64,
    descriptor: c_int,
    handle: OpaqueOut,
) -> Code {
    let memory = Memory {
        address: data as usize,
        bytes: size,
        kind: POINTER_DMABUF,
        dma_buf: Some((descriptor, offset)),
    };
    // SAFETY: upheld by the caller.
    unsafe { register(comm, memory, handle) }
}

/// Ends a registration. No request may still use it.
pub(super) unsafe extern "C" fn dereg_mr(comm: Opaque, handle: Opaque) -> Code {
    guarded("deregMr", || {
        let handle = not_null(handle.cast::<MemoryHandle>(), "the mhandle")?;
        // SAFETY: upheld by the caller.
        unsafe { Comm::at(comm)?.deregister(*Box::from_raw(handle)) }
    })
}

/// Begins to send `size` bytes, since v10. Writes a null request if NCCL has to call again.
pub(super) unsafe extern "C" fn isend_profiled(
    comm: Opaque,
    data: Opaque,
    size: usize,
    _tag: c_int,
    memory: Opaque,
    profiler: Opaque,
    request: OpaqueOut,
) -> Code {
    let taken = || {
        // SAFETY: upheld by the caller.
        let (comm, handle) = unsafe { (Comm::at(comm)?, memory.cast::<MemoryHandle>().as_ref()) };
        let region = handle.map(|handle| &handle.region);
        let buffer = Buffer { address: data as usize, bytes: size, region };
        // SAFETY: upheld by the caller.
        let origin = || callback().and_then(|callback| unsafe { origin::ask(callback, profiler) });
        let mut side = comm.send_side()?.lock();
        let taken = side.offer(buffer, origin);
        let lingers = side.lingers();
        drop(side);
        if lingers {
            plugin::get()?.lingers();
        }
        Ok(taken.map(|index| comm.request(index)))
    };
    // SAFETY: upheld by the caller.
    unsafe { pointing("isend", request, taken) }
}

/// Begins to send like [`isend_profiled`], without a profiler's handle, up to v9.
pub(super) unsafe extern "C" fn isend<Size: TryInto<usize>>(
    comm: Opaque,
    data: Opaque,
    size: Size,
    tag: c_int,
    memory: Opaque,
    request: OpaqueOut,
) -> Code {
    // SAFETY: upheld by the caller.
    unsafe { isend_profiled(comm, data, bytes(size), tag, memory, ptr::null_mut(), request) }
}

/// Returns the buffer of a receive or flush. NCCL's arrays are invalid after the call. They have
/// one entry, because the properties say so (`maxRecvs`).
unsafe fn buffer<'a, Size: TryInto<usize>>(
    count: c_int,
    data: OpaqueOut,
    sizes: *mut Size,
    memory: OpaqueOut,
) -> Result<Buffer<'a>> {
    if count != 1 {
        return Err(Fault::Argument(format!(
            "a receive has {count} buffers, and only 1 is possible"
        )));
    }
    let data = not_null(data, "the array of buffers")?;
    // SAFETY: upheld by the caller.
    unsafe {
        let handle = memory.as_ref().and_then(|memory| memory.cast::<MemoryHandle>().as_ref());
        let region = handle.map(|handle| &handle.region);
        Ok(Buffer { address: data.read() as usize, bytes: bytes(sizes.read()), region })
    }
}

/// Posts a buffer, up to v9. Writes a null request if NCCL has to call again. NCCL may
/// allow early completion in `*request` (`NCCL_NET_OPTIONAL_RECV_COMPLETION`). The plugin ignores
/// this: over TCP, bytes of a request move only while NCCL tests it.
pub(super) unsafe extern "C" fn irecv<Size: TryInto<usize>>(
    comm: Opaque,
    count: c_int,
    data: OpaqueOut,
    sizes: *mut Size,
    _tags: *mut c_int,
    memory: OpaqueOut,
    request: OpaqueOut,
) -> Code {
    let posted = || {
        // SAFETY: upheld by the caller.
        let (comm, buffer) = unsafe { (Comm::at(comm)?, buffer(count, data, sizes, memory)?) };
        let posted = comm.receive_side()?.lock().post(buffer)?;
        Ok(posted.map(|index| comm.request(index)))
    };
    // SAFETY: upheld by the caller.
    unsafe { pointing("irecv", request, posted) }
}

/// Posts a buffer like [`irecv`], since v10. Receives don't use the profiler's handles.
pub(super) unsafe extern "C" fn irecv_profiled(
    comm: Opaque,
    count: c_int,
    data: OpaqueOut,
    sizes: *mut usize,
    tags: *mut c_int,
    memory: OpaqueOut,
    _profilers: OpaqueOut,
    request: OpaqueOut,
) -> Code {
    // SAFETY: upheld by the caller.
    unsafe { irecv(comm, count, data, sizes, tags, memory, request) }
}

/// Makes received data visible to GPUs. Writes a null request if nothing is needed.
pub(super) unsafe extern "C" fn iflush(
    comm: Opaque,
    count: c_int,
    data: OpaqueOut,
    sizes: *mut c_int,
    memory: OpaqueOut,
    request: OpaqueOut,
) -> Code {
    let begun = || {
        // SAFETY: upheld by the caller.
        let (comm, buffer) = unsafe { (Comm::at(comm)?, buffer(count, data, sizes, memory)?) };
        let begun = comm.receive_side()?.lock().flush(buffer)?;
        Ok(begun.map(|index| comm.request(index)))
    };
    // SAFETY: upheld by the caller.
    unsafe { pointing("iflush", request, begun) }
}

/// Writes 1 if a request is done, and the bytes of its message. The request ends then.
pub(super) unsafe extern "C" fn test(request: Opaque, done: *mut c_int, sizes: *mut c_int) -> Code {
    guarded("test", || {
        let done = not_null(done, "done")?;
        // SAFETY: upheld by the caller.
        unsafe {
            done.write(0);
            let (comm, index) = CommRequest::at(request)?;
            if let TestOutcome::Done(bytes) = comm.test(index)? {
                if let Some(bytes) = bytes.filter(|_| !sizes.is_null()) {
                    sizes.write(c_int::try_from(bytes).unwrap_or(c_int::MAX));
                }
                done.write(1);
                if let CommSide::Send(side) = &comm.side
                    && side.lock().lingers()
                {
                    plugin::get()?.lingers();
                }
            }
        }
        Ok(())
    })
}
