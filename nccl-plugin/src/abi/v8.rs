//! Version 8, of NCCL 2.20 to 2.23. It is v7 with registrations of any size.

use core::ffi::c_int;
use core::mem::offset_of;

use super::connections::{connect, init, listen};
use super::table::{Connect, Fields, Init, Irecv, Isend, Listen, Net, Properties, RegMr, Version};
use super::transfers::{irecv, isend, reg_mr};
use crate::backend::Device;

/// Version 8 of the network interface.
#[derive(Debug)]
pub struct V8;

/// Fields of the properties between `ptrSupport` and `speed`.
#[repr(C)]
#[derive(Debug)]
pub struct RegIsGlobal(c_int);

impl Fields for RegIsGlobal {
    fn of(device: &Device, _number: c_int) -> Self {
        Self(device.registers_globally.into())
    }
}

impl Version for V8 {
    type Init = Init;
    type Listen = Listen;
    type Connect = Connect;
    type RegMr = RegMr<usize>;
    type Isend = Isend<c_int>;
    type Irecv = Irecv<c_int>;
    type Last = ();
    type Flags = RegIsGlobal;
    type ExtraFields = ();

    const INIT: Init = init;
    const LISTEN: Listen = listen;
    const CONNECT: Connect = connect;
    const REG_MR: RegMr<usize> = reg_mr;
    const ISEND: Isend<c_int> = isend;
    const IRECV: Irecv<c_int> = irecv;
    const LAST: () = ();
}

const _: () = {
    assert!(size_of::<Properties<V8>>() == 64);
    assert!(offset_of!(Properties<V8>, latency_us) == 40);
    assert!(size_of::<Net<V8>>() == 19 * size_of::<usize>());
};

#[unsafe(no_mangle)]
pub static ncclNetPlugin_v8: Net<V8> = Net::TABLE;
