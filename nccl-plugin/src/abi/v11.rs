//! Version 11, of NCCL 2.28 and 2.29: a context per communicator with attributes. Version 12, of
//! NCCL 2.30 to 2.32, adds wider virtual devices, rails and planes.

use core::ffi::c_int;
use core::mem::offset_of;

use super::connections::{connect_context, init_context, listen_context};
use super::table::{ConnectContext, ContextSlots, Fields, Flags, InitContext, IrecvProfiled};
use super::table::{IsendProfiled, ListenContext, Net, NicLimits, Properties, RegMr, Version};
use super::transfers::{irecv_profiled, isend_profiled, reg_mr};
use crate::backend::Device;

/// The number of an unknown rail or plane, `NCCL_NET_ID_UNDEF`.
const UNKNOWN: i16 = -1;

/// A version of the network interface since v11. The parameters are those of [`ExtraFields`].
#[derive(Debug)]
pub struct ContextVersion<const DEVICES: usize, const IDS: usize>;

/// Version 11 of the network interface.
pub type V11 = ContextVersion<4, 0>;
/// Version 12 of the network interface.
pub type V12 = ContextVersion<8, 2>;

/// Fields of the properties after `netDeviceVersion`.
#[repr(C)]
#[derive(Debug)]
pub struct ExtraFields<const DEVICES: usize, const IDS: usize> {
    limits: NicLimits<DEVICES>,
    max_multi_request_size: c_int,
    /// The rail and the plane, since v12.
    ids: [i16; IDS],
}

impl<const DEVICES: usize, const IDS: usize> Fields for ExtraFields<DEVICES, IDS> {
    fn of(device: &Device, number: c_int) -> Self {
        let limits = NicLimits::of(device, number);
        Self { limits, max_multi_request_size: 1, ids: [UNKNOWN; IDS] }
    }
}

impl<const DEVICES: usize, const IDS: usize> Version for ContextVersion<DEVICES, IDS> {
    type Init = InitContext;
    type Listen = ListenContext;
    type Connect = ConnectContext;
    type RegMr = RegMr<usize>;
    type Isend = IsendProfiled;
    type Irecv = IrecvProfiled;
    type Last = ContextSlots;
    type Flags = Flags;
    type ExtraFields = ExtraFields<DEVICES, IDS>;

    const INIT: InitContext = init_context;
    const LISTEN: ListenContext = listen_context;
    const CONNECT: ConnectContext = connect_context;
    const REG_MR: RegMr<usize> = reg_mr;
    const ISEND: IsendProfiled = isend_profiled;
    const IRECV: IrecvProfiled = irecv_profiled;
    const LAST: ContextSlots = ContextSlots::ALL;
}

const _: () = {
    assert!(size_of::<Properties<V11>>() == 112);
    assert!(size_of::<Properties<V12>>() == 128);
    assert!(offset_of!(Properties<V11>, latency_us) == 44);
    assert!(offset_of!(Properties<V12>, latency_us) == 44);
    assert!(offset_of!(Properties<V11>, rest) == 64);
    assert!(offset_of!(Properties<V12>, rest) == 64);
    assert!(size_of::<Net<V11>>() == 22 * size_of::<usize>());
    assert!(size_of::<Net<V12>>() == 22 * size_of::<usize>());
};

#[unsafe(no_mangle)]
pub static ncclNetPlugin_v11: Net<V11> = Net::TABLE;
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v12: Net<V12> = Net::TABLE;
