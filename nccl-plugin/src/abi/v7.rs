//! Version 7, of NCCL 2.19. It is the oldest version that the plugin supports. Sizes are `int`.

use core::ffi::c_int;
use core::mem::offset_of;

use super::connections::{connect, init, listen};
use super::table::{Connect, Init, Irecv, Isend, Listen, Net, Properties, RegMr, Version};
use super::transfers::{irecv, isend, reg_mr};

/// Version 7 of the network interface.
#[derive(Debug)]
pub struct V7;

impl Version for V7 {
    type Init = Init;
    type Listen = Listen;
    type Connect = Connect;
    type RegMr = RegMr<c_int>;
    type Isend = Isend<c_int>;
    type Irecv = Irecv<c_int>;
    type Last = ();
    type Flags = ();
    type ExtraFields = ();

    const INIT: Init = init;
    const LISTEN: Listen = listen;
    const CONNECT: Connect = connect;
    const REG_MR: RegMr<c_int> = reg_mr;
    const ISEND: Isend<c_int> = isend;
    const IRECV: Irecv<c_int> = irecv;
    const LAST: () = ();
}

const _: () = {
    assert!(size_of::<Properties<V7>>() == 56);
    assert!(offset_of!(Properties<V7>, latency_us) == 36);
    assert!(size_of::<Net<V7>>() == 19 * size_of::<usize>());
};

#[unsafe(no_mangle)]
pub static ncclNetPlugin_v7: Net<V7> = Net::TABLE;
