//! The slots of NCCL's network tables, and the trait that describes how versions differ. The
//! functions in the slots name their arguments.

use core::ffi::{c_char, c_int};
use core::ptr;

use super::{Code, NAME, Name, Opaque, OpaqueOut, connections as calls, transfers};
use crate::backend::Device;
use crate::log::Logger;
use crate::origin::Callback;

/// The device type without GPU offload, `NCCL_NET_DEVICE_HOST`.
const DEVICE_HOST: c_int = 0;
/// The version of a device without GPU offload, `NCCL_NET_DEVICE_INVALID_VERSION`.
const DEVICE_VERSION: c_int = 0;
/// The device type whose operations a GPU starts by way of a thread, `NCCL_NET_DEVICE_GIN_PROXY`.
const DEVICE_PROXY: c_int = 2;
/// The version of such a device, `NCCL_GIN_PROXY_VERSION`.
const DEVICE_PROXY_VERSION: c_int = 100;

/// A slot that this plugin leaves empty.
pub type Empty = Option<unsafe extern "C" fn()>;

/// The type of `init` up to v9.
pub type Init = unsafe extern "C" fn(Option<Logger>) -> Code;
/// The type of `init` in v10.
pub type InitProfiled = unsafe extern "C" fn(Option<Logger>, Option<Callback>) -> Code;
/// The type of `init` since v11.
pub type InitContext =
    unsafe extern "C" fn(OpaqueOut, u64, *mut CommConfig, Option<Logger>, Option<Callback>) -> Code;
/// The type of `listen` up to v10.
pub type Listen = unsafe extern "C" fn(c_int, Opaque, OpaqueOut) -> Code;
/// The type of `listen` since v11.
pub type ListenContext = unsafe extern "C" fn(Opaque, c_int, Opaque, OpaqueOut) -> Code;
/// The type of `connect` up to v9.
pub type Connect = unsafe extern "C" fn(c_int, Opaque, OpaqueOut, OpaqueOut) -> Code;
/// The type of `connect` in v10.
pub type ConnectConfig =
    unsafe extern "C" fn(c_int, *mut CommConfig, Opaque, OpaqueOut, OpaqueOut) -> Code;
/// The type of `connect` since v11.
pub type ConnectContext = unsafe extern "C" fn(Opaque, c_int, Opaque, OpaqueOut, OpaqueOut) -> Code;
/// The type of `regMr`. Sizes are `int` in v7.
pub type RegMr<Size> = unsafe extern "C" fn(Opaque, Opaque, Size, c_int, OpaqueOut) -> Code;
/// The type of `isend` up to v9. Sizes are `int` up to v8.
pub type Isend<Size> = unsafe extern "C" fn(Opaque, Opaque, Size, c_int, Opaque, OpaqueOut) -> Code;
/// The type of `isend` since v10.
pub type IsendProfiled =
    unsafe extern "C" fn(Opaque, Opaque, usize, c_int, Opaque, Opaque, OpaqueOut) -> Code;
/// The type of `irecv` up to v9. Sizes are `int` up to v8.
pub type Irecv<Size> = unsafe extern "C" fn(
    Opaque,
    c_int,
    OpaqueOut,
    *mut Size,
    *mut c_int,
    OpaqueOut,
    OpaqueOut,
) -> Code;
/// The type of `irecv` since v10.
pub type IrecvProfiled = unsafe extern "C" fn(
    Opaque,
    c_int,
    OpaqueOut,
    *mut usize,
    *mut c_int,
    OpaqueOut,
    OpaqueOut,
    OpaqueOut,
) -> Code;

/// The parts of a table that differ between versions: types and functions of some slots, and fields
/// of the properties.
pub trait Version: 'static {
    type Init;
    type Listen;
    type Connect;
    type RegMr;
    type Isend;
    type Irecv;
    /// The type of the slots after `irecvConsumed`.
    type Last;
    /// Fields of the properties between `ptrSupport` and `speed`.
    type Flags: Fields;
    /// Fields of the properties after `netDeviceVersion`.
    type ExtraFields: Fields;

    const INIT: Self::Init;
    const LISTEN: Self::Listen;
    const CONNECT: Self::Connect;
    const REG_MR: Self::RegMr;
    const ISEND: Self::Isend;
    const IRECV: Self::Irecv;
    const LAST: Self::Last;
}

/// Fields of the properties that not all versions have.
pub trait Fields {
    fn of(device: &Device, number: c_int) -> Self;
}

impl Fields for () {
    fn of(_device: &Device, _number: c_int) {}
}

/// A network's table of functions, `ncclNet_vN_t`.
#[repr(C)]
pub struct Net<V: Version> {
    name: Name,
    init: V::Init,
    devices: unsafe extern "C" fn(*mut c_int) -> Code,
    get_properties: unsafe extern "C" fn(c_int, *mut Properties<V>) -> Code,
    listen: V::Listen,
    connect: V::Connect,
    accept: unsafe extern "C" fn(Opaque, OpaqueOut, OpaqueOut) -> Code,
    reg_mr: V::RegMr,
    reg_mr_dma_buf:
        unsafe extern "C" fn(Opaque, Opaque, usize, c_int, u64, c_int, OpaqueOut) -> Code,
    dereg_mr: unsafe extern "C" fn(Opaque, Opaque) -> Code,
    isend: V::Isend,
    irecv: V::Irecv,
    iflush:
        unsafe extern "C" fn(Opaque, c_int, OpaqueOut, *mut c_int, OpaqueOut, OpaqueOut) -> Code,
    test: unsafe extern "C" fn(Opaque, *mut c_int, *mut c_int) -> Code,
    close_send: unsafe extern "C" fn(Opaque) -> Code,
    close_receive: unsafe extern "C" fn(Opaque) -> Code,
    close_listen: unsafe extern "C" fn(Opaque) -> Code,
    get_device_mr: Empty,
    irecv_consumed: Empty,
    last: V::Last,
}

impl<V: Version> Net<V> {
    pub const TABLE: Self = Self {
        name: NAME,
        init: V::INIT,
        devices: calls::devices,
        get_properties: calls::get_properties::<V>,
        listen: V::LISTEN,
        connect: V::CONNECT,
        accept: calls::accept,
        reg_mr: V::REG_MR,
        reg_mr_dma_buf: transfers::reg_mr_dma_buf,
        dereg_mr: transfers::dereg_mr,
        isend: V::ISEND,
        irecv: V::IRECV,
        iflush: transfers::iflush,
        test: transfers::test,
        close_send: calls::close_send,
        close_receive: calls::close_receive,
        close_listen: calls::close_listen,
        get_device_mr: None,
        irecv_consumed: None,
        last: V::LAST,
    };
}

/// The last slots of a table since v11.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ContextSlots {
    /// `makeVDevice`, by which NCCL merges NICs. This plugin doesn't support it.
    make_virtual_device: Empty,
    finalize: unsafe extern "C" fn(Opaque) -> Code,
    set_attributes: unsafe extern "C" fn(Opaque, *mut Attributes) -> Code,
}

impl ContextSlots {
    pub const ALL: Self = Self {
        make_virtual_device: None,
        finalize: calls::finalize,
        set_attributes: calls::set_attributes,
    };
}

/// A device's properties, `ncclNetProperties_vN_t`.
#[repr(C)]
#[derive(Debug)]
pub struct Properties<V: Version> {
    name: *mut c_char,
    pci_path: *mut c_char,
    guid: u64,
    ptr_support: c_int,
    flags: V::Flags,
    speed_mbit: c_int,
    port: c_int,
    pub(super) latency_us: f32,
    max_comms: c_int,
    pub(super) max_recvs: c_int,
    pub(super) net_device_type: c_int,
    net_device_version: c_int,
    pub(super) rest: V::ExtraFields,
}

impl<V: Version> Properties<V> {
    pub(super) fn new(device: &Device, number: c_int) -> Self {
        let pci_path = device.pci_path.as_ref();
        Self {
            name: device.name.as_ptr().cast_mut(),
            pci_path: pci_path.map_or(ptr::null_mut(), |path| path.as_ptr().cast_mut()),
            guid: device.guid,
            ptr_support: device.pointers,
            flags: V::Flags::of(device, number),
            speed_mbit: device.speed_mbit,
            port: device.port,
            latency_us: device.latency_us,
            max_comms: device.comms_max,
            // With more, a receive that waits would delay others on its connection.
            max_recvs: 1,
            net_device_type: DEVICE_HOST,
            net_device_version: DEVICE_VERSION,
            rest: V::ExtraFields::of(device, number),
        }
    }

    /// Returns a device's properties for one-sided operations.
    pub(super) fn one_sided(device: &Device, number: c_int) -> Self {
        Self {
            max_recvs: crate::rma::RECEIVES_MAX,
            net_device_type: DEVICE_PROXY,
            net_device_version: DEVICE_PROXY_VERSION,
            ..Self::new(device, number)
        }
    }
}

/// The fields `regIsGlobal` and `forceFlush`, since v9.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Flags {
    reg_is_global: c_int,
    force_flush: c_int,
}

impl Fields for Flags {
    fn of(device: &Device, _number: c_int) -> Self {
        Self {
            reg_is_global: device.registers_globally.into(),
            force_flush: device.force_flush.into(),
        }
    }
}

/// Fields of the properties since v9. Virtual devices have up to 4 devices, and 8 since v12.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NicLimits<const DEVICES: usize> {
    /// Number of devices in `ncclNetVDeviceProps_vN_t`.
    virtual_count: c_int,
    virtual_devices: [c_int; DEVICES],
    max_p2p_bytes: usize,
    max_coll_bytes: usize,
}

impl<const DEVICES: usize> Fields for NicLimits<DEVICES> {
    fn of(device: &Device, number: c_int) -> Self {
        // A NIC that is not merged consists of itself.
        let mut virtual_devices = [0; DEVICES];
        virtual_devices[0] = number;
        Self {
            virtual_count: 1,
            virtual_devices,
            max_p2p_bytes: device.message_max,
            max_coll_bytes: device.message_max,
        }
    }
}

/// A communicator's configuration, `ncclNetCommConfig_vN_t`, since v10.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CommConfig {
    pub(super) traffic_class: c_int,
}

/// A communicator's attributes, `ncclNetAttr_vN_t`, since v11. The plugin uses only the operation.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Attributes {
    peers_and_flows: [i32; 8],
    pub(super) op: u32,
    algorithm: u32,
    protocol: u32,
}

const _: () = assert!(size_of::<Attributes>() == 44);
