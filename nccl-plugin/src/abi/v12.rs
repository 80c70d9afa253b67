//! Version 12, of NCCL 2.30 to 2.32. It is v11 with wider virtual devices, rails and planes.

use core::mem::offset_of;

use super::table::{Net, Properties};
use super::v11::ContextVersion;

/// Version 12 of the network interface.
pub type V12 = ContextVersion<8, 2>;

const _: () = {
    assert!(size_of::<Properties<V12>>() == 128);
    assert!(offset_of!(Properties<V12>, latency_us) == 44);
    assert!(offset_of!(Properties<V12>, rest) == 64);
    assert!(size_of::<Net<V12>>() == 22 * size_of::<usize>());
};

#[unsafe(no_mangle)]
pub static ncclNetPlugin_v12: Net<V12> = Net::TABLE;
