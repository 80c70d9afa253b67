//! `ncclNet_v12_t` and the types that it uses, as NCCL 2.30 to 2.32 declare them (`net_v12.h`,
//! `net_device.h`, `common.h`, `err.h`).

use std::ffi::{c_char, c_int, c_void};

pub const HANDLE_BYTES: usize = 128;
pub(crate) const SYMBOL: &str = "ncclNetPlugin_v12";
pub(crate) const PTR_HOST: c_int = 1;

/// The traffic class of a communicator that has none, `NCCL_NET_TRAFFIC_CLASS_UNDEF`.
pub(crate) const TRAFFIC_CLASS_UNDEFINED: c_int = -1;

#[repr(C)]
pub(crate) struct CommConfig {
    pub(crate) traffic_class: c_int,
}

/// The logger, `ncclDebugLogger_t`. It is variadic, so `logger.c` defines it.
pub(crate) type Logger = unsafe extern "C" fn(
    level: c_int,
    subsystems: std::ffi::c_ulong,
    file: *const c_char,
    line: c_int,
    format: *const c_char,
    ...
);

pub(crate) type ProfilerCallback = unsafe extern "C" fn(
    event: *mut *mut c_void,
    kind: c_int,
    parent: *mut c_void,
    plugin: i64,
    data: *mut c_void,
) -> c_int;

pub(crate) type Init = unsafe extern "C" fn(
    context: *mut *mut c_void,
    comm_id: u64,
    config: *mut CommConfig,
    logger: Logger,
    profiler: ProfilerCallback,
) -> c_int;
pub(crate) type Devices = unsafe extern "C" fn(count: *mut c_int) -> c_int;
pub(crate) type Listen = unsafe extern "C" fn(
    context: *mut c_void,
    device: c_int,
    handle: *mut c_void,
    listener: *mut *mut c_void,
) -> c_int;
pub(crate) type Connect = unsafe extern "C" fn(
    context: *mut c_void,
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    offload: *mut *mut c_void,
) -> c_int;
pub(crate) type Accept = unsafe extern "C" fn(
    listener: *mut c_void,
    comm: *mut *mut c_void,
    offload: *mut *mut c_void,
) -> c_int;
pub(crate) type Register = unsafe extern "C" fn(
    comm: *mut c_void,
    data: *mut c_void,
    bytes: usize,
    kind: c_int,
    memory: *mut *mut c_void,
) -> c_int;
pub(crate) type Deregister = unsafe extern "C" fn(comm: *mut c_void, memory: *mut c_void) -> c_int;
pub(crate) type Isend = unsafe extern "C" fn(
    comm: *mut c_void,
    data: *mut c_void,
    bytes: usize,
    tag: c_int,
    memory: *mut c_void,
    profiler_parent: *mut c_void,
    request: *mut *mut c_void,
) -> c_int;
pub(crate) type Receive = unsafe extern "C" fn(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    bytes: *mut usize,
    tags: *mut c_int,
    memory: *mut *mut c_void,
    profiler_parents: *mut *mut c_void,
    request: *mut *mut c_void,
) -> c_int;
pub(crate) type Test =
    unsafe extern "C" fn(request: *mut c_void, done: *mut c_int, bytes: *mut c_int) -> c_int;
pub(crate) type Close = unsafe extern "C" fn(comm: *mut c_void) -> c_int;
pub(crate) type Finalize = unsafe extern "C" fn(context: *mut c_void) -> c_int;

/// A function that is not called here, or none.
type Unused = Option<unsafe extern "C" fn()>;

/// The table `ncclNet_v12_t` of a plugin that has all functions of [`NEEDED`].
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct NetTable {
    name: *const c_char,
    pub(crate) init: Init,
    pub(crate) devices: Devices,
    get_properties: Unused,
    pub(crate) listen: Listen,
    pub(crate) connect: Connect,
    pub(crate) accept: Accept,
    pub(crate) register: Register,
    register_dma_buf: Unused,
    pub(crate) deregister: Deregister,
    pub(crate) send: Isend,
    pub(crate) receive: Receive,
    flush: Unused,
    pub(crate) test: Test,
    pub(crate) close_send: Close,
    pub(crate) close_receive: Close,
    pub(crate) close_listen: Close,
    get_device_memory: Unused,
    receive_consumed: Unused,
    make_virtual_device: Unused,
    pub(crate) finalize: Option<Finalize>,
    set_attributes: Unused,
}

pub(crate) const SLOTS: usize = size_of::<NetTable>() / size_of::<usize>();

/// The functions that a plugin must have: index in the table, and NCCL's name.
pub(crate) const NEEDED: [(usize, &str); 13] = [
    (1, "init"),
    (2, "devices"),
    (4, "listen"),
    (5, "connect"),
    (6, "accept"),
    (7, "regMr"),
    (9, "deregMr"),
    (10, "isend"),
    (11, "irecv"),
    (13, "test"),
    (14, "closeSend"),
    (15, "closeRecv"),
    (16, "closeListen"),
];

// The layout that C compilers give NCCL's headers on 64-bit machines.
const _: () = {
    assert!(size_of::<NetTable>() == 22 * 8);
    assert!(size_of::<CommConfig>() == 4);
};
