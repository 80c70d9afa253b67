//! Mooncake's C interfaces, as far as this library stands in front of them: facts, written down
//! anew.
//!
//! Source: `transfer_engine_c.h` of Mooncake 0.2.0 to 0.3.13. Structs and functions of it that are
//! used here did not change in that time, but for one: `createTransferEngine` has a fifth argument
//! since 0.3.0. A caller of 0.2.0 leaves anything in its register, which the function of that
//! release doesn't read, and neither does whoever only passes it on. What came later is not in all
//! releases: `openSegmentNoCache` (0.3.0), `submitTransferWithNotify` (0.3.4.post1).
//!
//! TENT's own C interface, `tent_*` of `tent/transfer_engine.h`, exists since 0.3.8; see `tent.rs`
//! for its request.

use core::ffi::{c_char, c_int, c_void};

/// `transfer_engine_t`, `transport_t`.
pub(crate) type Handle = *mut c_void;

/// `OPCODE_READ`: from the peer's memory into `source`.
pub(crate) const READ: c_int = 0;
/// `OPCODE_WRITE`.
pub(crate) const WRITE: c_int = 1;
/// `INVALID_BATCH`.
pub(crate) const INVALID_BATCH: u64 = u64::MAX;

/// `STATUS_*`, as far as they are told apart here.
pub(crate) mod status {
    use core::ffi::c_int;

    /// Not over.
    pub(crate) const WAITING: c_int = 0;
    /// Not over.
    pub(crate) const PENDING: c_int = 1;
    /// Over, and all bytes are there.
    pub(crate) const COMPLETED: c_int = 4;
    /// Over, and they are not.
    pub(crate) const FAILED: c_int = 6;
}

/// `struct transfer_request`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TransferRequest {
    pub(crate) opcode: c_int,
    pub(crate) source: *mut c_void,
    pub(crate) target_id: i32,
    pub(crate) target_offset: u64,
    pub(crate) length: u64,
}

// SAFETY: `source` is an address in Mooncake's registered memory, which is passed on and never
// followed here.
unsafe impl Send for TransferRequest {}

/// `struct notify_msg`: two C strings, passed by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NotifyMsg {
    pub(crate) name: *mut c_char,
    pub(crate) msg: *mut c_char,
}

/// `struct transfer_status`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TransferStatus {
    pub(crate) status: c_int,
    pub(crate) transferred_bytes: u64,
}

/// `struct buffer_entry`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BufferEntry {
    pub(crate) addr: *mut c_void,
    pub(crate) length: usize,
}

const _: () = {
    assert!(size_of::<TransferRequest>() == 40);
    assert!(core::mem::offset_of!(TransferRequest, source) == 8);
    assert!(core::mem::offset_of!(TransferRequest, target_id) == 16);
    assert!(core::mem::offset_of!(TransferRequest, target_offset) == 24);
    assert!(core::mem::offset_of!(TransferRequest, length) == 32);
    assert!(size_of::<NotifyMsg>() == 16);
    assert!(size_of::<TransferStatus>() == 16);
    assert!(core::mem::offset_of!(TransferStatus, transferred_bytes) == 8);
    assert!(size_of::<BufferEntry>() == 16);
};
