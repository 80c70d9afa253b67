//! The C interface, as documented in `include/laxity.h`.
//!
//! No panic crosses into C: each function catches it and returns as if there were no daemon.
//! `tests/c_abi.rs` compiles a C program against the header and compares sizes and offsets with the
//! structs here.
//!
//! # Safety
//! This holds for all functions here. A pointer is null or valid, and a struct is valid for the
//! size in its first field. Clients and lanes come from `lax_attach` and `lax_lane_open`, and are
//! not used after `lax_detach` and `lax_lane_close`. No two threads use a lane at the same time.

#![allow(clippy::missing_safety_doc, reason = "said above, once for all functions")]
#![allow(missing_docs, reason = "laxity.h describes the functions")]

pub mod hints;
pub mod metadata;

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::Duration;

use crate::ticket::TicketState;
use crate::{Client, Direction, Flow, Lane, Mode, Options, Permit, Stage, Stats, Ticket};

pub(crate) const ABI_VERSION: u32 = 1;
const INVALID: c_int = -libc::EINVAL;

/// Options of an attachment, `lax_options`.
#[repr(C)]
#[derive(Debug)]
pub struct LaxOptions {
    size: u32,
    mode: u32,
    socket: *const c_char,
    name: *const c_char,
    stall_timeout_ms: u32,
    reattach_every_ms: u32,
    attach_timeout_ms: u32,
    reserved: u32,
}

/// A flow, `lax_flow`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaxFlow {
    size: u32,
    layer: u16,
    stage: u8,
    direction: u8,
    nic: u8,
    unused: u8,
    whole: u8,
    peer: u8,
    reserved: [u8; 4],
    bytes: u64,
    batch: u64,
    request: u64,
    deadline_ns: u64,
}

/// A ticket, `lax_ticket`. Any bits from C are a valid value, though possibly a useless one.
#[repr(C)]
#[derive(Debug)]
pub struct LaxTicket {
    ticket: Ticket,
    reserved: [u64; 4],
}

/// A permit, `lax_grant`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct LaxPermit {
    bytes: u64,
    level: u8,
    dscp: u8,
    last: u8,
    bypassed: u8,
    reserved: [u8; 4],
}

/// Counters, `lax_stats`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct LaxStats {
    size: u32,
    scheduled: u32,
    stats: Stats,
}

const _: () = {
    assert!(size_of::<LaxOptions>() == 40);
    assert!(size_of::<LaxFlow>() == 48);
    assert!(size_of::<LaxTicket>() == 64);
    assert!(size_of::<LaxPermit>() == 16);
    assert!(size_of::<LaxStats>() == 64);
};

impl LaxPermit {
    fn of(permit: Permit) -> Self {
        let Permit { bytes, level, dscp, last, bypassed } = permit;
        Self { bytes, level, dscp, last: last.into(), bypassed: bypassed.into(), reserved: [0; 4] }
    }
}

impl LaxFlow {
    fn flow(&self) -> Option<Flow> {
        let direction = match self.direction {
            0 => Direction::Egress,
            1 => Direction::Ingress,
            _ => return None,
        };
        Some(Flow {
            stage: Stage::from_number(self.stage)?,
            direction,
            nic: self.nic,
            layer: self.layer,
            bytes: self.bytes,
            batch: self.batch,
            request: self.request,
            deadline_ns: self.deadline_ns,
            whole: self.whole != 0,
            peer: self.peer,
            ..Flow::default()
        })
    }
}

/// Returns the result of `body`, or `otherwise` if it panics. The client stays usable after a
/// panic.
fn guarded<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(otherwise)
}

unsafe fn text<'a>(text: *const c_char) -> Option<&'a CStr> {
    // SAFETY: upheld by the caller, since the pointer is not null.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
}

/// Returns a struct of C if its size covers all fields known here. Later versions may be larger.
unsafe fn sized<T>(at: *mut T) -> Option<*mut T> {
    // SAFETY: upheld by the caller. The size is read before any other field.
    let is_whole = !at.is_null() && unsafe { at.cast::<u32>().read() } as usize >= size_of::<T>();
    is_whole.then_some(at)
}

#[unsafe(no_mangle)]
pub extern "C" fn lax_abi_version() -> u32 {
    ABI_VERSION
}

/// Attaches to a daemon. Null means the options of the environment.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_attach(options: *const LaxOptions) -> *mut Client {
    guarded(core::ptr::null_mut(), || {
        let options = if options.is_null() {
            Options::from_env()
        } else {
            // SAFETY: upheld by the caller.
            match unsafe { sized(options.cast_mut()).and_then(|given| (*given).options()) } {
                Some(options) => options,
                None => return core::ptr::null_mut(),
            }
        };
        Box::into_raw(Box::new(Client::attach(options)))
    })
}

impl LaxOptions {
    unsafe fn options(&self) -> Option<Options> {
        let mut options = Options { mode: mode(self.mode)?, ..Options::default() };
        // SAFETY: upheld by the caller.
        if let Some(socket) = unsafe { text(self.socket) } {
            options.socket = PathBuf::from(OsStr::from_bytes(socket.to_bytes()));
        }
        // SAFETY: upheld by the caller.
        if let Some(name) = unsafe { text(self.name) } {
            options.name = name.to_string_lossy().into_owned();
        }
        for (field, millis) in [
            (&mut options.stall_timeout, self.stall_timeout_ms),
            (&mut options.reattach_every, self.reattach_every_ms),
            (&mut options.attach_timeout, self.attach_timeout_ms),
        ] {
            if millis != 0 {
                *field = Duration::from_millis(u64::from(millis));
            }
        }
        Some(options)
    }
}

fn mode(number: u32) -> Option<Mode> {
    Mode::from_number(u8::try_from(number).ok()?)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_detach(client: *mut Client) {
    if !client.is_null() {
        // SAFETY: upheld by the caller.
        guarded((), || drop(unsafe { Box::from_raw(client) }));
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_is_scheduled(client: *const Client) -> c_int {
    guarded(0, || {
        // SAFETY: upheld by the caller.
        unsafe { client.as_ref() }.map_or(0, |client| client.is_scheduled().into())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_dscp(client: *const Client, level: u8) -> u8 {
    guarded(0, || {
        // SAFETY: upheld by the caller.
        unsafe { client.as_ref() }.map_or(0, |client| client.dscp(level))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_peer(address: *const [u8; 16]) -> u8 {
    guarded(0, || {
        // SAFETY: upheld by the caller. Bytes need no alignment.
        unsafe { address.as_ref() }.map_or(0, |address| crate::peers::number(*address))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_get_stats(client: *const Client, stats: *mut LaxStats) -> c_int {
    guarded(INVALID, || {
        // SAFETY: upheld by the caller.
        let given = unsafe { client.as_ref().zip(sized(stats).map(|stats| &mut *stats)) };
        let Some((client, stats)) = given else { return INVALID };
        let (size, scheduled) = (stats.size, client.is_scheduled().into());
        *stats = LaxStats { size, scheduled, stats: client.stats() };
        0
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_lane_open(client: *const Client) -> *mut Lane {
    guarded(core::ptr::null_mut(), || {
        // SAFETY: upheld by the caller.
        match unsafe { client.as_ref() } {
            Some(client) => Box::into_raw(Box::new(client.lane())),
            None => core::ptr::null_mut(),
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_lane_close(lane: *mut Lane) {
    if !lane.is_null() {
        // SAFETY: upheld by the caller.
        guarded((), || drop(unsafe { Box::from_raw(lane) }));
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_submit(
    lane: *mut Lane,
    flow: *const LaxFlow,
    ticket: *mut LaxTicket,
) -> c_int {
    if ticket.is_null() {
        return INVALID;
    }
    // SAFETY: not null, so it can be written. The old value is not read, so C need not set it.
    let answer = |new: Ticket| unsafe { ticket.write(LaxTicket { ticket: new, reserved: [0; 4] }) };
    // SAFETY: upheld by the caller.
    let (lane, flow) = unsafe { (lane.as_mut(), sized(flow.cast_mut()).map(|flow| *flow)) };
    let Some(flow) = flow else {
        answer(Ticket::bypassed(0));
        return INVALID;
    };
    let (Some(lane), Some(valid)) = (lane, flow.flow()) else {
        answer(Ticket::bypassed(flow.bytes));
        return INVALID;
    };
    let submitted = catch_unwind(AssertUnwindSafe(|| lane.submit(&valid)));
    answer(submitted.unwrap_or(Ticket::bypassed(flow.bytes)));
    0
}

/// Gets one permit from `Lane::poll` or `Lane::wait`.
unsafe fn permit(
    lane: *mut Lane,
    ticket: *mut LaxTicket,
    permit: *mut LaxPermit,
    how: impl FnOnce(&mut Lane, &mut Ticket) -> Option<Permit>,
) -> c_int {
    // SAFETY: upheld by the caller.
    let (lane, ticket, permit) = unsafe { (lane.as_mut(), ticket.as_mut(), permit.as_mut()) };
    let (Some(ticket), Some(permit)) = (ticket, permit) else { return INVALID };
    let ticket = &mut ticket.ticket;
    let result = match lane {
        _ if ticket.is_done() => None,
        None => Some(ticket.rest()),
        Some(lane) => match catch_unwind(AssertUnwindSafe(|| how(lane, ticket))) {
            Ok(result) => result,
            Err(_) => Some(ticket.rest()),
        },
    };
    *permit =
        LaxPermit::of(result.unwrap_or(Permit { last: ticket.is_done(), ..Permit::default() }));
    c_int::from(result.is_some())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_poll(
    lane: *mut Lane,
    ticket: *mut LaxTicket,
    out: *mut LaxPermit,
) -> c_int {
    // SAFETY: upheld by the caller.
    unsafe { permit(lane, ticket, out, Lane::poll) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_wait(
    lane: *mut Lane,
    ticket: *mut LaxTicket,
    out: *mut LaxPermit,
) -> c_int {
    // SAFETY: upheld by the caller.
    unsafe { permit(lane, ticket, out, |lane, ticket| Some(lane.wait(ticket))) }
}

/// Runs `body` on a lane that is not null.
unsafe fn on_lane(lane: *mut Lane, body: impl FnOnce(&mut Lane) -> c_int) -> c_int {
    // SAFETY: upheld by the caller.
    let Some(lane) = (unsafe { lane.as_mut() }) else { return INVALID };
    guarded(INVALID, || body(lane))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_wait_any(lane: *mut Lane, timeout_ns: u64) -> c_int {
    // SAFETY: upheld by the caller.
    unsafe { on_lane(lane, |lane| lane.wait_any(Duration::from_nanos(timeout_ns)).into()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_complete(
    lane: *mut Lane,
    ticket: *const LaxTicket,
    bytes: u64,
) -> c_int {
    // SAFETY: upheld by the caller.
    let Some(ticket) = (unsafe { ticket.as_ref() }) else { return INVALID };
    // SAFETY: upheld by the caller.
    unsafe {
        on_lane(lane, |lane| {
            lane.complete(&ticket.ticket, bytes);
            0
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_cancel(lane: *mut Lane, ticket: *mut LaxTicket) -> c_int {
    // SAFETY: upheld by the caller.
    let Some(ticket) = (unsafe { ticket.as_mut() }) else { return INVALID };
    let ticket = core::mem::replace(
        &mut ticket.ticket,
        Ticket { state: TicketState::DONE, ..Ticket::bypassed(0) },
    );
    // SAFETY: upheld by the caller.
    unsafe {
        on_lane(lane, |lane| {
            lane.cancel(ticket);
            0
        })
    }
}
