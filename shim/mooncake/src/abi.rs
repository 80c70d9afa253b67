//! The part of Mooncake's C interfaces that this library interposes, declared from the facts.
//!
//! Source: `transfer_engine_c.h` of Mooncake 0.2.0 to 0.3.13. The structs and functions used here
//! did not change in that time, with one exception: `createTransferEngine` has a fifth argument
//! since 0.3.0. A caller of 0.2.0 leaves an arbitrary value in its register. The function of that
//! release doesn't read it, and this library only passes it on. Some functions are not in all
//! releases: `openSegmentNoCache` (0.3.0), `submitTransferWithNotify` (0.3.4.post1).
//!
//! TENT's own C interface, `tent_*` of `tent/transfer_engine.h`, exists since 0.3.8. `tent.rs`
//! describes its request.

use core::ffi::{c_char, c_int, c_void};

/// An engine or a transport, `transfer_engine_t` or `transport_t`.
pub(crate) type EnginePtr = *mut c_void;

/// A read from the peer's memory into `source`, `OPCODE_READ`.
pub(crate) const READ: c_int = 0;
/// A write from `source` into the peer's memory, `OPCODE_WRITE`.
pub(crate) const WRITE: c_int = 1;
/// The result of a failed allocation, `INVALID_BATCH`.
pub(crate) const INVALID_BATCH: u64 = u64::MAX;

/// The values of `STATUS_*` that are distinguished here.
pub(crate) mod status {
    use core::ffi::c_int;

    /// The transfer is not over.
    pub(crate) const WAITING: c_int = 0;
    /// The transfer is not over.
    pub(crate) const PENDING: c_int = 1;
    /// The transfer is over, and all bytes arrived.
    pub(crate) const COMPLETED: c_int = 4;
    /// The transfer is over, and failed.
    pub(crate) const FAILED: c_int = 6;
}

/// A transfer, `struct transfer_request`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TransferRequest {
    pub(crate) opcode: c_int,
    pub(crate) source: *mut c_void,
    pub(crate) target_id: i32,
    pub(crate) target_offset: u64,
    pub(crate) length: u64,
}

// SAFETY: `source` is an address in Mooncake's registered memory. It is passed on and never
// dereferenced here.
unsafe impl Send for TransferRequest {}

/// A notification, `struct notify_msg`: two C strings, passed by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NotifyMsg {
    pub(crate) name: *mut c_char,
    pub(crate) msg: *mut c_char,
}

/// The state of a transfer, `struct transfer_status`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TransferStatus {
    pub(crate) status: c_int,
    pub(crate) transferred_bytes: u64,
}

/// A registered buffer, `struct buffer_entry`.
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
