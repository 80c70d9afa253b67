//! The differences between versions 7 to 12 of the network interface, and the exported tables.

use core::ffi::c_int;
use core::mem::offset_of;

use super::connections::{
    connect, connect_config, connect_context, init, init_context, init_profiled, listen,
    listen_context,
};
use super::table::{
    Connect, ConnectConfig, ConnectContext, ContextSlots, Empty, Fields, Flags, Init, InitContext,
    InitProfiled, Irecv, IrecvProfiled, Isend, IsendProfiled, Listen, ListenContext, Net,
    NicLimits, Properties, RegMr, Version,
};
use super::transfers::{irecv, irecv_profiled, isend, isend_profiled, reg_mr};
use crate::backend::Device;

/// Defines a version and exports its table: the type and the value of each slot that differs, and
/// the fields of the properties between `ptrSupport` and `speed` and after `netDeviceVersion`.
macro_rules! version {
    (
        $(#[$doc:meta])*
        $version:ident in $table:ident:
        $init:ty = $init_of:expr, $listen:ty = $listen_of:expr, $connect:ty = $connect_of:expr,
        $reg_mr:ty = $reg_mr_of:expr, $isend:ty = $isend_of:expr, $irecv:ty = $irecv_of:expr,
        $last:ty = $last_of:expr; $flags:ty, $extra_fields:ty
    ) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $version;

        impl Version for $version {
            type Init = $init;
            type Listen = $listen;
            type Connect = $connect;
            type RegMr = $reg_mr;
            type Isend = $isend;
            type Irecv = $irecv;
            type Last = $last;
            type Flags = $flags;
            type ExtraFields = $extra_fields;

            const INIT: $init = $init_of;
            const LISTEN: $listen = $listen_of;
            const CONNECT: $connect = $connect_of;
            const REG_MR: $reg_mr = $reg_mr_of;
            const ISEND: $isend = $isend_of;
            const IRECV: $irecv = $irecv_of;
            const LAST: $last = $last_of;
        }

        #[unsafe(no_mangle)]
        pub static $table: Net<$version> = Net::TABLE;
    };
}

version! {
    /// NCCL 2.19, the oldest that the plugin supports. Sizes are `int`.
    V7 in ncclNetPlugin_v7:
    Init = init, Listen = listen, Connect = connect,
    RegMr<c_int> = reg_mr, Isend<c_int> = isend, Irecv<c_int> = irecv,
    () = (); (), ()
}
version! {
    /// NCCL 2.20 to 2.23. Registrations have any size.
    V8 in ncclNetPlugin_v8:
    Init = init, Listen = listen, Connect = connect,
    RegMr<usize> = reg_mr, Isend<c_int> = isend, Irecv<c_int> = irecv,
    () = (); RegIsGlobal, ()
}
version! {
    /// NCCL 2.24 and 2.25. Messages have any size. The last slot is `makeVDevice`, by which NCCL
    /// merges NICs. This plugin doesn't support it.
    V9 in ncclNetPlugin_v9:
    Init = init, Listen = listen, Connect = connect,
    RegMr<usize> = reg_mr, Isend<usize> = isend, Irecv<usize> = irecv,
    Empty = None; Flags, NicLimits<4>
}
version! {
    /// NCCL 2.26 and 2.27, with the profiler's handle in each `isend`, and the communicator's
    /// traffic class in `connect`.
    V10 in ncclNetPlugin_v10:
    InitProfiled = init_profiled, Listen = listen, ConnectConfig = connect_config,
    RegMr<usize> = reg_mr, IsendProfiled = isend_profiled, IrecvProfiled = irecv_profiled,
    Empty = None; Flags, NicLimits<4>
}
version! {
    /// NCCL 2.28 and 2.29, with a context per communicator that has attributes.
    V11 in ncclNetPlugin_v11:
    InitContext = init_context, ListenContext = listen_context, ConnectContext = connect_context,
    RegMr<usize> = reg_mr, IsendProfiled = isend_profiled, IrecvProfiled = irecv_profiled,
    ContextSlots = ContextSlots::ALL; Flags, ContextFields<4, 0>
}
version! {
    /// NCCL 2.30 to 2.32, with wider virtual devices, rails and planes.
    V12 in ncclNetPlugin_v12:
    InitContext = init_context, ListenContext = listen_context, ConnectContext = connect_context,
    RegMr<usize> = reg_mr, IsendProfiled = isend_profiled, IrecvProfiled = irecv_profiled,
    ContextSlots = ContextSlots::ALL; Flags, ContextFields<8, 2>
}

/// The field `regIsGlobal` of v8.
#[repr(C)]
#[derive(Debug)]
pub struct RegIsGlobal(c_int);

impl Fields for RegIsGlobal {
    fn of(device: &Device, _number: c_int) -> Self {
        Self(device.registers_globally.into())
    }
}

/// The number of an unknown rail or plane, `NCCL_NET_ID_UNDEF`.
const UNKNOWN: i16 = -1;

/// Fields of the properties since v11.
#[repr(C)]
#[derive(Debug)]
pub struct ContextFields<const DEVICES: usize, const IDS: usize> {
    limits: NicLimits<DEVICES>,
    max_multi_request_size: c_int,
    /// The rail and the plane, since v12.
    ids: [i16; IDS],
}

impl<const DEVICES: usize, const IDS: usize> Fields for ContextFields<DEVICES, IDS> {
    fn of(device: &Device, number: c_int) -> Self {
        let limits = NicLimits::of(device, number);
        Self { limits, max_multi_request_size: 1, ids: [UNKNOWN; IDS] }
    }
}

/// Checks a table against the headers: the number of slots, the size of the properties, and the
/// offsets of `latency` and of the fields after `netDeviceVersion`.
const fn check<V: Version>(slots: usize, bytes: usize, latency: usize, extra_fields: usize) {
    assert!(size_of::<Net<V>>() == slots * size_of::<usize>());
    assert!(size_of::<Properties<V>>() == bytes);
    assert!(offset_of!(Properties<V>, latency_us) == latency);
    assert!(offset_of!(Properties<V>, rest) == extra_fields);
}

const _: () = {
    check::<V7>(19, 56, 36, 56);
    check::<V8>(19, 64, 40, 60);
    check::<V9>(20, 104, 44, 64);
    check::<V10>(20, 104, 44, 64);
    check::<V11>(22, 112, 44, 64);
    check::<V12>(22, 128, 44, 64);
};
