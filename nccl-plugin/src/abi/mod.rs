//! NCCL's network interface, versions 7 to 12, over one implementation.
//!
//! Each `vN.rs` has the structs of that version, as `ext-net` headers of NCCL 2.30.7 declare them,
//! asserts their sizes and offsets, and exports its table. What the versions have in common is
//! here; a version's own file has only what differs: who passes a context, how wide a size is,
//! which properties there are.
//!
//! | table | NCCL | what came with it |
//! |---|---|---|
//! | v7 | 2.19 | |
//! | v8 | 2.20–2.23 | `regIsGlobal`, `size_t` registrations |
//! | v9 | 2.24, 2.25 | virtual devices, sizes beyond 2 GiB, `forceFlush` |
//! | v10 | 2.26, 2.27 | the profiler's handle, a traffic class per communicator |
//! | v11 | 2.28, 2.29 | a context per communicator, `setNetAttr`, `finalize` |
//! | v12 | 2.30–2.32 | eight devices per virtual one, rails |
//!
//! No panic crosses into C: each function catches it and answers with an internal error. NCCL is
//! trusted to keep its own rules (a pointer is null or valid, arrays are as long as it says); what
//! comes from a peer is not.

pub mod profiler;
pub mod v10;
pub mod v11;
pub mod v12;
pub mod v7;
pub mod v8;
pub mod v9;

use core::ffi::{c_char, c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use smallvec::SmallVec;

use crate::backend::{Buffer, Device, GROUP_MAX, Memory, POINTER_DMABUF};
use crate::comm::{Comm, MemoryHandle, Outcome, Request, Side, Wish};
use crate::context::Context;
use crate::fault::{Fault, Result};
use crate::handle::HANDLE_BYTES;
use crate::log::{self, Logger};
use crate::origin::{self, Callback};
use crate::plugin::{self, Listening};

/// `ncclResult_t`.
pub type Code = c_int;
const SUCCESS: Code = 0;
const INTERNAL: Code = 3;

/// The name by which `NCCL_NET` asks for this network.
pub const NAME: Name = Name(c"Laxity".as_ptr());

/// A C string that lives for ever.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct Name(*const c_char);

// SAFETY: leads to a constant.
unsafe impl Sync for Name {}
// SAFETY: as above.
unsafe impl Send for Name {}

/// `NCCL_NET_DEVICE_HOST`: the GPU takes no part.
pub const DEVICE_HOST: c_int = 0;
/// `NCCL_NET_DEVICE_INVALID_VERSION`.
pub const DEVICE_VERSION: c_int = 0;

/// NCCL's profiler callback, from the last `init` that brought one.
static CALLBACK: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());

fn set_callback(callback: Option<Callback>) {
    if let Some(callback) = callback {
        CALLBACK.store(callback as *mut (), Ordering::Relaxed);
    }
}

fn callback() -> Option<Callback> {
    let callback = CALLBACK.load(Ordering::Relaxed);
    // SAFETY: stored by `set_callback`, so it is a `Callback`.
    (!callback.is_null()).then(|| unsafe { core::mem::transmute::<*mut (), Callback>(callback) })
}

/// Runs the body of a function of the table.
pub(crate) fn guarded(name: &str, body: impl FnOnce() -> Result<()>) -> Code {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(fault)) => {
            log::warn(&format!("{name}: {fault}"));
            fault.code()
        }
        Err(_) => {
            log::warn(&format!(
                "{name}: a bug in Laxity's plugin; standard error has its place"
            ));
            INTERNAL
        }
    }
}

fn not_null<T>(pointer: *mut T, what: &str) -> Result<*mut T> {
    if pointer.is_null() {
        return Err(Fault::Argument(format!("{what} is a null pointer")));
    }
    Ok(pointer)
}

/// `init` of all versions.
pub(crate) fn initialise(logger: Option<Logger>, callback: Option<Callback>) -> Code {
    log::set(logger);
    set_callback(callback);
    guarded("init", || plugin::get_or_make().map(drop))
}

/// `init` with a context.
///
/// # Safety
/// `context` is null or can be written.
pub(crate) unsafe fn initialise_context(
    context: *mut *mut c_void,
    communicator: u64,
    traffic_class: c_int,
    logger: Option<Logger>,
    callback: Option<Callback>,
) -> Code {
    log::set(logger);
    set_callback(callback);
    guarded("init", || {
        let context = not_null(context, "the context")?;
        let plugin = plugin::get_or_make()?;
        let made = Arc::into_raw(plugin.context(communicator, traffic_class));
        // SAFETY: upheld by the caller.
        unsafe { context.write(made.cast_mut().cast()) };
        Ok(())
    })
}

/// The context behind NCCL's pointer.
///
/// # Safety
/// `context` is null, or came from [`initialise_context`] and was not finalised.
unsafe fn context_at(context: *mut c_void) -> Result<Arc<Context>> {
    let context = not_null(context, "the context")?
        .cast::<Context>()
        .cast_const();
    // SAFETY: upheld by the caller; the count that NCCL holds stays.
    unsafe {
        Arc::increment_strong_count(context);
        Ok(Arc::from_raw(context))
    }
}

/// `finalize`.
///
/// # Safety
/// `context` is null, or came from [`initialise_context`] and is not used again.
pub(crate) unsafe extern "C" fn finalize(context: *mut c_void) -> Code {
    guarded("finalize", || {
        if !context.is_null() {
            // SAFETY: upheld by the caller.
            drop(unsafe { Arc::from_raw(context.cast::<Context>().cast_const()) });
        }
        Ok(())
    })
}

/// `devices`.
///
/// # Safety
/// `count` is null or can be written.
pub(crate) unsafe extern "C" fn devices(count: *mut c_int) -> Code {
    guarded("devices", || {
        let count = not_null(count, "the count")?;
        let number = plugin::get()?.devices().len() as c_int;
        // SAFETY: upheld by the caller.
        unsafe { count.write(number) };
        Ok(())
    })
}

/// `getProperties`: writes what `fill` makes of the device.
///
/// # Safety
/// `properties` is null or can be written.
pub(crate) unsafe fn get_properties<P>(
    number: c_int,
    properties: *mut P,
    fill: impl FnOnce(&'static Device) -> P,
) -> Code {
    guarded("getProperties", || {
        let properties = not_null(properties, "the properties")?;
        let device = plugin::get()?.device(number)?;
        // SAFETY: upheld by the caller.
        unsafe { properties.write(fill(device)) };
        Ok(())
    })
}

/// The device's PCI path, null for virtual ones.
pub(crate) fn pci_path(device: &Device) -> *mut c_char {
    let path = device.pci_path.as_ref();
    path.map_or(ptr::null_mut(), |path| path.as_ptr().cast_mut())
}

/// `listen` of all versions.
///
/// # Safety
/// `handle` is null or has [`HANDLE_BYTES`]; `listen_comm` is null or can be written.
pub(crate) unsafe fn listen(
    device: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> Code {
    guarded("listen", || {
        let handle = not_null(handle.cast::<[u8; HANDLE_BYTES]>(), "the handle")?;
        let listen_comm = not_null(listen_comm, "the listenComm")?;
        let (listening, bytes) = plugin::get()?.listen(device)?;
        // SAFETY: upheld by the caller; bytes need no alignment.
        unsafe {
            handle.write(bytes);
            listen_comm.write(Box::into_raw(listening).cast());
        }
        Ok(())
    })
}

/// `connect` of all versions.
///
/// # Safety
/// `handle` is null or has [`HANDLE_BYTES`]; `send_comm` is null or can be written.
pub(crate) unsafe fn connect(
    context: &Arc<Context>,
    device: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
) -> Code {
    guarded("connect", || {
        let handle = not_null(handle.cast::<[u8; HANDLE_BYTES]>(), "the handle")?;
        let send_comm = not_null(send_comm, "the sendComm")?;
        // SAFETY: upheld by the caller; bytes need no alignment.
        unsafe {
            send_comm.write(ptr::null_mut());
            let mut bytes = handle.read();
            let made = plugin::get()?.connect(context, device, &mut bytes);
            handle.write(bytes);
            if let Some(comm) = made? {
                send_comm.write(Arc::into_raw(comm).cast_mut().cast());
            }
        }
        Ok(())
    })
}

/// `connect` with a context.
///
/// # Safety
/// As [`connect`] and [`context_at`].
pub(crate) unsafe fn connect_in(
    context: *mut c_void,
    device: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
) -> Code {
    // SAFETY: upheld by the caller.
    match unsafe { context_at(context) } {
        // SAFETY: upheld by the caller.
        Ok(context) => unsafe { connect(&context, device, handle, send_comm) },
        Err(fault) => guarded("connect", || Err(fault)),
    }
}

/// `accept`.
///
/// # Safety
/// `listen_comm` came from [`listen`]; `receive_comm` is null or can be written.
pub(crate) unsafe extern "C" fn accept(
    listen_comm: *mut c_void,
    receive_comm: *mut *mut c_void,
    _device_comm: *mut *mut c_void,
) -> Code {
    guarded("accept", || {
        let listening = not_null(listen_comm.cast::<Listening>(), "the listenComm")?;
        let receive_comm = not_null(receive_comm, "the recvComm")?;
        // SAFETY: upheld by the caller.
        unsafe {
            receive_comm.write(ptr::null_mut());
            if let Some(comm) = plugin::get()?.accept(&*listening)? {
                receive_comm.write(Arc::into_raw(comm).cast_mut().cast());
            }
        }
        Ok(())
    })
}

/// Registers memory.
///
/// # Safety
/// `comm` is a connection that lives; `handle` is null or can be written.
unsafe fn register(comm: *mut c_void, memory: Memory, handle: *mut *mut c_void) -> Code {
    guarded("regMr", || {
        let handle = not_null(handle, "the mhandle")?;
        // SAFETY: upheld by the caller.
        unsafe {
            handle.write(ptr::null_mut());
            let registered = Comm::at(comm)?.register(memory)?;
            handle.write(Box::into_raw(registered).cast());
        }
        Ok(())
    })
}

/// `regMr` of v8 and later.
///
/// # Safety
/// As [`register`].
pub(crate) unsafe extern "C" fn reg_mr(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    handle: *mut *mut c_void,
) -> Code {
    let memory = Memory {
        address: data as usize,
        bytes: size,
        kind,
        dma_buf: None,
    };
    // SAFETY: upheld by the caller.
    unsafe { register(comm, memory, handle) }
}

/// `regMrDmaBuf`.
///
/// # Safety
/// As [`register`].
pub(crate) unsafe extern "C" fn reg_mr_dma_buf(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    _kind: c_int,
    offset: u64,
    descriptor: c_int,
    handle: *mut *mut c_void,
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

/// `deregMr`.
///
/// # Safety
/// `comm` is a connection that lives; `handle` came from registering and is not used again.
pub(crate) unsafe extern "C" fn dereg_mr(comm: *mut c_void, handle: *mut c_void) -> Code {
    guarded("deregMr", || {
        let handle = not_null(handle.cast::<MemoryHandle>(), "the mhandle")?;
        // SAFETY: upheld by the caller.
        unsafe { Comm::at(comm)?.deregister(*Box::from_raw(handle)) }
    })
}

/// `isend` of all versions.
///
/// # Safety
/// `comm` is a sending connection that lives, `data` has `size` bytes until the request is
/// done, `memory` is null or came from registering, `profiler` is what NCCL gave this call,
/// `request` is null or can be written.
pub(crate) unsafe fn send(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    memory: *mut c_void,
    profiler: *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    guarded("isend", || {
        let request = not_null(request, "the request")?;
        // SAFETY: upheld by the caller.
        unsafe {
            request.write(ptr::null_mut());
            let comm = Comm::at(comm)?;
            let region = memory.cast::<MemoryHandle>().as_ref();
            let wish = Wish {
                address: data as usize,
                bytes: size,
                tag,
                region: region.map(|handle| &handle.region),
            };
            let origin = || callback().and_then(|callback| origin::ask(callback, profiler));
            let mut side = comm.send_side()?.lock();
            let taken = side.offer(wish, origin);
            let lingers = side.lingers();
            drop(side);
            if lingers {
                plugin::get()?.lingers();
            }
            if let Some(index) = taken {
                request.write(comm.request(index));
            }
        }
        Ok(())
    })
}

/// `isend` of v9: sizes of any width, no profiler.
///
/// # Safety
/// As [`send`].
pub(crate) unsafe extern "C" fn isend_v9(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    memory: *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    // SAFETY: upheld by the caller.
    unsafe { send(comm, data, size, tag, memory, ptr::null_mut(), request) }
}

/// `isend` of v10 and later.
///
/// # Safety
/// As [`send`].
pub(crate) unsafe extern "C" fn isend_v10(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    memory: *mut c_void,
    profiler: *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    // SAFETY: upheld by the caller.
    unsafe { send(comm, data, size, tag, memory, profiler, request) }
}

/// The buffers of a grouped receive or flush. NCCL's arrays are gone after the call.
///
/// # Safety
/// The arrays have `count` entries (`tags` and `memory` may be null), memory handles are
/// null or came from registering.
unsafe fn buffers<'a>(
    count: c_int,
    data: *mut *mut c_void,
    size: impl Fn(usize) -> usize,
    tags: *mut c_int,
    memory: *mut *mut c_void,
) -> Result<SmallVec<[Buffer<'a>; GROUP_MAX]>> {
    let count = usize::try_from(count).unwrap_or(0);
    if count == 0 || count > GROUP_MAX {
        return Err(Fault::Argument(format!(
            "{count} buffers in a group: 1 to {GROUP_MAX} are possible"
        )));
    }
    let data = not_null(data, "the array of buffers")?;
    let buffer = |at: usize| {
        // SAFETY: upheld by the caller.
        unsafe {
            let region = if memory.is_null() {
                None
            } else {
                memory.add(at).read().cast::<MemoryHandle>().as_ref()
            };
            Buffer {
                address: data.add(at).read() as usize,
                bytes: size(at),
                tag: if tags.is_null() {
                    0
                } else {
                    tags.add(at).read()
                },
                region: region.map(|handle| &handle.region),
            }
        }
    };
    Ok((0..count).map(buffer).collect())
}

/// `irecv` of all versions. What `*request` holds before (`NCCL_NET_OPTIONAL_RECV_COMPLETION`) is
/// leave to complete early, which is not used: over TCP nothing would move the bytes of a request
/// that nobody tests.
///
/// # Safety
/// As [`buffers`]; `comm` is a receiving connection that lives, the buffers stay until the
/// request is done, `request` is null or can be written.
pub(crate) unsafe fn receive(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    size: impl Fn(usize) -> usize,
    tags: *mut c_int,
    memory: *mut *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    guarded("irecv", || {
        let request = not_null(request, "the request")?;
        // SAFETY: upheld by the caller.
        unsafe {
            request.write(ptr::null_mut());
            let comm = Comm::at(comm)?;
            let buffers = buffers(count, data, size, tags, memory)?;
            let posted = comm.receive_side()?.lock().post(&buffers)?;
            if let Some(index) = posted {
                request.write(comm.request(index));
            }
        }
        Ok(())
    })
}

/// `irecv` of v9: sizes of any width, no profiler.
///
/// # Safety
/// As [`receive`].
pub(crate) unsafe extern "C" fn irecv_v9(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    memory: *mut *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    // SAFETY: upheld by the caller.
    let size = |at| unsafe { sizes.add(at).read() };
    // SAFETY: upheld by the caller.
    unsafe { receive(comm, count, data, size, tags, memory, request) }
}

/// `irecv` of v10 and later.
///
/// # Safety
/// As [`receive`].
pub(crate) unsafe extern "C" fn irecv_v10(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    memory: *mut *mut c_void,
    _profilers: *mut *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    // SAFETY: upheld by the caller.
    unsafe { irecv_v9(comm, count, data, sizes, tags, memory, request) }
}

/// `iflush`.
///
/// # Safety
/// As [`receive`].
pub(crate) unsafe extern "C" fn iflush(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    memory: *mut *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    guarded("iflush", || {
        let request = not_null(request, "the request")?;
        // SAFETY: upheld by the caller.
        unsafe {
            request.write(ptr::null_mut());
            let comm = Comm::at(comm)?;
            let size = |at| usize::try_from(sizes.add(at).read()).unwrap_or(0);
            let buffers = buffers(count, data, size, ptr::null_mut(), memory)?;
            let begun = comm.receive_side()?.lock().flush(&buffers)?;
            if let Some(index) = begun {
                request.write(comm.request(index));
            }
        }
        Ok(())
    })
}

/// `test`.
///
/// # Safety
/// `request` came from `isend`, `irecv` or `iflush` of a connection that lives; `done` is
/// null or can be written, `sizes` is null or has an entry for each of the request's buffers.
pub(crate) unsafe extern "C" fn test(
    request: *mut c_void,
    done: *mut c_int,
    sizes: *mut c_int,
) -> Code {
    guarded("test", || {
        let done = not_null(done, "done")?;
        // SAFETY: upheld by the caller.
        unsafe {
            done.write(0);
            let (comm, index) = Request::at(request)?;
            if let Outcome::Done(of) = comm.test(index)? {
                if !sizes.is_null() {
                    for (at, size) in of.iter().enumerate() {
                        sizes
                            .add(at)
                            .write(c_int::try_from(*size).unwrap_or(c_int::MAX));
                    }
                }
                done.write(1);
                if let Side::Send(side) = &comm.side
                    && side.lock().lingers()
                {
                    plugin::get()?.lingers();
                }
            }
        }
        Ok(())
    })
}

/// `closeSend`.
///
/// # Safety
/// `comm` came from [`connect`] and is not used again.
pub(crate) unsafe extern "C" fn close_send(comm: *mut c_void) -> Code {
    guarded("closeSend", || {
        // SAFETY: upheld by the caller.
        unsafe {
            Comm::at(comm)?.send_side()?.lock().close();
            drop(Arc::from_raw(comm.cast::<Comm>().cast_const()));
        }
        Ok(())
    })
}

/// `closeRecv`.
///
/// # Safety
/// `comm` came from [`accept`] and is not used again.
pub(crate) unsafe extern "C" fn close_receive(comm: *mut c_void) -> Code {
    guarded("closeRecv", || {
        // SAFETY: upheld by the caller.
        unsafe {
            Comm::at(comm)?.receive_side()?.lock().close();
            drop(Arc::from_raw(comm.cast::<Comm>().cast_const()));
        }
        Ok(())
    })
}

/// `closeListen`.
///
/// # Safety
/// `listen_comm` came from [`listen`] and is not used again.
pub(crate) unsafe extern "C" fn close_listen(listen_comm: *mut c_void) -> Code {
    guarded("closeListen", || {
        let listening = not_null(listen_comm.cast::<Listening>(), "the listenComm")?;
        // SAFETY: upheld by the caller.
        drop(unsafe { Box::from_raw(listening) });
        Ok(())
    })
}
