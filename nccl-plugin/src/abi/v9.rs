//! Version 9, of NCCL 2.24 and 2.25. It has sizes of any width, and virtual devices.

use core::mem::offset_of;

use super::connections::{connect, init, listen};
use super::table::{Connect, Empty, Flags, Init, Irecv, Isend, Listen, Net, NicLimits, Properties};
use super::table::{RegMr, Version};
use super::transfers::{irecv, isend, reg_mr};

/// Version 9 of the network interface.
#[derive(Debug)]
pub struct V9;

impl Version for V9 {
    type Init = Init;
    type Listen = Listen;
    type Connect = Connect;
    type RegMr = RegMr<usize>;
    type Isend = Isend<usize>;
    type Irecv = Irecv<usize>;
    /// `makeVDevice`, by which NCCL merges NICs. This plugin doesn't support it.
    type Last = Empty;
    type Flags = Flags;
    type ExtraFields = NicLimits<4>;

    const INIT: Init = init;
    const LISTEN: Listen = listen;
    const CONNECT: Connect = connect;
    const REG_MR: RegMr<usize> = reg_mr;
    const ISEND: Isend<usize> = isend;
    const IRECV: Irecv<usize> = irecv;
    const LAST: Empty = None;
}

const _: () = {
    assert!(size_of::<Properties<V9>>() == 104);
    assert!(offset_of!(Properties<V9>, latency_us) == 44);
    assert!(offset_of!(Properties<V9>, rest) == 64);
    assert!(size_of::<Net<V9>>() == 20 * size_of::<usize>());
};

#[unsafe(no_mangle)]
pub static ncclNetPlugin_v9: Net<V9> = Net::TABLE;
