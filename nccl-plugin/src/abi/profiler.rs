//! NCCL's profiler interface, versions 3 to 6 (NCCL 2.26 to 2.32): by it this plugin learns which
//! collective each send belongs to ([`crate::origin`]). NCCL takes the profiler from the network's
//! library unless `NCCL_PROFILER_PLUGIN` names another; then sends are classified by their
//! communicator alone.
//!
//! Only the fields that are used are declared, at the offsets that the headers of NCCL 2.30.7 give
//! them. Versions 1 and 2 know no network events.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::offset_of;
use core::ptr;

use super::{Code, NAME, Name, guarded};
use crate::context::Names;
use crate::log::{self, Logger};
use crate::origin::{self, Function, QUESTION_MAGIC, Question, Task, element_bytes};
use crate::plugin::{self, EVENTS};

/// A collective, as of version 4.
#[repr(C)]
#[derive(Clone, Copy)]
struct Collective {
    sequence: u64,
    function: *const c_char,
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    root: c_int,
    element: *const c_char,
}

/// A point-to-point operation, as of version 4.
#[repr(C)]
#[derive(Clone, Copy)]
struct PointToPoint {
    function: *const c_char,
    buffer: *mut c_void,
    element: *const c_char,
    count: usize,
    peer: c_int,
}

/// In version 3, both begin with this.
#[repr(C)]
#[derive(Clone, Copy)]
struct Named<T> {
    name: *const c_char,
    communicator: u64,
    rest: T,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ProxyOperation {
    pid: c_int,
    channel: u8,
    peer: c_int,
    steps: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct NetEvent {
    id: i64,
    data: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
union What {
    collective: Collective,
    point_to_point: PointToPoint,
    named_collective: Named<Collective>,
    named_point_to_point: Named<PointToPoint>,
    operation: ProxyOperation,
    step: c_int,
    net: NetEvent,
}

/// `ncclProfilerEventDescr_v5_t`, `_v6_t`.
#[repr(C)]
pub struct Event {
    /// Which of [`origin`]'s; in versions 3 and 4 only the first byte is written.
    kind: u64,
    parent: *mut c_void,
    rank: c_int,
    what: What,
}

const _: () = {
    assert!(offset_of!(Event, parent) == 8);
    assert!(offset_of!(Event, what) == 24);
    assert!(offset_of!(Collective, element) == 48);
    assert!(offset_of!(Named<Collective>, rest) == 16);
    assert!(offset_of!(ProxyOperation, steps) == 12);
    // Little endian, so that a byte and a word begin alike.
    assert!(cfg!(target_endian = "little"));
};

/// `ncclProfiler_v3_t`.
#[repr(C)]
#[derive(Debug)]
pub struct ProfilerV3 {
    name: Name,
    init: unsafe extern "C" fn(*mut *mut c_void, *mut c_int) -> Code,
    rest: CommonFunctions,
}

/// `ncclProfiler_v4_t`.
#[repr(C)]
#[derive(Debug)]
pub struct ProfilerV4 {
    name: Name,
    init: unsafe extern "C" fn(
        *mut *mut c_void,
        *mut c_int,
        *const c_char,
        u64,
        c_int,
        c_int,
        c_int,
        Option<Logger>,
    ) -> Code,
    rest: CommonFunctions,
}

/// `ncclProfiler_v5_t`, `ncclProfiler_v6_t`.
#[repr(C)]
#[derive(Debug)]
pub struct ProfilerV5 {
    name: Name,
    init: unsafe extern "C" fn(
        *mut *mut c_void,
        u64,
        *mut c_int,
        *const c_char,
        c_int,
        c_int,
        c_int,
        Option<Logger>,
    ) -> Code,
    rest: CommonFunctions,
}

/// The functions that all versions have.
#[repr(C)]
#[derive(Debug)]
pub struct CommonFunctions {
    start: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut Event) -> Code,
    stop: unsafe extern "C" fn(*mut c_void) -> Code,
    record: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> Code,
    finalize: unsafe extern "C" fn(*mut c_void) -> Code,
}

/// What NCCL 2.26 looks for.
#[unsafe(no_mangle)]
pub static ncclProfiler_v3: ProfilerV3 = ProfilerV3 {
    name: NAME,
    init: init_v3,
    rest: rest(start_v3),
};

/// What NCCL 2.27 looks for.
#[unsafe(no_mangle)]
pub static ncclProfiler_v4: ProfilerV4 = ProfilerV4 {
    name: NAME,
    init: init_v4,
    rest: rest(start_v4),
};

/// What NCCL 2.28 looks for.
#[unsafe(no_mangle)]
pub static ncclProfiler_v5: ProfilerV5 = ProfilerV5 {
    name: NAME,
    init: init_v5,
    rest: rest(start_v5),
};

/// What NCCL 2.29 and later look for.
#[unsafe(no_mangle)]
pub static ncclProfiler_v6: ProfilerV5 = ProfilerV5 {
    name: NAME,
    init: init_v5,
    rest: rest(start_v5),
};

const fn rest(
    start: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut Event) -> Code,
) -> CommonFunctions {
    CommonFunctions {
        start,
        stop,
        record,
        finalize,
    }
}

/// # Safety
/// NCCL's string, or null.
unsafe fn bytes<'a>(text: *const c_char) -> &'a [u8] {
    if text.is_null() {
        return b"";
    }
    // SAFETY: upheld by the caller.
    unsafe { CStr::from_ptr(text) }.to_bytes()
}

/// # Safety
/// `name` is NCCL's string or null; `context` and `mask` are null or can be written.
unsafe fn init(
    context: *mut *mut c_void,
    mask: *mut c_int,
    communicator: u64,
    name: *const c_char,
) -> Code {
    guarded("profiler init", || {
        // SAFETY: upheld by the caller.
        unsafe {
            if let Some(context) = context.as_mut() {
                // Opaque to NCCL: the number is all that is needed of a communicator.
                *context = ptr::without_provenance_mut(communicator as usize);
            }
            if let Some(mask) = mask.as_mut() {
                *mask = if plugin::settings().events {
                    origin::EVENTS_WANTED
                } else {
                    0
                };
            }
            tell_name(communicator, name);
        }
        Ok(())
    })
}

/// # Safety
/// `name` is NCCL's string or null.
unsafe fn tell_name(communicator: u64, name: *const c_char) {
    // SAFETY: upheld by the caller.
    let name = unsafe { bytes(name) };
    if !name.is_empty() {
        let names: &Names = plugin::names();
        names.tell(
            communicator,
            &String::from_utf8_lossy(name),
            plugin::settings(),
        );
    }
}

unsafe extern "C" fn init_v3(context: *mut *mut c_void, mask: *mut c_int) -> Code {
    // SAFETY: NCCL's pointers are null or valid.
    unsafe { init(context, mask, 0, ptr::null()) }
}

unsafe extern "C" fn init_v4(
    context: *mut *mut c_void,
    mask: *mut c_int,
    name: *const c_char,
    communicator: u64,
    _nodes: c_int,
    _ranks: c_int,
    _rank: c_int,
    logger: Option<Logger>,
) -> Code {
    log::set(logger);
    // SAFETY: NCCL's pointers are null or valid.
    unsafe { init(context, mask, communicator, name) }
}

unsafe extern "C" fn init_v5(
    context: *mut *mut c_void,
    communicator: u64,
    mask: *mut c_int,
    name: *const c_char,
    _nodes: c_int,
    _ranks: c_int,
    _rank: c_int,
    logger: Option<Logger>,
) -> Code {
    log::set(logger);
    // SAFETY: NCCL's pointers are null or valid.
    unsafe { init(context, mask, communicator, name) }
}

/// What an operation is, from its fields.
///
/// # Safety
/// The strings are NCCL's, or null.
unsafe fn task(
    communicator: u64,
    sequence: u64,
    function: *const c_char,
    element: *const c_char,
    count: usize,
) -> u64 {
    // SAFETY: upheld by the caller.
    let (function, element) = unsafe { (bytes(function), bytes(element)) };
    EVENTS.task(Task {
        communicator,
        function: Function::from_name(function),
        sequence,
        bytes: (count as u64).saturating_mul(element_bytes(element)),
    })
}

/// # Safety
/// `event` describes one whose kind's fields are written.
unsafe fn start_common(kind: u64, event: &Event) -> u64 {
    let parent = event.parent.addr() as u64;
    match kind {
        origin::EVENT_OPERATION => {
            // SAFETY: upheld by the caller.
            let operation = unsafe { event.what.operation };
            let here = operation.pid as u32 == std::process::id();
            EVENTS.operation(parent, here, u32::try_from(operation.steps).unwrap_or(0))
        }
        origin::EVENT_STEP => {
            // SAFETY: upheld by the caller.
            let step = unsafe { event.what.step };
            EVENTS.step(parent, u32::try_from(step).unwrap_or(0))
        }
        origin::EVENT_NET => {
            // SAFETY: upheld by the caller; of our own id the data is a question, asked further up
            // this very stack.
            unsafe {
                let net = event.what.net;
                let question = net.data.cast::<Question>();
                if net.id == origin::PLUGIN_ID
                    && !question.is_null()
                    && (*question).magic == QUESTION_MAGIC
                {
                    (*question).answer = EVENTS.origin(parent);
                }
            }
            0
        }
        _ => 0,
    }
}

/// # Safety
/// The pointers are NCCL's; `task` knows this version's collectives.
unsafe fn start(
    handle: *mut *mut c_void,
    event: *mut Event,
    mask: u64,
    task: impl FnOnce(u64, &Event) -> Option<u64>,
) -> Code {
    guarded("profiler startEvent", || {
        // SAFETY: upheld by the caller.
        unsafe {
            if let (Some(handle), Some(event)) = (handle.as_mut(), event.as_ref()) {
                let kind = event.kind & mask;
                let number = match task(kind, event) {
                    Some(number) => number,
                    None => start_common(kind, event),
                };
                *handle = ptr::without_provenance_mut(number as usize);
            }
        }
        Ok(())
    })
}

/// One byte says the kind.
const KIND_BYTE: u64 = 0xff;

unsafe extern "C" fn start_v3(
    _context: *mut c_void,
    handle: *mut *mut c_void,
    event: *mut Event,
) -> Code {
    // SAFETY: NCCL writes the fields of the kind that it names.
    let known = |kind, event: &Event| unsafe {
        match kind {
            origin::EVENT_COLLECTIVE => {
                let named = event.what.named_collective;
                tell_name(named.communicator, named.name);
                let it = named.rest;
                Some(task(
                    named.communicator,
                    it.sequence,
                    it.function,
                    it.element,
                    it.count,
                ))
            }
            origin::EVENT_P2P => {
                let named = event.what.named_point_to_point;
                tell_name(named.communicator, named.name);
                let it = named.rest;
                Some(task(
                    named.communicator,
                    0,
                    it.function,
                    it.element,
                    it.count,
                ))
            }
            _ => None,
        }
    };
    // SAFETY: NCCL's pointers are null or valid.
    unsafe { start(handle, event, KIND_BYTE, known) }
}

/// Collectives of version 4 and later; `context` is the communicator.
///
/// # Safety
/// As [`start`].
unsafe fn start_later(
    context: *mut c_void,
    handle: *mut *mut c_void,
    event: *mut Event,
    mask: u64,
) -> Code {
    let communicator = context.addr() as u64;
    // SAFETY: NCCL writes the fields of the kind that it names.
    let known = |kind, event: &Event| unsafe {
        match kind {
            origin::EVENT_COLLECTIVE => {
                let it = event.what.collective;
                Some(task(
                    communicator,
                    it.sequence,
                    it.function,
                    it.element,
                    it.count,
                ))
            }
            origin::EVENT_P2P => {
                let it = event.what.point_to_point;
                Some(task(communicator, 0, it.function, it.element, it.count))
            }
            _ => None,
        }
    };
    // SAFETY: upheld by the caller.
    unsafe { start(handle, event, mask, known) }
}

unsafe extern "C" fn start_v4(
    context: *mut c_void,
    handle: *mut *mut c_void,
    event: *mut Event,
) -> Code {
    // SAFETY: NCCL's pointers are null or valid.
    unsafe { start_later(context, handle, event, KIND_BYTE) }
}

unsafe extern "C" fn start_v5(
    context: *mut c_void,
    handle: *mut *mut c_void,
    event: *mut Event,
) -> Code {
    // SAFETY: NCCL's pointers are null or valid.
    unsafe { start_later(context, handle, event, u64::MAX) }
}

unsafe extern "C" fn stop(_event: *mut c_void) -> Code {
    0
}

unsafe extern "C" fn record(_event: *mut c_void, _state: c_int, _arguments: *mut c_void) -> Code {
    0
}

unsafe extern "C" fn finalize(_context: *mut c_void) -> Code {
    0
}
