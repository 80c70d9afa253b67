//! Version 12, of NCCL 2.30 to 2.32. It is v11 with wider virtual devices, rails and planes.

use core::ffi::c_int;
use core::mem::offset_of;

use super::connections::{connect_context, init_context, listen_context};
use super::table::{ConnectContext, ContextSlots, Fields, Flags, InitContext, IrecvProfiled};
use super::table::{IsendProfiled, Limits, ListenContext, Net, Properties, RegMr, Version};
use super::transfers::{irecv_profiled, isend_profiled, reg_mr};
use crate::backend::Device;

/// The number of an unknown rail or plane, `NCCL_NET_ID_UNDEF`.
const UNKNOWN: i16 = -1;

/// Version 12 of the network interface.
#[derive(Debug)]
pub struct V12;

/// Fields of the properties after `netDeviceVersion`.
#[repr(C)]
#[derive(Debug)]
pub struct ExtraFields {
    limits: Limits<8>,
    max_multi_request_size: c_int,
    rail_id: i16,
    plane_id: i16,
}

impl Fields for ExtraFields {
    fn of(device: &Device, number: c_int) -> Self {
        Self {
            limits: Limits::of(device, number),
            max_multi_request_size: 1,
            rail_id: UNKNOWN,
            plane_id: UNKNOWN,
        }
    }
}

impl Version for V12 {
    type Init = InitContext;
    type Listen = ListenContext;
    type Connect = ConnectContext;
    type RegMr = RegMr<usize>;
    type Isend = IsendProfiled;
    type Irecv = IrecvProfiled;
    type Last = ContextSlots;
    type Flags = Flags;
    type ExtraFields = ExtraFields;

    const INIT: InitContext = init_context;
    const LISTEN: ListenContext = listen_context;
    const CONNECT: ConnectContext = connect_context;
    const REG_MR: RegMr<usize> = reg_mr;
    const ISEND: IsendProfiled = isend_profiled;
    const IRECV: IrecvProfiled = irecv_profiled;
    const LAST: ContextSlots = ContextSlots::ALL;
}

const _: () = {
    assert!(size_of::<Properties<V12>>() == 128);
    assert!(offset_of!(Properties<V12>, latency_us) == 44);
    assert!(offset_of!(Properties<V12>, rest) == 64);
    assert!(size_of::<Net<V12>>() == 22 * size_of::<usize>());
};

#[unsafe(no_mangle)]
pub static ncclNetPlugin_v12: Net<V12> = Net::TABLE;
