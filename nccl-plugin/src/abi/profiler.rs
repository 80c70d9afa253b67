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
use crate::origin::{self, Function, Origin, QUESTION_MAGIC, Question};
use crate::plugin::{self, EVENTS};

/// How a collective begins, as of version 4.
#[repr(C)]
#[derive(Clone, Copy)]
struct Collective {
    sequence: u64,
    function: *const c_char,
}

/// How a point-to-point operation begins, as of version 4.
#[repr(C)]
#[derive(Clone, Copy)]
struct PointToPoint {
    function: *const c_char,
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
    /// Of a proxy operation: the process that it belongs to.
    pid: c_int,
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
    assert!(offset_of!(Collective, function) == 8);
    assert!(offset_of!(Named<Collective>, rest) == 16);
    // Little endian, so that a byte and a word begin alike.
    assert!(cfg!(target_endian = "little"));
};

/// `init` of version 3.
pub type InitV3 = unsafe extern "C" fn(context: *mut *mut c_void, mask: *mut c_int) -> Code;
/// `init` of version 4.
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
/// `init` since version 5.
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
type Start = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut Event) -> Code;

/// `ncclProfiler_vN_t`.
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
        Self {
            name: NAME,
            init,
            start,
            stop,
            record,
            finalize,
        }
    }
}

/// What NCCL 2.26 looks for.
#[unsafe(no_mangle)]
pub static ncclProfiler_v3: Profiler<InitV3> = Profiler::new(init_v3, start_v3);

/// What NCCL 2.27 looks for.
#[unsafe(no_mangle)]
pub static ncclProfiler_v4: Profiler<InitV4> = Profiler::new(init_v4, start_v4);

/// What NCCL 2.28 looks for.
#[unsafe(no_mangle)]
pub static ncclProfiler_v5: Profiler<InitV5> = Profiler::new(init_v5, start_v5);

/// What NCCL 2.29 and later look for.
#[unsafe(no_mangle)]
pub static ncclProfiler_v6: Profiler<InitV5> = Profiler::new(init_v5, start_v5);

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

/// A collective or point-to-point operation begins.
///
/// # Safety
/// The string is NCCL's, or null.
unsafe fn task(communicator: u64, function: *const c_char) -> u64 {
    // SAFETY: upheld by the caller.
    let function = Function::from_name(unsafe { bytes(function) });
    EVENTS.task(Origin {
        communicator,
        function,
    })
}

/// Answers the question that a network event of ours carries.
///
/// # Safety
/// `net` is what NCCL got from this plugin: the data of our own id is null or a question, asked
/// further up this very stack.
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

/// Which event this is: the number by which NCCL names it as a parent. The communicator is part of
/// the event in version 3.
///
/// # Safety
/// The fields of this kind are written.
unsafe fn number(kind: u64, event: &Event, communicator: Option<u64>) -> u64 {
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
    /// The communicator, whose name is remembered, and what happens in it.
    ///
    /// # Safety
    /// The name is NCCL's string, or null.
    unsafe fn open(self) -> (u64, T) {
        // SAFETY: upheld by the caller.
        unsafe { tell_name(self.communicator, self.name) };
        (self.communicator, self.rest)
    }
}

/// # Safety
/// The pointers are NCCL's: null or valid, with the fields of the event's kind written.
unsafe fn start(
    handle: *mut *mut c_void,
    event: *mut Event,
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

/// One byte says the kind, up to version 4.
const KIND_BYTE: u64 = 0xff;

unsafe extern "C" fn start_v3(
    _context: *mut c_void,
    handle: *mut *mut c_void,
    event: *mut Event,
) -> Code {
    // SAFETY: passed on as NCCL gave it.
    unsafe { start(handle, event, KIND_BYTE, None) }
}

unsafe extern "C" fn start_v4(
    context: *mut c_void,
    handle: *mut *mut c_void,
    event: *mut Event,
) -> Code {
    // SAFETY: passed on as NCCL gave it.
    unsafe { start(handle, event, KIND_BYTE, Some(context.addr() as u64)) }
}

unsafe extern "C" fn start_v5(
    context: *mut c_void,
    handle: *mut *mut c_void,
    event: *mut Event,
) -> Code {
    // SAFETY: passed on as NCCL gave it.
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
