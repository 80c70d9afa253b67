//! NCCL's profiler interface, versions 3 to 6 (NCCL 2.26 to 2.32). It provides the collective that
//! each send belongs to ([`crate::origin`]). NCCL takes the profiler from the network's library
//! unless `NCCL_PROFILER_PLUGIN` names another. With another profiler, sends are classified by
//! their communicator alone.
//!
//! Only the fields that this plugin uses are declared. Their offsets are those of the headers of
//! NCCL 2.30.7. Versions 1 and 2 have no network events.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::offset_of;
use core::ptr;

use super::{Code, NAME, Name, guarded};
use crate::context::Names;
use crate::log::{self, Logger};
use crate::origin::{self, Function, Operation, QUESTION_MAGIC, Question};
use crate::plugin::{self, EVENTS};

/// The first fields of a collective's event since version 4.
#[repr(C)]
#[derive(Clone, Copy)]
struct Collective {
    sequence: u64,
    function: *const c_char,
}

/// The first fields of a point-to-point operation's event since version 4.
#[repr(C)]
#[derive(Clone, Copy)]
struct PointToPoint {
    function: *const c_char,
}

/// The fields that precede both kinds of operation in version 3.
#[repr(C)]
#[derive(Clone, Copy)]
struct Named<T> {
    name: *const c_char,
    communicator: u64,
    rest: T,
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
    /// The process that a proxy operation belongs to.
    pid: c_int,
    net: NetEvent,
}

/// What NCCL says of an event as it begins, `ncclProfilerEventDescr_vN_t`.
#[repr(C)]
pub struct ProfilerEvent {
    /// The event's type, as in [`origin`]. Versions 3 and 4 write only the first byte.
    kind: u64,
    parent: *mut c_void,
    rank: c_int,
    what: What,
}

const _: () = {
    assert!(offset_of!(ProfilerEvent, parent) == 8);
    assert!(offset_of!(ProfilerEvent, what) == 24);
    assert!(offset_of!(Collective, function) == 8);
    assert!(offset_of!(Named<Collective>, rest) == 16);
    // Little endian, so that a byte and a word at one address have the same low bits.
    assert!(cfg!(target_endian = "little"));
};

/// The type of `init` in version 3.
pub type InitV3 = unsafe extern "C" fn(context: *mut *mut c_void, mask: *mut c_int) -> Code;
/// The type of `init` in version 4.
pub type InitV4 = unsafe extern "C" fn(
    context: *mut *mut c_void,
    mask: *mut c_int,
    name: *const c_char,
    communicator: u64,
    nodes: c_int,
    ranks: c_int,
    rank: c_int,
    Option<Logger>,
) -> Code;
/// The type of `init` since version 5.
pub type InitV5 = unsafe extern "C" fn(
    context: *mut *mut c_void,
    communicator: u64,
    mask: *mut c_int,
    name: *const c_char,
    nodes: c_int,
    ranks: c_int,
    rank: c_int,
    Option<Logger>,
) -> Code;
type Start = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut ProfilerEvent) -> Code;

/// A profiler's table of functions, `ncclProfiler_vN_t`.
#[repr(C)]
#[derive(Debug)]
pub struct Profiler<Init> {
    name: Name,
    init: Init,
    start: Start,
    stop: unsafe extern "C" fn(event: *mut c_void) -> Code,
    record: unsafe extern "C" fn(event: *mut c_void, state: c_int, *mut c_void) -> Code,
    finalize: unsafe extern "C" fn(context: *mut c_void) -> Code,
}

impl<Init> Profiler<Init> {
    const fn new(init: Init, start: Start) -> Self {
        Self { name: NAME, init, start, stop, record, finalize }
    }
}

/// The table that NCCL 2.26 loads.
#[unsafe(no_mangle)]
pub static ncclProfiler_v3: Profiler<InitV3> = Profiler::new(init_v3, start_v3);

/// The table that NCCL 2.27 loads.
#[unsafe(no_mangle)]
pub static ncclProfiler_v4: Profiler<InitV4> = Profiler::new(init_v4, start_v4);

/// The table that NCCL 2.28 loads.
#[unsafe(no_mangle)]
pub static ncclProfiler_v5: Profiler<InitV5> = Profiler::new(init_v5, start_v5);

/// The table that NCCL 2.29 and later load.
#[unsafe(no_mangle)]
pub static ncclProfiler_v6: Profiler<InitV5> = Profiler::new(init_v5, start_v5);

unsafe fn bytes<'a>(text: *const c_char) -> &'a [u8] {
    if text.is_null() {
        return b"";
    }
    // SAFETY: upheld by the caller.
    unsafe { CStr::from_ptr(text) }.to_bytes()
}

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
                // The context is opaque to NCCL, and holds only the communicator's number.
                *context = ptr::without_provenance_mut(communicator as usize);
            }
            if let Some(mask) = mask.as_mut() {
                *mask = if plugin::settings().events { origin::EVENTS_WANTED } else { 0 };
            }
            tell_name(communicator, name);
        }
        Ok(())
    })
}

unsafe fn tell_name(communicator: u64, name: *const c_char) {
    // SAFETY: upheld by the caller.
    let name = unsafe { bytes(name) };
    if !name.is_empty() {
        let names: &Names = plugin::names();
        names.tell(communicator, &String::from_utf8_lossy(name), plugin::settings());
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

/// Records that a collective or point-to-point operation begins. Returns its event number.
unsafe fn task(communicator: u64, function: *const c_char) -> u64 {
    // SAFETY: upheld by the caller.
    let function = Function::from_name(unsafe { bytes(function) });
    EVENTS.task(Operation { communicator, function })
}

/// Answers the question that a network event of this plugin carries.
unsafe fn answer(net: NetEvent, parent: u64) {
    let question = net.data.cast::<Question>();
    // SAFETY: upheld by the caller.
    unsafe {
        if net.id == origin::PLUGIN_ID && !question.is_null() && (*question).magic == QUESTION_MAGIC
        {
            (*question).answer = EVENTS.origin(parent);
        }
    }
}

/// Returns the number that NCCL uses for this event when it is a parent. In version 3 the event
/// contains the communicator.
unsafe fn number(kind: u64, event: &ProfilerEvent, communicator: Option<u64>) -> u64 {
    let parent = event.parent.addr() as u64;
    // SAFETY: upheld by the caller.
    unsafe {
        match kind {
            origin::EVENT_COLLECTIVE => {
                let (communicator, it) = match communicator {
                    Some(communicator) => (communicator, event.what.collective),
                    None => event.what.named_collective.open(),
                };
                task(communicator, it.function)
            }
            origin::EVENT_P2P => {
                let (communicator, it) = match communicator {
                    Some(communicator) => (communicator, event.what.point_to_point),
                    None => event.what.named_point_to_point.open(),
                };
                task(communicator, it.function)
            }
            origin::EVENT_OPERATION => {
                let here = event.what.pid as u32 == std::process::id();
                EVENTS.operation(parent, here)
            }
            origin::EVENT_STEP => EVENTS.step(parent),
            origin::EVENT_NET => {
                answer(event.what.net, parent);
                0
            }
            _ => 0,
        }
    }
}

impl<T> Named<T> {
    /// Remembers the communicator's name. Returns the communicator and the operation.
    unsafe fn open(self) -> (u64, T) {
        // SAFETY: upheld by the caller.
        unsafe { tell_name(self.communicator, self.name) };
        (self.communicator, self.rest)
    }
}

unsafe fn start(
    handle: *mut *mut c_void,
    event: *mut ProfilerEvent,
    mask: u64,
    communicator: Option<u64>,
) -> Code {
    guarded("profiler startEvent", || {
        // SAFETY: upheld by the caller.
        unsafe {
            if let (Some(handle), Some(event)) = (handle.as_mut(), event.as_ref()) {
                let number = number(event.kind & mask, event, communicator);
                *handle = ptr::without_provenance_mut(number as usize);
            }
        }
        Ok(())
    })
}

/// Mask of the event's type up to version 4, which has one byte for it.
const KIND_BYTE: u64 = 0xff;

unsafe extern "C" fn start_v3(
    _context: *mut c_void,
    handle: *mut *mut c_void,
    event: *mut ProfilerEvent,
) -> Code {
    // SAFETY: NCCL's arguments are passed on unchanged.
    unsafe { start(handle, event, KIND_BYTE, None) }
}

unsafe extern "C" fn start_v4(
    context: *mut c_void,
    handle: *mut *mut c_void,
    event: *mut ProfilerEvent,
) -> Code {
    // SAFETY: NCCL's arguments are passed on unchanged.
    unsafe { start(handle, event, KIND_BYTE, Some(context.addr() as u64)) }
}

unsafe extern "C" fn start_v5(
    context: *mut c_void,
    handle: *mut *mut c_void,
    event: *mut ProfilerEvent,
) -> Code {
    // SAFETY: NCCL's arguments are passed on unchanged.
    unsafe { start(handle, event, u64::MAX, Some(context.addr() as u64)) }
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
