//! The part of `laxity.h` for the metadata of transfers: thread scopes and memory.

use core::ffi::{c_int, c_void};

use super::{INVALID, guarded, sized};
use crate::Stage;
use crate::memory::{self, MemoryError};
use crate::scope::{self, Scope};

/// The number of an unknown layer, `LAX_LAYER_UNKNOWN`.
const LAYER_UNKNOWN: u16 = u16::MAX;

/// A scope, `lax_scope`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaxScope {
    size: u32,
    layer: u16,
    stage: u8,
    reserved: u8,
    batch: u64,
    request: u64,
    deadline_ns: u64,
}

const _: () = assert!(size_of::<LaxScope>() == 32);

impl LaxScope {
    pub(crate) fn of(scope: &Scope) -> Self {
        Self {
            size: size_of::<Self>() as u32,
            layer: scope.layer.unwrap_or(LAYER_UNKNOWN),
            stage: scope.stage.map_or(0, |stage| stage as u8),
            reserved: 0,
            batch: scope.batch,
            request: scope.request,
            deadline_ns: scope.deadline_ns,
        }
    }

    /// Returns the scope, or `None` if its stage is invalid.
    pub(crate) fn scope(&self) -> Option<Scope> {
        Some(Scope {
            stage: stage(self.stage)?,
            layer: layer(self.layer),
            batch: self.batch,
            request: self.request,
            deadline_ns: self.deadline_ns,
        })
    }
}

/// Returns `Some(None)` for "unknown", and `None` for an invalid number.
fn stage(number: u8) -> Option<Option<Stage>> {
    match number {
        0 => Some(None),
        number => Stage::from_number(number).map(Some),
    }
}

fn layer(number: u16) -> Option<u16> {
    (number != LAYER_UNKNOWN).then_some(number)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_scope_push(scope: *const LaxScope) -> c_int {
    // SAFETY: upheld by the caller.
    let Some(scope) = (unsafe { sized(scope.cast_mut()).and_then(|scope| (*scope).scope()) })
    else {
        return INVALID;
    };
    scope::push(scope);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lax_scope_of(address: *const c_void, said: *mut LaxScope) -> c_int {
    // SAFETY: upheld by the caller.
    let Some(said) = (unsafe { sized(said).map(|said| &mut *said) }) else { return INVALID };
    guarded(INVALID, || {
        let found = scope::said_of(address as u64);
        *said = LaxScope { size: said.size, ..LaxScope::of(&found) };
        c_int::from(found != Scope::default())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn lax_scope_pop() -> c_int {
    if scope::pop() { 0 } else { INVALID }
}

fn answer(result: Result<(), MemoryError>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(MemoryError::NoRange { .. }) => INVALID,
        Err(MemoryError::Overlap { .. }) => -libc::EEXIST,
        Err(MemoryError::Full) => -libc::ENOMEM,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn lax_memory_layer(
    address: *const c_void,
    bytes: u64,
    layer: u16,
    stage_number: u8,
) -> c_int {
    let Some(stage) = stage(stage_number) else { return INVALID };
    guarded(INVALID, || answer(memory::set_layer(address as u64, bytes, layer, stage)))
}

#[unsafe(no_mangle)]
pub extern "C" fn lax_memory_owner(
    address: *const c_void,
    bytes: u64,
    batch: u64,
    request: u64,
    deadline_ns: u64,
) -> c_int {
    guarded(INVALID, || {
        answer(memory::set_owner(address as u64, bytes, batch, request, deadline_ns))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn lax_memory_forget(address: *const c_void, bytes: u64) -> c_int {
    guarded(INVALID, || answer(memory::forget(address as u64, bytes)))
}
