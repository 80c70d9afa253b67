//! Log messages. They go to NCCL's own log, where the job's owner looks (`NCCL_DEBUG`).
//!
//! The logger is NCCL's variadic C function, passed at `init`. Until then, warnings go to standard
//! error.

use core::ffi::{c_char, c_int, c_ulong};
use core::mem;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};
use std::ffi::CString;

/// NCCL's log function, `ncclDebugLogger_t`.
pub(crate) type Logger =
    unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);

const LEVEL_WARN: c_int = 2;
const LEVEL_INFO: c_int = 3;
const SUBSYSTEM_INIT: c_ulong = 1;
const SUBSYSTEM_NET: c_ulong = 16;
const SUBSYSTEM_ALL: c_ulong = c_ulong::MAX;

/// NCCL's logger. Relaxed, because the function exists as long as NCCL is in the process.
static LOGGER: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());

pub(crate) fn set(logger: Option<Logger>) {
    if let Some(logger) = logger {
        LOGGER.store(logger as *mut (), Ordering::Relaxed);
    }
}

fn say(level: c_int, subsystem: c_ulong, place: &'static core::panic::Location<'_>, text: &str) {
    let logger = LOGGER.load(Ordering::Relaxed);
    if logger.is_null() {
        if level == LEVEL_WARN {
            eprintln!("NET/Laxity: {text}");
        }
        return;
    }
    // SAFETY: `set` stored the pointer, so it is a `Logger`.
    let logger: Logger = unsafe { mem::transmute(logger) };
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    let file = CString::new(place.file()).unwrap_or_default();
    // SAFETY: the strings end with a zero and live until the call returns. The format takes one
    // string.
    unsafe {
        logger(
            level,
            subsystem,
            file.as_ptr(),
            c_int::try_from(place.line()).unwrap_or(0),
            c"NET/Laxity: %s".as_ptr(),
            text.as_ptr(),
        );
    }
}

/// Logs a warning that needs action, shown with `NCCL_DEBUG=WARN` and above.
#[track_caller]
pub(crate) fn warn(text: &str) {
    say(LEVEL_WARN, SUBSYSTEM_ALL, core::panic::Location::caller(), text);
}

/// Logs information, shown with `NCCL_DEBUG=INFO`.
#[track_caller]
pub(crate) fn info(text: &str) {
    let subsystems = SUBSYSTEM_INIT | SUBSYSTEM_NET;
    say(LEVEL_INFO, subsystems, core::panic::Location::caller(), text);
}
