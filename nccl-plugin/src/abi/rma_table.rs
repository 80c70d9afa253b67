//! The slots of NCCL's tables of one-sided operations, versions 14 to 16.
//!
//! They are those of the headers `plugin/rma/rma_v14.h` to `rma_v16.h` of NCCL 2.30 to 2.32. The
//! functions in the slots name their arguments.
//!
//! | table | NCCL | added by this version |
//! |---|---|---|
//! | v14 | 2.30.7 | |
//! | v15 | 2.31 | flags of an operation, which are hints |
//! | v16 | 2.32 | `getRmaProperties` |

use core::ffi::c_int;

use super::rma as calls;
use super::table::Properties;
use super::versions::V12;
use super::{Code, NAME, Name, Opaque, OpaqueOut};
use crate::log::Logger;

/// The type of the slot `getRmaProperties`.
pub type GetRmaProperties = unsafe extern "C" fn(Opaque, *mut RmaProperties) -> Code;

/// The parts of a table that differ between versions.
pub trait RmaVersion: 'static {
    /// The type of the slot between `devices` and `getProperties`.
    type Query;
    /// The type of the slots `iput` and `iget`.
    type Iput;
    /// The type of the slot `iputSignal`.
    type IputSignal;
    const QUERY: Self::Query;
    const IPUT: Self::Iput;
    const IPUT_SIGNAL: Self::IputSignal;
    const IGET: Self::Iput;
}

/// A table of one-sided operations, `ncclRma_vN_t`.
#[repr(C)]
pub struct Rma<V: RmaVersion> {
    pub name: Name,
    pub init: unsafe extern "C" fn(OpaqueOut, u64, Option<Logger>) -> Code,
    pub devices: unsafe extern "C" fn(*mut c_int) -> Code,
    pub get_rma_properties: V::Query,
    pub get_properties: unsafe extern "C" fn(c_int, *mut Properties<V12>) -> Code,
    pub listen: unsafe extern "C" fn(Opaque, c_int, Opaque, OpaqueOut) -> Code,
    pub connect: unsafe extern "C" fn(Opaque, OpaqueOut, c_int, c_int, Opaque, OpaqueOut) -> Code,
    pub create_context: unsafe extern "C" fn(Opaque, *mut RmaConfig, OpaqueOut) -> Code,
    pub reg_mr_sym: unsafe extern "C" fn(Opaque, Opaque, usize, c_int, u64, OpaqueOut) -> Code,
    pub reg_mr_sym_dma_buf:
        unsafe extern "C" fn(Opaque, Opaque, usize, c_int, u64, c_int, u64, OpaqueOut) -> Code,
    pub dereg_mr_sym: unsafe extern "C" fn(Opaque, Opaque) -> Code,
    pub destroy_context: unsafe extern "C" fn(Opaque) -> Code,
    pub close_coll: unsafe extern "C" fn(Opaque) -> Code,
    pub close_listen: unsafe extern "C" fn(Opaque) -> Code,
    pub iput: V::Iput,
    pub iput_signal: V::IputSignal,
    pub iget: V::Iput,
    pub iflush: unsafe extern "C" fn(Opaque, c_int, Opaque, u32, OpaqueOut) -> Code,
    pub test: unsafe extern "C" fn(Opaque, Opaque, *mut c_int) -> Code,
    pub rma_progress: unsafe extern "C" fn(Opaque) -> Code,
    pub query_last_error: unsafe extern "C" fn(Opaque, *mut bool) -> Code,
    pub finalize: unsafe extern "C" fn(Opaque) -> Code,
}

impl<V: RmaVersion> Rma<V> {
    pub const TABLE: Self = Self {
        name: NAME,
        init: calls::init,
        devices: calls::devices,
        get_rma_properties: V::QUERY,
        get_properties: calls::get_properties,
        listen: calls::listen,
        connect: calls::connect,
        create_context: calls::create_context,
        reg_mr_sym: calls::reg_mr_sym,
        reg_mr_sym_dma_buf: calls::reg_mr_sym_dma_buf,
        dereg_mr_sym: calls::dereg_mr_sym,
        destroy_context: calls::destroy_context,
        close_coll: calls::close_coll,
        close_listen: calls::close_listen,
        iput: V::IPUT,
        iput_signal: V::IPUT_SIGNAL,
        iget: V::IGET,
        iflush: calls::iflush,
        test: calls::test,
        rma_progress: calls::rma_progress,
        query_last_error: calls::query_last_error,
        finalize: calls::finalize,
    };
}

/// The part of `ncclRmaConfig_vN_t` that all versions have.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RmaConfig {
    pub contexts: c_int,
    pub traffic_class: c_int,
}

/// Properties of a group, `ncclRmaProperties_v16_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RmaProperties {
    /// Whether a signal makes all puts visible that arrived before, from any rank.
    pub flushes_all_puts_on_any_signal: bool,
}

/// The context, the number of the ordering domain, and the rank of an operation.
pub(super) type RmaTarget = (Opaque, c_int, u32);
/// A place in a region: its handle and the offset.
pub(super) type RegionPlace = (Opaque, u64);
/// The place of a signal's word, the value and the operation.
pub(super) type SignalCall = (RegionPlace, u64, u32);

/// Defines a version. `$flags` is the type of the argument that v15 added before the request.
macro_rules! version {
    ($version:ident, $query:ty = $query_value:expr $(, $flags:ty)?) => {
        #[derive(Debug)]
        pub struct $version;

        impl RmaVersion for $version {
            type Query = $query;
            type Iput = unsafe extern "C" fn(
                Opaque, c_int, u64, Opaque, usize, u64, Opaque, u32, $($flags,)? OpaqueOut,
            ) -> Code;
            type IputSignal = unsafe extern "C" fn(
                Opaque, c_int, u64, Opaque, usize, u64, Opaque, u32, u64, Opaque, u64, u32, bool,
                $($flags,)? OpaqueOut,
            ) -> Code;

            const QUERY: $query = $query_value;
            const IPUT: Self::Iput = {
                unsafe extern "C" fn iput(
                    context: Opaque, domain: c_int, offset: u64, source: Opaque, bytes: usize,
                    far_offset: u64, target: Opaque, rank: u32, $(_: $flags,)? out: OpaqueOut,
                ) -> Code {
                    let (near, far) = ((source, offset), (target, far_offset));
                    // SAFETY: NCCL passes a place for the request.
                    unsafe { calls::put((context, domain, rank), near, far, bytes, None, out) }
                }
                iput
            };
            const IPUT_SIGNAL: Self::IputSignal = {
                unsafe extern "C" fn iput_signal(
                    context: Opaque, domain: c_int, offset: u64, source: Opaque, bytes: usize,
                    far_offset: u64, target: Opaque, rank: u32, signal_offset: u64, signal: Opaque,
                    value: u64, operation: u32, _strong: bool, $(_: $flags,)? out: OpaqueOut,
                ) -> Code {
                    let (near, far) = ((source, offset), (target, far_offset));
                    let signal = Some(((signal, signal_offset), value, operation));
                    // SAFETY: NCCL passes a place for the request.
                    unsafe { calls::put((context, domain, rank), near, far, bytes, signal, out) }
                }
                iput_signal
            };
            const IGET: Self::Iput = {
                unsafe extern "C" fn iget(
                    context: Opaque, domain: c_int, far_offset: u64, source: Opaque, bytes: usize,
                    offset: u64, target: Opaque, rank: u32, $(_: $flags,)? out: OpaqueOut,
                ) -> Code {
                    let (near, far) = ((target, offset), (source, far_offset));
                    // SAFETY: NCCL passes a place for the request.
                    unsafe { calls::get((context, domain, rank), near, far, bytes, out) }
                }
                iget
            };
        }
    };
}

version!(V14, () = ());
version!(V15, () = (), u32);
version!(V16, GetRmaProperties = calls::get_rma_properties, u32);

const _: () = {
    assert!(size_of::<Rma<V14>>() == 21 * size_of::<usize>());
    assert!(size_of::<Rma<V15>>() == 21 * size_of::<usize>());
    assert!(size_of::<Rma<V16>>() == 22 * size_of::<usize>());
    assert!(core::mem::offset_of!(Rma<V14>, iput) == 13 * size_of::<usize>());
    assert!(core::mem::offset_of!(Rma<V15>, iput) == 13 * size_of::<usize>());
    assert!(core::mem::offset_of!(Rma<V16>, iput) == 14 * size_of::<usize>());
    assert!(core::mem::offset_of!(Rma<V14>, finalize) == 20 * size_of::<usize>());
    assert!(core::mem::offset_of!(Rma<V16>, get_rma_properties) == 3 * size_of::<usize>());
    assert!(core::mem::offset_of!(Properties<V12>, net_device_type) == 56);
};

#[unsafe(no_mangle)]
pub static ncclRmaPlugin_v14: Rma<V14> = Rma::TABLE;
#[unsafe(no_mangle)]
pub static ncclRmaPlugin_v15: Rma<V15> = Rma::TABLE;
#[unsafe(no_mangle)]
pub static ncclRmaPlugin_v16: Rma<V16> = Rma::TABLE;
