//! Version 10, of NCCL 2.26 and 2.27. It is v9 with the profiler's handle in each `isend`, and the
//! communicator's traffic class in `connect`.

use core::mem::offset_of;

use super::connections::{connect_config, init_profiled, listen};
use super::table::{ConnectConfig, Empty, Flags, InitProfiled, IrecvProfiled, IsendProfiled};
use super::table::{Listen, Net, NicLimits, Properties, RegMr, Version};
use super::transfers::{irecv_profiled, isend_profiled, reg_mr};

/// Version 10 of the network interface.
#[derive(Debug)]
pub struct V10;

impl Version for V10 {
    type Init = InitProfiled;
    type Listen = Listen;
    type Connect = ConnectConfig;
    type RegMr = RegMr<usize>;
    type Isend = IsendProfiled;
    type Irecv = IrecvProfiled;
    /// The type of `makeVDevice`, as in v9.
    type Last = Empty;
    type Flags = Flags;
    type ExtraFields = NicLimits<4>;

    const INIT: InitProfiled = init_profiled;
    const LISTEN: Listen = listen;
    const CONNECT: ConnectConfig = connect_config;
    const REG_MR: RegMr<usize> = reg_mr;
    const ISEND: IsendProfiled = isend_profiled;
    const IRECV: IrecvProfiled = irecv_profiled;
    const LAST: Empty = None;
}

const _: () = {
    assert!(size_of::<Properties<V10>>() == 104);
    assert!(offset_of!(Properties<V10>, latency_us) == 44);
    assert!(offset_of!(Properties<V10>, rest) == 64);
    assert!(size_of::<Net<V10>>() == 20 * size_of::<usize>());
};

#[unsafe(no_mangle)]
pub static ncclNetPlugin_v10: Net<V10> = Net::TABLE;
