//! Version 8, of NCCL 2.20 to 2.23: like v7, with registrations of any size.

use core::ffi::{c_char, c_int, c_void};
use core::mem::offset_of;
use std::sync::Arc;
use std::sync::OnceLock;

use super::{self as abi, Code, DEVICE_HOST, DEVICE_VERSION, NAME, Name};
use crate::backend::Device;
use crate::context::Context;
use crate::log::Logger;
use crate::plugin;

/// `ncclNetProperties_v8_t`.
#[repr(C)]
#[derive(Debug)]
pub struct Properties {
    name: *mut c_char,
    pci_path: *mut c_char,
    guid: u64,
    ptr_support: c_int,
    reg_is_global: c_int,
    speed: c_int,
    port: c_int,
    latency: f32,
    max_comms: c_int,
    max_recvs: c_int,
    net_device_type: c_int,
    net_device_version: c_int,
}

/// `ncclNet_v8_t`.
#[repr(C)]
#[derive(Debug)]
pub struct Net {
    name: Name,
    init: unsafe extern "C" fn(Option<Logger>) -> Code,
    devices: unsafe extern "C" fn(*mut c_int) -> Code,
    get_properties: unsafe extern "C" fn(c_int, *mut Properties) -> Code,
    listen: unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> Code,
    connect: unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void, *mut *mut c_void) -> Code,
    accept: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut *mut c_void) -> Code,
    reg_mr: unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, *mut *mut c_void) -> Code,
    reg_mr_dma_buf: unsafe extern "C" fn(
        *mut c_void,
        *mut c_void,
        usize,
        c_int,
        u64,
        c_int,
        *mut *mut c_void,
    ) -> Code,
    dereg_mr: unsafe extern "C" fn(*mut c_void, *mut c_void) -> Code,
    isend: unsafe extern "C" fn(
        *mut c_void,
        *mut c_void,
        c_int,
        c_int,
        *mut c_void,
        *mut *mut c_void,
    ) -> Code,
    irecv: unsafe extern "C" fn(
        *mut c_void,
        c_int,
        *mut *mut c_void,
        *mut c_int,
        *mut c_int,
        *mut *mut c_void,
        *mut *mut c_void,
    ) -> Code,
    iflush: unsafe extern "C" fn(
        *mut c_void,
        c_int,
        *mut *mut c_void,
        *mut c_int,
        *mut *mut c_void,
        *mut *mut c_void,
    ) -> Code,
    test: unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> Code,
    close_send: unsafe extern "C" fn(*mut c_void) -> Code,
    close_receive: unsafe extern "C" fn(*mut c_void) -> Code,
    close_listen: unsafe extern "C" fn(*mut c_void) -> Code,
    get_device_mr: Option<unsafe extern "C" fn(*mut c_void, *mut c_void, *mut *mut c_void) -> Code>,
    irecv_consumed: Option<unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> Code>,
}

const _: () = {
    assert!(size_of::<Properties>() == 64);
    assert!(offset_of!(Properties, guid) == 16);
    assert!(offset_of!(Properties, latency) == 40);
    assert!(size_of::<Net>() == 19 * size_of::<usize>());
};

/// What NCCL looks for.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v8: Net = Net {
    name: NAME,
    init,
    devices: abi::devices,
    get_properties,
    listen,
    connect,
    accept: abi::accept,
    reg_mr: abi::reg_mr,
    reg_mr_dma_buf: abi::reg_mr_dma_buf,
    dereg_mr: abi::dereg_mr,
    isend,
    irecv,
    iflush: abi::iflush,
    test: abi::test,
    close_send: abi::close_send,
    close_receive: abi::close_receive,
    close_listen: abi::close_listen,
    get_device_mr: None,
    irecv_consumed: None,
};

unsafe extern "C" fn init(logger: Option<Logger>) -> Code {
    abi::initialise(logger, None)
}

unsafe extern "C" fn get_properties(device: c_int, properties: *mut Properties) -> Code {
    let fill = |device: &'static Device| Properties {
        name: device.name.as_ptr().cast_mut(),
        pci_path: abi::pci_path(device),
        guid: device.guid,
        ptr_support: device.pointers,
        reg_is_global: device.registers_globally.into(),
        speed: device.speed_mbit,
        port: device.port,
        latency: device.latency_us,
        max_comms: device.comms_max,
        // More than one shares a connection between receives, and gating one would hold up the
        // others.
        max_recvs: 1,
        net_device_type: DEVICE_HOST,
        net_device_version: DEVICE_VERSION,
    };
    // SAFETY: NCCL's pointer is null or valid.
    unsafe { abi::get_properties(device, properties, fill) }
}

unsafe extern "C" fn listen(device: c_int, handle: *mut c_void, comm: *mut *mut c_void) -> Code {
    // SAFETY: NCCL's pointers are null or valid.
    unsafe { abi::listen(device, handle, comm) }
}

/// All communicators are one.
fn context() -> Option<&'static Arc<Context>> {
    static CONTEXT: OnceLock<Arc<Context>> = OnceLock::new();
    let plugin = plugin::get().ok()?;
    Some(CONTEXT.get_or_init(|| plugin.context_of_all()))
}

unsafe extern "C" fn connect(
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    _device_comm: *mut *mut c_void,
) -> Code {
    let Some(context) = context() else {
        return abi::guarded("connect", || plugin::get().map(drop));
    };
    // SAFETY: NCCL's pointers are null or valid.
    unsafe { abi::connect(context, device, handle, comm) }
}

/// NCCL's sizes are never negative.
fn bytes(size: c_int) -> usize {
    usize::try_from(size).unwrap_or(0)
}

unsafe extern "C" fn isend(
    comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    tag: c_int,
    memory: *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    // SAFETY: NCCL's pointers are null or valid.
    unsafe { abi::isend_v9(comm, data, bytes(size), tag, memory, request) }
}

unsafe extern "C" fn irecv(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    tags: *mut c_int,
    memory: *mut *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    // SAFETY: NCCL's arrays have as many entries as it says.
    let size = |at| bytes(unsafe { sizes.add(at).read() });
    // SAFETY: as above, and its pointers are null or valid.
    unsafe { abi::receive(comm, count, data, size, tags, memory, request) }
}
