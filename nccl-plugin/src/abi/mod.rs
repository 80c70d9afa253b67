//! NCCL's network interface, versions 7 to 12, over one implementation.
//!
//! [`table`] lists the slots of a version's table as the `ext-net` headers of NCCL 2.30.7 declare
//! them. [`versions`] defines what differs ([`table::Version`]): contexts, the width of sizes, and
//! properties. It asserts sizes and offsets, and exports the tables.
//!
//! | table | NCCL | added by this version |
//! |---|---|---|
//! | v7 | 2.19 | |
//! | v8 | 2.20–2.23 | `regIsGlobal`, `size_t` registrations |
//! | v9 | 2.24, 2.25 | virtual devices, sizes beyond 2 GiB, `forceFlush` |
//! | v10 | 2.26, 2.27 | the profiler's handle, a traffic class per communicator |
//! | v11 | 2.28, 2.29 | a context per communicator, `setNetAttr`, `finalize` |
//! | v12 | 2.30–2.32 | eight devices per virtual one, rails |
//!
//! [`rma_table`] has the tables of one-sided operations, and [`profiler`] those of the profiler.
//!
//! No panic crosses into C: each function catches it and returns an internal error. Input from a
//! peer is not trusted.
//!
//! # Safety
//! NCCL upholds this for all functions of `connections`, `transfers`, `rma` and `profiler`,
//! and their own callers pass its arguments on. A pointer is null or valid: a result can be
//! written, a handle has [`HANDLE_BYTES`](crate::handle::HANDLE_BYTES), a string ends, an array has
//! the stated length, and an event has the fields of its kind. An object comes from the function
//! that makes it, and is not used after the one that ends it. A buffer stays until its request is
//! done, and registered memory until it is deregistered.

mod connections;
pub mod profiler;
mod rma;
pub mod rma_table;
pub mod table;
mod transfers;
pub mod versions;

use core::ffi::{c_char, c_int, c_void};
use core::ptr;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::fault::{Fault, Result};
use crate::log;

/// NCCL's result code, `ncclResult_t`.
pub type Code = c_int;
const SUCCESS: Code = 0;
const INTERNAL: Code = 3;

/// A pointer whose target one of the two sides knows, and a place for such a pointer.
pub type Opaque = *mut c_void;
pub type OpaqueOut = *mut Opaque;

/// The network's name in `NCCL_NET`.
pub const NAME: Name = Name(c"Laxity".as_ptr());

/// A C string with static lifetime.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct Name(*const c_char);

// SAFETY: the pointer leads to a constant.
unsafe impl Sync for Name {}
// SAFETY: the pointer leads to a constant.
unsafe impl Send for Name {}

/// Runs `body` for the table's function `name`. Returns its result as NCCL's code.
pub(crate) fn guarded(name: &str, body: impl FnOnce() -> Result<()>) -> Code {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(fault)) => {
            log::warn(&format!("{name}: {fault}"));
            fault.code()
        }
        Err(_) => {
            log::warn(&format!("{name}: a bug in Laxity's plugin; standard error says where"));
            INTERNAL
        }
    }
}

fn not_null<T>(pointer: *mut T, what: &str) -> Result<*mut T> {
    if pointer.is_null() {
        return Err(Fault::Argument(format!("{what} is a null pointer")));
    }
    Ok(pointer)
}

/// Runs `body` for the table's function `name`, and writes what it returns.
///
/// # Safety
/// `out` is null or can be written.
unsafe fn returning<T>(name: &str, out: *mut T, body: impl FnOnce() -> Result<T>) -> Code {
    guarded(name, || {
        let out = not_null(out, "the result")?;
        // SAFETY: upheld by the caller.
        unsafe { out.write(body()?) };
        Ok(())
    })
}

/// Runs `body` for the table's function `name`, and writes the pointer that it returns, or else
/// null.
///
/// # Safety
/// `out` is null or can be written.
unsafe fn pointing(
    name: &str,
    out: OpaqueOut,
    body: impl FnOnce() -> Result<Option<Opaque>>,
) -> Code {
    guarded(name, || {
        let out = not_null(out, "the result")?;
        // SAFETY: upheld by the caller.
        unsafe { out.write(ptr::null_mut()) };
        let made = body()?.unwrap_or(ptr::null_mut());
        // SAFETY: `out` is not null, and the caller says that it can be written.
        unsafe { out.write(made) };
        Ok(())
    })
}
