//! The part of NIXL's C++ interface that this library uses, declared from the facts of NIXL 1.0.0
//! to 1.5.1 (`nixl.h`, `nixl_types.h`, `nixl_descriptors.h`).
//!
//! Agents, requests, prepared lists and optional arguments are only addresses here, since their
//! layouts change between releases. Lists of descriptors are read by NIXL's own functions, and only
//! if the size of their elements is the known one. A `std::string`, a `std::span` and a
//! `std::vector<int>` have libstdc++'s layout, which their mangled names fix.

use core::ffi::{c_int, c_void};

use crate::real::DescFunctions;

/// `nixlAgent *`.
pub(crate) type AgentPtr = *const c_void;
/// `nixlXferReqH *`.
pub(crate) type RequestPtr = *mut c_void;
/// `nixlDlistH *`.
pub(crate) type ListPtr = *mut c_void;
/// `const nixlAgentOptionalArgs *`.
pub(crate) type OptionalArgs = *const c_void;
/// `nixl_status_t`.
pub(crate) type NixlStatus = c_int;

pub(crate) mod status {
    use super::NixlStatus;

    pub(crate) const IN_PROG: NixlStatus = 1;
    pub(crate) const SUCCESS: NixlStatus = 0;
    pub(crate) const REPOST_ACTIVE: NixlStatus = -7;
    pub(crate) const NOT_SUPPORTED: NixlStatus = -9;
}

/// `NIXL_WRITE` of `nixl_xfer_op_t`. The other value is `NIXL_READ`, 0.
pub(crate) const WRITE: c_int = 1;

/// `std::vector<int>`.
#[derive(Debug)]
#[repr(C)]
pub struct IndexVector {
    begin: *const c_int,
    end: *const c_int,
    capacity: *const c_int,
}

/// `std::span<const int>`, passed by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct IndexSpan {
    data: *const c_int,
    length: usize,
}

impl IndexVector {
    pub(crate) fn span(&self) -> IndexSpan {
        let length = (self.end as usize).saturating_sub(self.begin as usize) / size_of::<c_int>();
        IndexSpan { data: self.begin, length }
    }
}

impl IndexSpan {
    /// # Safety
    /// The caller's vector or array lives as long as the result is used.
    pub(crate) unsafe fn indices(&self) -> &[c_int] {
        if self.data.is_null() {
            return &[];
        }
        // SAFETY: upheld by the caller.
        unsafe { core::slice::from_raw_parts(self.data, self.length) }
    }
}

/// Reports whether a `std::string` is empty. The name of the local side is.
///
/// # Safety
/// `text` is a `std::string` of libstdc++: a pointer, then the length.
pub(crate) unsafe fn is_empty(text: *const c_void) -> bool {
    // SAFETY: upheld by the caller.
    !text.is_null() && unsafe { text.cast::<usize>().add(1).read() } == 0
}

/// Bytes at an address, repeated: `nixlBasicDesc` (without `devId`) is one row with a count of 1,
/// and `nixlStrideDesc` is a row as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DescRow {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) stride: u64,
    pub(crate) count: u64,
}

/// A descriptor that can be read here.
pub(crate) trait NixlDescriptor: Copy {
    fn row(&self) -> DescRow;
}

/// `nixlBasicDesc`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct BasicDesc {
    address: u64,
    bytes: u64,
    device: u64,
}

/// `nixlStrideDesc` (1.5.0).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct StrideDesc {
    basic: BasicDesc,
    stride: u64,
    count: u64,
}

impl NixlDescriptor for BasicDesc {
    fn row(&self) -> DescRow {
        DescRow { address: self.address, bytes: self.bytes, stride: self.bytes, count: 1 }
    }
}

impl NixlDescriptor for StrideDesc {
    fn row(&self) -> DescRow {
        let BasicDesc { address, bytes, .. } = self.basic;
        DescRow { address, bytes, stride: self.stride, count: self.count }
    }
}

/// Reports whether a list describes memory of hosts or GPUs. Others describe blocks, objects and
/// files, which a disk or a store moves. A release without `getType` counts as memory.
///
/// # Safety
/// `list` is a list of the type to which the functions belong.
pub(crate) unsafe fn is_memory(list: *const c_void, functions: &DescFunctions) -> bool {
    /// `DRAM_SEG` and `VRAM_SEG` of `nixl_mem_t`.
    const MEMORY: [c_int; 2] = [0, 1];
    // SAFETY: upheld by the caller.
    unsafe { functions.kind(list) }.is_none_or(|kind| MEMORY.contains(&kind))
}

/// Returns the descriptors of a `nixlDescList<D>`, or `None` if this release has other ones.
///
/// # Safety
/// `list` is such a list, which lives and does not change as long as the result is used.
pub(crate) unsafe fn descriptors<'a, D: NixlDescriptor>(
    list: *const c_void,
    functions: &DescFunctions,
) -> Option<&'a [D]> {
    // SAFETY: upheld by the caller.
    let (count, begin, end) = unsafe { functions.read(list)? };
    let count = usize::try_from(count).ok()?;
    if count == 0 {
        return Some(&[]);
    }
    let bytes = (end as usize).checked_sub(begin as usize)?;
    let is_known = count.checked_mul(size_of::<D>()) == Some(bytes)
        && !begin.is_null()
        && (begin as usize).is_multiple_of(align_of::<D>());
    // SAFETY: the list has `count` elements of this size from `begin` on. All bits are valid.
    is_known.then(|| unsafe { core::slice::from_raw_parts(begin.cast(), count) })
}

const _: () = {
    assert!(size_of::<BasicDesc>() == 24);
    assert!(size_of::<StrideDesc>() == 40);
    assert!(size_of::<IndexVector>() == 24);
    assert!(size_of::<IndexSpan>() == 16);
};
