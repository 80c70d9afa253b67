//! Version 11, of NCCL 2.28 and 2.29: a context per communicator with attributes.

use core::ffi::c_int;
use core::mem::offset_of;

use super::connections::{connect_context, init_context, listen_context};
use super::table::{ConnectContext, ContextSlots, Fields, Flags, InitContext, IrecvProfiled};
use super::table::{IsendProfiled, Limits, ListenContext, Net, Properties, RegMr, Version};
use super::transfers::{irecv_profiled, isend_profiled, reg_mr};
use crate::backend::Device;

/// Version 11 of the network interface.
#[derive(Debug)]
pub struct V11;

/// Fields of the properties after `netDeviceVersion`.
#[repr(C)]
#[derive(Debug)]
pub struct ExtraFields {
    limits: Limits<4>,
    max_multi_request_size: c_int,
}

impl Fields for ExtraFields {
    fn of(device: &Device, number: c_int) -> Self {
        Self { limits: Limits::of(device, number), max_multi_request_size: 1 }
    }
}

impl Version for V11 {
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
    assert!(size_of::<Properties<V11>>() == 112);
    assert!(offset_of!(Properties<V11>, latency_us) == 44);
    assert!(offset_of!(Properties<V11>, rest) == 64);
    assert!(size_of::<Net<V11>>() == 22 * size_of::<usize>());
};

#[unsafe(no_mangle)]
pub static ncclNetPlugin_v11: Net<V11> = Net::TABLE;
