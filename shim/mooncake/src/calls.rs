//! Calls of the program, and calls of Mooncake's own functions.
//!
//! # Safety
//! Unless a function says otherwise, its callers uphold the conditions of the function of
//! `transfer_engine_c.h` that the program called.

use core::ffi::c_int;
use std::ffi::{CStr, CString};

use crate::abi::{EnginePtr, NotifyMsg, TransferRequest, TransferStatus};
use crate::exports::array;
use crate::real::real;

/// Mooncake's result for a failed call.
pub(crate) const REFUSED: c_int = -1;

#[derive(Debug)]
pub(crate) struct Notification {
    name: CString,
    message: CString,
}

impl Notification {
    /// # Safety
    /// Both fields are C strings.
    pub(crate) unsafe fn copy(notify: NotifyMsg) -> Self {
        // SAFETY: upheld by the caller.
        unsafe {
            Self {
                name: CStr::from_ptr(notify.name).to_owned(),
                message: CStr::from_ptr(notify.msg).to_owned(),
            }
        }
    }

    pub(crate) fn message(&self) -> NotifyMsg {
        NotifyMsg { name: self.name.as_ptr().cast_mut(), msg: self.message.as_ptr().cast_mut() }
    }
}

pub(crate) struct Call {
    pub(crate) entries: *mut TransferRequest,
    pub(crate) count: usize,
    pub(crate) notify: Option<NotifyMsg>,
}

impl Call {
    /// # Safety
    /// `entries` is null or has `count` requests, for as long as the result is used.
    pub(crate) unsafe fn requests(&self) -> &[TransferRequest] {
        // SAFETY: upheld by the caller.
        unsafe { array(self.entries, self.count) }
    }
}

/// Calls Mooncake's own submitting function.
pub(crate) unsafe fn hand_on(
    engine: EnginePtr,
    batch: u64,
    entries: *mut TransferRequest,
    count: usize,
    notify: Option<NotifyMsg>,
) -> c_int {
    // SAFETY: upheld by the caller. The types are those of `transfer_engine_c.h`.
    unsafe {
        match notify {
            None => {
                let real =
                    real!(submitTransfer, fn(EnginePtr, u64, *mut TransferRequest, usize) -> c_int);
                real.map_or(REFUSED, |real| real(engine, batch, entries, count))
            }
            Some(notify) => {
                let real = real!(
                    submitTransferWithNotify,
                    fn(EnginePtr, u64, *mut TransferRequest, usize, NotifyMsg) -> c_int
                );
                real.map_or(REFUSED, |real| real(engine, batch, entries, count, notify))
            }
        }
    }
}

/// Calls Mooncake's own `getTransferStatus`.
pub(crate) unsafe fn ask_after(
    engine: EnginePtr,
    batch: u64,
    task: usize,
    answer: *mut TransferStatus,
) -> c_int {
    let real = real!(getTransferStatus, fn(EnginePtr, u64, usize, *mut TransferStatus) -> c_int);
    // SAFETY: upheld by the caller. The type is that of `transfer_engine_c.h`.
    real.map_or(REFUSED, |real| unsafe { real(engine, batch, task, answer) })
}
