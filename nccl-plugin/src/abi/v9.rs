//! Version 9, of NCCL 2.24 and 2.25: sizes of any width, and virtual devices (which are NCCL's to
//! make only where a plugin can merge NICs: not this one).

use core::ffi::{c_char, c_int, c_void};
use core::mem::offset_of;
use std::sync::Arc;
use std::sync::OnceLock;

use super::{self as abi, Code, DEVICE_HOST, DEVICE_VERSION, NAME, Name};
use crate::backend::Device;
use crate::context::Context;
use crate::log::Logger;
use crate::plugin;

/// `ncclNetVDeviceProps_v9_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VirtualDevices {
    count: c_int,
    devices: [c_int; 4],
}

/// `ncclNetProperties_v9_t`.
#[repr(C)]
#[derive(Debug)]
pub struct Properties {
    name: *mut c_char,
    pci_path: *mut c_char,
    guid: u64,
    ptr_support: c_int,
    reg_is_global: c_int,
    force_flush: c_int,
    speed: c_int,
    port: c_int,
    latency: f32,
    max_comms: c_int,
    max_recvs: c_int,
    net_device_type: c_int,
    net_device_version: c_int,
    virtual_devices: VirtualDevices,
    max_p2p_bytes: usize,
    max_coll_bytes: usize,
}

/// `ncclNet_v9_t`.
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
        usize,
        c_int,
        *mut c_void,
        *mut *mut c_void,
    ) -> Code,
    irecv: unsafe extern "C" fn(
        *mut c_void,
        c_int,
        *mut *mut c_void,
        *mut usize,
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
    make_virtual_device: Option<unsafe extern "C" fn(*mut c_int, *mut VirtualDevices) -> Code>,
}

const _: () = {
    assert!(size_of::<Properties>() == 104);
    assert!(offset_of!(Properties, guid) == 16);
    assert!(offset_of!(Properties, latency) == 44);
    assert!(offset_of!(Properties, virtual_devices) == 64);
    assert!(offset_of!(Properties, max_p2p_bytes) == 88);
    assert!(size_of::<Net>() == 20 * size_of::<usize>());
};

/// What NCCL looks for.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v9: Net = Net {
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
    isend: abi::isend_v9,
    irecv: abi::irecv_v9,
    iflush: abi::iflush,
    test: abi::test,
    close_send: abi::close_send,
    close_receive: abi::close_receive,
    close_listen: abi::close_listen,
    get_device_mr: None,
    irecv_consumed: None,
    make_virtual_device: None,
};

unsafe extern "C" fn init(logger: Option<Logger>) -> Code {
    abi::initialise(logger, None)
}

unsafe extern "C" fn get_properties(number: c_int, properties: *mut Properties) -> Code {
    let fill = |device: &'static Device| Properties {
        name: device.name.as_ptr().cast_mut(),
        pci_path: abi::pci_path(device),
        guid: device.guid,
        ptr_support: device.pointers,
        reg_is_global: device.registers_globally.into(),
        force_flush: device.force_flush.into(),
        speed: device.speed_mbit,
        port: device.port,
        latency: device.latency_us,
        max_comms: device.comms_max,
        // More than one shares a connection between receives, and gating one would hold up the
        // others.
        max_recvs: 1,
        net_device_type: DEVICE_HOST,
        net_device_version: DEVICE_VERSION,
        virtual_devices: VirtualDevices {
            count: 1,
            devices: own_number(number),
        },
        max_p2p_bytes: device.message_max,
        max_coll_bytes: device.message_max,
    };
    // SAFETY: NCCL's pointer is null or valid.
    unsafe { abi::get_properties(number, properties, fill) }
}

/// A NIC that is not merged of others consists of itself.
fn own_number(number: c_int) -> [c_int; 4] {
    let mut devices = [0; 4];
    devices[0] = number;
    devices
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
