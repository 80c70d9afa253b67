//! NCCL's interface for one-sided operations, versions 14 to 16, over one implementation.
//!
//! The slots are those of the headers `plugin/rma/rma_v14.h` to `rma_v16.h` of NCCL 2.30 to 2.32.
//!
//! | table | NCCL | added by this version |
//! |---|---|---|
//! | v14 | 2.30.7 | |
//! | v15 | 2.31 | flags of an operation, which are hints |
//! | v16 | 2.32 | `getRmaProperties` |
//!
//! `listen` and `connect` take any context, because NCCL 2.30.7 passes the network plugin's. Of a
//! context's configuration only the number of domains is read: some headers of v14 end before
//! `rankStride`, and every context reaches every rank here.

use core::ffi::{c_int, c_void};
use core::ptr;
use std::sync::Arc;

use super::table::Properties;
use super::v11::V12;
use super::{Code, NAME, Name, guarded, not_null};
use crate::context::{Context, TRAFFIC_CLASS_UNSET};
use crate::fault::{Fault, Result};
use crate::handle::HANDLE_BYTES;
use crate::log::{self, Logger};
use crate::plugin;
use crate::rma::registry::Registry;
use crate::rma::{Around, Group, Origin, Put, RmaContext, RmaListener, Side, Window, test_request};

/// The code by which `init` steps aside, `ncclInvalidUsage`.
const ASIDE: Code = 5;
/// Adds one to the signal's word, `NCCL_NET_SIGNAL_OP_INC`.
const SIGNAL_INC: u32 = 1;
/// Adds the value to the signal's word, `NCCL_NET_SIGNAL_OP_ADD`.
const SIGNAL_ADD: u32 = 2;
/// More ranks than any communicator has.
const RANKS_MAX: c_int = 1 << 20;

type Opaque = *mut c_void;
type OpaqueOut = *mut *mut c_void;

/// The type of `iput` in v14.
pub type Iput14 =
    unsafe extern "C" fn(Opaque, c_int, u64, Opaque, usize, u64, Opaque, u32, OpaqueOut) -> Code;
/// The type of `iput` since v15, with the flags before the request.
pub type Iput15 = unsafe extern "C" fn(
    Opaque,
    c_int,
    u64,
    Opaque,
    usize,
    u64,
    Opaque,
    u32,
    u32,
    OpaqueOut,
) -> Code;
/// The type of `iputSignal` in v14.
pub type IputSignal14 = unsafe extern "C" fn(
    Opaque,
    c_int,
    u64,
    Opaque,
    usize,
    u64,
    Opaque,
    u32,
    u64,
    Opaque,
    u64,
    u32,
    bool,
    OpaqueOut,
) -> Code;
/// The type of `iputSignal` since v15.
pub type IputSignal15 = unsafe extern "C" fn(
    Opaque,
    c_int,
    u64,
    Opaque,
    usize,
    u64,
    Opaque,
    u32,
    u64,
    Opaque,
    u64,
    u32,
    bool,
    u32,
    OpaqueOut,
) -> Code;
/// The type of the slot `getRmaProperties`.
pub type GetRmaProperties = unsafe extern "C" fn(comm: Opaque, *mut RmaProperties) -> Code;

/// The parts of a table that differ between versions.
pub trait Version: 'static {
    /// The type of the slot between `devices` and `getProperties`.
    type Query;
    /// The type of the slots `iput` and `iget`.
    type Iput;
    /// The type of the slot `iputSignal`.
    type IputSignal;
    const QUERY: Self::Query;
    const IPUT: Self::Iput;
    const IPUT_SIGNAL: Self::IputSignal;
    const IGET: Self::Iput;
}

/// A table of one-sided operations, `ncclRma_vN_t`.
#[repr(C)]
pub struct Rma<V: Version> {
    pub name: Name,
    pub init: unsafe extern "C" fn(context: OpaqueOut, comm_id: u64, Option<Logger>) -> Code,
    pub devices: unsafe extern "C" fn(count: *mut c_int) -> Code,
    pub get_rma_properties: V::Query,
    pub get_properties: unsafe extern "C" fn(device: c_int, *mut Properties<V12>) -> Code,
    pub listen: unsafe extern "C" fn(Opaque, device: c_int, handle: Opaque, OpaqueOut) -> Code,
    pub connect: unsafe extern "C" fn(
        context: Opaque,
        handles: OpaqueOut,
        ranks: c_int,
        rank: c_int,
        listen_comm: Opaque,
        comm: OpaqueOut,
    ) -> Code,
    pub create_context: unsafe extern "C" fn(Opaque, *mut RmaConfig, OpaqueOut) -> Code,
    pub reg_mr_sym: unsafe extern "C" fn(
        comm: Opaque,
        data: Opaque,
        size: usize,
        kind: c_int,
        flags: u64,
        handle: OpaqueOut,
    ) -> Code,
    pub reg_mr_sym_dma_buf: unsafe extern "C" fn(
        comm: Opaque,
        data: Opaque,
        size: usize,
        kind: c_int,
        offset: u64,
        descriptor: c_int,
        flags: u64,
        handle: OpaqueOut,
    ) -> Code,
    pub dereg_mr_sym: unsafe extern "C" fn(comm: Opaque, handle: Opaque) -> Code,
    pub destroy_context: unsafe extern "C" fn(Opaque) -> Code,
    pub close_coll: unsafe extern "C" fn(Opaque) -> Code,
    pub close_listen: unsafe extern "C" fn(Opaque) -> Code,
    pub iput: V::Iput,
    pub iput_signal: V::IputSignal,
    pub iget: V::Iput,
    pub iflush: unsafe extern "C" fn(Opaque, c_int, Opaque, u32, OpaqueOut) -> Code,
    pub test: unsafe extern "C" fn(comm: Opaque, request: Opaque, done: *mut c_int) -> Code,
    pub rma_progress: unsafe extern "C" fn(Opaque) -> Code,
    pub query_last_error: unsafe extern "C" fn(Opaque, *mut bool) -> Code,
    pub finalize: unsafe extern "C" fn(Opaque) -> Code,
}

impl<V: Version> Rma<V> {
    pub const TABLE: Self = Self {
        name: NAME,
        init,
        devices,
        get_rma_properties: V::QUERY,
        get_properties,
        listen,
        connect,
        create_context,
        reg_mr_sym,
        reg_mr_sym_dma_buf,
        dereg_mr_sym,
        destroy_context,
        close_coll,
        close_listen,
        iput: V::IPUT,
        iput_signal: V::IPUT_SIGNAL,
        iget: V::IGET,
        iflush,
        test,
        rma_progress,
        query_last_error,
        finalize,
    };
}

/// The part of `ncclRmaConfig_vN_t` that all versions have.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RmaConfig {
    pub contexts: c_int,
    pub traffic_class: c_int,
}

/// Properties of a group, `ncclRmaProperties_v16_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RmaProperties {
    /// Whether a signal makes all puts visible that arrived before, from any rank.
    pub flushes_all_puts_on_any_signal: bool,
}

/// Version 14 of the interface.
#[derive(Debug)]
pub struct V14;
/// Version 15 of the interface.
#[derive(Debug)]
pub struct V15;
/// Version 16 of the interface.
#[derive(Debug)]
pub struct V16;

impl Version for V14 {
    type Query = ();
    type Iput = Iput14;
    type IputSignal = IputSignal14;
    const QUERY: () = ();
    const IPUT: Iput14 = iput_14;
    const IPUT_SIGNAL: IputSignal14 = iput_signal_14;
    const IGET: Iput14 = iget_14;
}

impl Version for V15 {
    type Query = ();
    type Iput = Iput15;
    type IputSignal = IputSignal15;
    const QUERY: () = ();
    const IPUT: Iput15 = iput;
    const IPUT_SIGNAL: IputSignal15 = iput_signal;
    const IGET: Iput15 = iget;
}

impl Version for V16 {
    type Query = GetRmaProperties;
    type Iput = Iput15;
    type IputSignal = IputSignal15;
    const QUERY: GetRmaProperties = get_rma_properties;
    const IPUT: Iput15 = iput;
    const IPUT_SIGNAL: IputSignal15 = iput_signal;
    const IGET: Iput15 = iget;
}

const _: () = {
    assert!(size_of::<Rma<V14>>() == 21 * size_of::<usize>());
    assert!(size_of::<Rma<V15>>() == 21 * size_of::<usize>());
    assert!(size_of::<Rma<V16>>() == 22 * size_of::<usize>());
    assert!(core::mem::offset_of!(Rma<V14>, iput) == 13 * size_of::<usize>());
    assert!(core::mem::offset_of!(Rma<V15>, iput) == 13 * size_of::<usize>());
    assert!(core::mem::offset_of!(Rma<V16>, iput) == 14 * size_of::<usize>());
    assert!(core::mem::offset_of!(Rma<V14>, finalize) == 20 * size_of::<usize>());
    assert!(core::mem::offset_of!(Rma<V16>, get_rma_properties) == 3 * size_of::<usize>());
    assert!(core::mem::offset_of!(Properties<V12>, net_device_type) == 56);
};

#[unsafe(no_mangle)]
pub static ncclRmaPlugin_v14: Rma<V14> = Rma::TABLE;
#[unsafe(no_mangle)]
pub static ncclRmaPlugin_v15: Rma<V15> = Rma::TABLE;
#[unsafe(no_mangle)]
pub static ncclRmaPlugin_v16: Rma<V16> = Rma::TABLE;

static COMMUNICATORS: Registry<Context> = Registry::new("communicator");
static LISTENERS: Registry<RmaListener> = Registry::new("listenComm");
static GROUPS: Registry<Communicator> = Registry::new("collComm");
static CONTEXTS: Registry<RmaContext> = Registry::new("context");
static WINDOWS: Registry<Window> = Registry::new("mhandle");

/// A group with the parts of the process that its contexts use.
struct Communicator {
    group: Arc<Group>,
    around: Around,
}

/// Returns the communicator's context, or one for all if the number is not this interface's.
fn communicator(number: Opaque) -> Result<Arc<Context>> {
    COMMUNICATORS.get(number).or_else(|_| Ok(plugin::get()?.context_of_all()))
}

/// Runs `body` for the table's function `name`, and writes what it returns.
///
/// # Safety
/// `out` is null or can be written.
unsafe fn returning<T>(name: &str, out: *mut T, body: impl FnOnce() -> Result<T>) -> Code {
    guarded(name, || {
        let out = not_null(out, "the result")?;
        // SAFETY: upheld by the caller.
        unsafe { out.write(body()?) };
        Ok(())
    })
}

/// Implements `init`. Without `LAXITY_RMA`, NCCL goes on with its own backend.
///
/// # Safety
/// `context` is null or can be written.
unsafe extern "C" fn init(context: OpaqueOut, comm_id: u64, logger: Option<Logger>) -> Code {
    log::set(logger);
    let mut is_on = false;
    let made = || {
        is_on = plugin::settings().one_sided;
        if !is_on {
            log::info("LAXITY_RMA is off: NCCL uses its own backend for one-sided operations");
            return Ok(ptr::null_mut());
        }
        let context = plugin::get_or_make()?.context(comm_id, TRAFFIC_CLASS_UNSET);
        Ok(COMMUNICATORS.add(context))
    };
    // SAFETY: upheld by the caller.
    let code = unsafe { returning("init", context, made) };
    if is_on { code } else { ASIDE }
}

/// Implements `finalize`. A communicator that was split off may still use the context.
unsafe extern "C" fn finalize(context: Opaque) -> Code {
    let _ = COMMUNICATORS.remove(context);
    super::SUCCESS
}

/// Implements `devices`.
///
/// # Safety
/// `count` is null or can be written.
unsafe extern "C" fn devices(count: *mut c_int) -> Code {
    let number = || {
        if !plugin::settings().one_sided {
            return Ok(0);
        }
        Ok(plugin::get()?.one_sided_devices() as c_int)
    };
    // SAFETY: upheld by the caller.
    unsafe { returning("devices", count, number) }
}

/// Implements `getProperties`.
///
/// # Safety
/// `properties` is null or can be written.
unsafe extern "C" fn get_properties(device: c_int, properties: *mut Properties<V12>) -> Code {
    let found = || Ok(Properties::one_sided(plugin::get()?.device(device)?, device));
    // SAFETY: upheld by the caller.
    unsafe { returning("getProperties", properties, found) }
}

/// Implements `getRmaProperties`.
///
/// # Safety
/// `properties` is null or can be written.
unsafe extern "C" fn get_rma_properties(comm: Opaque, properties: *mut RmaProperties) -> Code {
    // The safe answer. A signal is behind the puts of its own rank only.
    let found =
        || GROUPS.get(comm).map(|_| RmaProperties { flushes_all_puts_on_any_signal: false });
    // SAFETY: upheld by the caller.
    unsafe { returning("getRmaProperties", properties, found) }
}

/// Implements `listen`.
///
/// # Safety
/// `handle` is null or has 128 bytes. `listen_comm` is null or can be written.
unsafe extern "C" fn listen(
    context: Opaque,
    device: c_int,
    handle: Opaque,
    listen_comm: OpaqueOut,
) -> Code {
    let made = || {
        let handle = not_null(handle.cast::<[u8; HANDLE_BYTES]>(), "the handle")?;
        let listener = plugin::get()?.listen_one_sided(&*communicator(context)?, device)?;
        // SAFETY: upheld by the caller.
        unsafe { handle.write(listener.handle()) };
        Ok(LISTENERS.add(Arc::new(listener)))
    };
    // SAFETY: upheld by the caller.
    unsafe { returning("listen", listen_comm, made) }
}

/// Implements `connect`. Blocks until all ranks have called it.
///
/// # Safety
/// `handles` is null, or has a handle of 128 bytes for each of `ranks` ranks. `comm` is null or can
/// be written.
unsafe extern "C" fn connect(
    context: Opaque,
    handles: OpaqueOut,
    ranks: c_int,
    rank: c_int,
    listen_comm: Opaque,
    comm: OpaqueOut,
) -> Code {
    let made = || {
        let handles = not_null(handles, "the array of handles")?;
        if !(0..ranks).contains(&rank) || ranks > RANKS_MAX {
            return Err(Fault::Argument(format!("rank {rank} of {ranks}")));
        }
        let handle = |at: usize| {
            // SAFETY: upheld by the caller.
            let handle = unsafe { handles.add(at).read() }.cast::<[u8; HANDLE_BYTES]>();
            // SAFETY: upheld by the caller. Bytes have no alignment.
            not_null(handle, "a handle").map(|handle| unsafe { handle.read() })
        };
        let all: Vec<_> = (0..ranks as usize).map(handle).collect::<Result<_>>()?;
        let listener = LISTENERS.get(listen_comm)?;
        let around = plugin::get()?.around_one_sided(&*communicator(context)?, listener.device)?;
        let group = Group::connect(&listener, &all, rank as usize)?;
        Ok(GROUPS.add(Arc::new(Communicator { group, around })))
    };
    // SAFETY: upheld by the caller.
    unsafe { returning("connect", comm, made) }
}

/// Implements `createContext`.
///
/// # Safety
/// `config` is null or valid. `context` is null or can be written.
unsafe extern "C" fn create_context(
    comm: Opaque,
    config: *mut RmaConfig,
    context: OpaqueOut,
) -> Code {
    let made = || {
        let config = not_null(config, "the configuration")?;
        let of = GROUPS.get(comm)?;
        // SAFETY: upheld by the caller.
        let contexts = unsafe { (*config).contexts };
        RmaContext::new(&of.group, contexts, of.around.clone()).map(|made| CONTEXTS.add(made))
    };
    // SAFETY: upheld by the caller.
    unsafe { returning("createContext", context, made) }
}

/// Implements `regMrSym`. Blocks until all ranks have called it.
///
/// # Safety
/// `data` has `size` bytes until it is deregistered. `handle` is null or can be written.
unsafe extern "C" fn reg_mr_sym(
    comm: Opaque,
    data: Opaque,
    size: usize,
    kind: c_int,
    _flags: u64,
    handle: OpaqueOut,
) -> Code {
    let made = || {
        let registered = GROUPS.get(comm)?.group.register(data as usize, size, kind);
        registered.map(|window| WINDOWS.add(window))
    };
    // SAFETY: upheld by the caller.
    unsafe { returning("regMrSym", handle, made) }
}

/// Implements `regMrSymDmaBuf`. The properties offer no DMA-BUFs, so this fails on all ranks.
///
/// # Safety
/// The conditions of [`reg_mr_sym`] hold.
unsafe extern "C" fn reg_mr_sym_dma_buf(
    comm: Opaque,
    data: Opaque,
    size: usize,
    _kind: c_int,
    _offset: u64,
    _descriptor: c_int,
    flags: u64,
    handle: OpaqueOut,
) -> Code {
    let kind = crate::backend::POINTER_DMABUF;
    // SAFETY: upheld by the caller.
    unsafe { reg_mr_sym(comm, data, size, kind, flags, handle) }
}

/// Implements `deregMrSym`. The memory is not touched afterwards.
unsafe extern "C" fn dereg_mr_sym(comm: Opaque, handle: Opaque) -> Code {
    guarded("deregMrSym", || {
        let window = WINDOWS.remove(handle)?;
        GROUPS.get(comm)?.group.deregister(&window);
        Ok(())
    })
}

/// Implements `destroyContext`. Requests may be outstanding.
unsafe extern "C" fn destroy_context(context: Opaque) -> Code {
    guarded("destroyContext", || CONTEXTS.remove(context).map(|context| context.close()))
}

/// Implements `closeColl`.
unsafe extern "C" fn close_coll(comm: Opaque) -> Code {
    guarded("closeColl", || GROUPS.remove(comm).map(|comm| comm.group.close()))
}

/// Implements `closeListen`.
unsafe extern "C" fn close_listen(listen_comm: Opaque) -> Code {
    guarded("closeListen", || LISTENERS.remove(listen_comm).map(drop))
}

/// Returns both ends of a transfer, unless it has no bytes.
fn ends(near: (Opaque, u64), far: (Opaque, u64), bytes: usize) -> Result<Option<Origin>> {
    if bytes == 0 {
        return Ok(None);
    }
    Ok(Some(Origin { near: side(near)?, far: side(far)? }))
}

fn side((handle, offset): (Opaque, u64)) -> Result<Side> {
    Ok(Side { window: WINDOWS.get(handle)?, offset })
}

/// Implements `iput` since v15. The flags say whether more follows, which changes nothing here.
///
/// # Safety
/// `request` is null or can be written.
unsafe extern "C" fn iput(
    context: Opaque,
    number: c_int,
    offset: u64,
    source: Opaque,
    bytes: usize,
    far_offset: u64,
    target: Opaque,
    rank: u32,
    _flags: u32,
    request: OpaqueOut,
) -> Code {
    let taken = || {
        let ends = ends((source, offset), (target, far_offset), bytes)?;
        let put = Put { ends, bytes: bytes as u64, signal: None };
        CONTEXTS.get(context)?.put(number, rank, put)
    };
    // SAFETY: upheld by the caller.
    unsafe { returning("iput", request, taken) }
}

/// Implements `iputSignal` since v15. Every signal is strong: operations of a context and rank keep
/// their order.
///
/// # Safety
/// `request` is null or can be written.
unsafe extern "C" fn iput_signal(
    context: Opaque,
    number: c_int,
    offset: u64,
    source: Opaque,
    bytes: usize,
    far_offset: u64,
    target: Opaque,
    rank: u32,
    signal_offset: u64,
    signal: Opaque,
    value: u64,
    operation: u32,
    _strong: bool,
    _flags: u32,
    request: OpaqueOut,
) -> Code {
    let taken = || {
        let value = match operation {
            SIGNAL_INC => 1,
            SIGNAL_ADD => value,
            other => return Err(Fault::Argument(format!("signal operation {other}"))),
        };
        let ends = ends((source, offset), (target, far_offset), bytes)?;
        let signal = Some((side((signal, signal_offset))?, value));
        let put = Put { ends, bytes: bytes as u64, signal };
        CONTEXTS.get(context)?.put(number, rank, put)
    };
    // SAFETY: upheld by the caller.
    unsafe { returning("iputSignal", request, taken) }
}

/// Implements `iget` since v15.
///
/// # Safety
/// `request` is null or can be written.
unsafe extern "C" fn iget(
    context: Opaque,
    number: c_int,
    far_offset: u64,
    source: Opaque,
    bytes: usize,
    offset: u64,
    target: Opaque,
    rank: u32,
    _flags: u32,
    request: OpaqueOut,
) -> Code {
    let taken = || {
        let ends = ends((target, offset), (source, far_offset), bytes)?;
        CONTEXTS.get(context)?.get(number, rank, ends.as_ref(), bytes as u64)
    };
    // SAFETY: upheld by the caller.
    unsafe { returning("iget", request, taken) }
}

/// Implements `iput` of v14.
///
/// # Safety
/// The conditions of [`iput`] hold.
unsafe extern "C" fn iput_14(
    context: Opaque,
    number: c_int,
    offset: u64,
    source: Opaque,
    bytes: usize,
    far_offset: u64,
    target: Opaque,
    rank: u32,
    request: OpaqueOut,
) -> Code {
    // SAFETY: upheld by the caller.
    unsafe { iput(context, number, offset, source, bytes, far_offset, target, rank, 0, request) }
}

/// Implements `iputSignal` of v14.
///
/// # Safety
/// The conditions of [`iput_signal`] hold.
unsafe extern "C" fn iput_signal_14(
    context: Opaque,
    number: c_int,
    offset: u64,
    source: Opaque,
    bytes: usize,
    far_offset: u64,
    target: Opaque,
    rank: u32,
    signal_offset: u64,
    signal: Opaque,
    value: u64,
    operation: u32,
    strong: bool,
    request: OpaqueOut,
) -> Code {
    // SAFETY: upheld by the caller.
    unsafe {
        iput_signal(
            context, number, offset, source, bytes, far_offset, target, rank, signal_offset,
            signal, value, operation, strong, 0, request,
        )
    }
}

/// Implements `iget` of v14.
///
/// # Safety
/// The conditions of [`iget`] hold.
unsafe extern "C" fn iget_14(
    context: Opaque,
    number: c_int,
    far_offset: u64,
    source: Opaque,
    bytes: usize,
    offset: u64,
    target: Opaque,
    rank: u32,
    request: OpaqueOut,
) -> Code {
    // SAFETY: upheld by the caller.
    unsafe { iget(context, number, far_offset, source, bytes, offset, target, rank, 0, request) }
}

/// Implements `iflush`. The CPU writes the data of a get, so they are visible when it is done. A
/// null request is done.
///
/// # Safety
/// `request` is null or can be written.
unsafe extern "C" fn iflush(
    context: Opaque,
    _number: c_int,
    _handle: Opaque,
    _rank: u32,
    request: OpaqueOut,
) -> Code {
    let taken = || CONTEXTS.get(context).map(|_| ptr::null_mut());
    // SAFETY: upheld by the caller.
    unsafe { returning("iflush", request, taken) }
}

/// Implements `test`.
///
/// # Safety
/// `done` is null or can be written.
unsafe extern "C" fn test(_comm: Opaque, request: Opaque, done: *mut c_int) -> Code {
    // SAFETY: upheld by the caller.
    unsafe { returning("test", done, || test_request(request).map(c_int::from)) }
}

/// Implements `rmaProgress`.
unsafe extern "C" fn rma_progress(context: Opaque) -> Code {
    guarded("rmaProgress", || CONTEXTS.get(context).map(|context| context.progress()))
}

/// Implements `queryLastError`.
///
/// # Safety
/// `failed` is null or can be written.
unsafe extern "C" fn query_last_error(context: Opaque, failed: *mut bool) -> Code {
    let found = || CONTEXTS.get(context).map(|context| context.has_failed());
    // SAFETY: upheld by the caller.
    unsafe { returning("queryLastError", failed, found) }
}
