//! Version 12, of NCCL 2.30 to 2.32: like v11, with wider virtual devices, rails and planes.

use core::ffi::{c_char, c_int, c_void};
use core::mem::offset_of;

use super::{self as abi, Code, DEVICE_HOST, DEVICE_VERSION, NAME, Name};
use crate::backend::Device;
use crate::context::TRAFFIC_CLASS_UNSET;
use crate::log::Logger;
use crate::origin::Callback;

/// `NCCL_NET_ID_UNDEF`.
const UNKNOWN: i16 = -1;

/// `ncclNetVDeviceProps_v12_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VirtualDevices {
    count: c_int,
    devices: [c_int; 8],
}

/// `ncclNetCommConfig_v12_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CommConfig {
    traffic_class: c_int,
}

/// `ncclNetAttr_v12_t`, of which only the operation is of use here.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Attributes {
    peers_and_flows: [i32; 8],
    op: u32,
    algorithm: u32,
    protocol: u32,
}

/// `ncclNetProperties_v12_t`.
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
    max_multi_request_size: c_int,
    rail_id: i16,
    plane_id: i16,
}

/// `ncclNet_v12_t`.
#[repr(C)]
#[derive(Debug)]
pub struct Net {
    name: Name,
    init: unsafe extern "C" fn(
        *mut *mut c_void,
        u64,
        *mut CommConfig,
        Option<Logger>,
        Option<Callback>,
    ) -> Code,
    devices: unsafe extern "C" fn(*mut c_int) -> Code,
    get_properties: unsafe extern "C" fn(c_int, *mut Properties) -> Code,
    listen: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void) -> Code,
    connect: unsafe extern "C" fn(
        *mut c_void,
        c_int,
        *mut c_void,
        *mut *mut c_void,
        *mut *mut c_void,
    ) -> Code,
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
    finalize: unsafe extern "C" fn(*mut c_void) -> Code,
    set_attributes: unsafe extern "C" fn(*mut c_void, *mut Attributes) -> Code,
}

const _: () = {
    assert!(size_of::<Properties>() == 128);
    assert!(offset_of!(Properties, guid) == 16);
    assert!(offset_of!(Properties, latency) == 44);
    assert!(offset_of!(Properties, virtual_devices) == 64);
    assert!(offset_of!(Properties, max_p2p_bytes) == 104);
    assert!(size_of::<Attributes>() == 44);
    assert!(size_of::<Net>() == 22 * size_of::<usize>());
};

/// What NCCL looks for.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v12: Net = Net {
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
    isend: abi::isend_v10,
    irecv: abi::irecv_v10,
    iflush: abi::iflush,
    test: abi::test,
    close_send: abi::close_send,
    close_receive: abi::close_receive,
    close_listen: abi::close_listen,
    get_device_mr: None,
    irecv_consumed: None,
    make_virtual_device: None,
    finalize: abi::finalize,
    set_attributes,
};

unsafe extern "C" fn init(
    context: *mut *mut c_void,
    communicator: u64,
    config: *mut CommConfig,
    logger: Option<Logger>,
    callback: Option<Callback>,
) -> Code {
    // SAFETY: NCCL's pointers are null or valid. The configuration is gone after the call.
    unsafe {
        let config = config.as_ref();
        let class = config.map_or(TRAFFIC_CLASS_UNSET, |config| config.traffic_class);
        abi::initialise_context(context, communicator, class, logger, callback)
    }
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
        max_multi_request_size: 1,
        rail_id: UNKNOWN,
        plane_id: UNKNOWN,
    };
    // SAFETY: NCCL's pointer is null or valid.
    unsafe { abi::get_properties(number, properties, fill) }
}

/// A NIC that is not merged of others consists of itself.
fn own_number(number: c_int) -> [c_int; 8] {
    let mut devices = [0; 8];
    devices[0] = number;
    devices
}

unsafe extern "C" fn listen(
    _context: *mut c_void,
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
) -> Code {
    // SAFETY: NCCL's pointers are null or valid.
    unsafe { abi::listen(device, handle, comm) }
}

unsafe extern "C" fn connect(
    context: *mut c_void,
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    _device_comm: *mut *mut c_void,
) -> Code {
    // SAFETY: NCCL's pointers are null or valid, its contexts are ours.
    unsafe { abi::connect_in(context, device, handle, comm) }
}

unsafe extern "C" fn set_attributes(context: *mut c_void, attributes: *mut Attributes) -> Code {
    abi::guarded("setNetAttr", || {
        // SAFETY: NCCL's pointers are null or valid, its contexts are ours.
        unsafe {
            let context = abi::context_at(context)?;
            if let Some(attributes) = attributes.as_ref() {
                context.set_attribute(attributes.op);
            }
        }
        Ok(())
    })
}
