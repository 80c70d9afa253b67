//! Another copy of this library in the same process.
//!
//! Scopes and memory must reach the library that posts the transfer. That may be another copy of
//! this library, inside a preloaded `liblaxity.so`, while this one is part of a Python extension.
//! Each copy has its own tables. Hints that are given here are therefore also given to the first
//! copy that the dynamic linker finds by name, if that is another one.
//!
//! The copy is looked for at the first use. A library that precedes all others was loaded before
//! them.

use core::ffi::{c_int, c_void};

use laxity_job::fork::Leaked;
use laxity_job::real;
use laxity_job::symbol::{find, is_own};
use laxity_shm::record::Stage;

use crate::ffi::metadata::LaxScope;
use crate::scope::Scope;

/// Functions of `laxity.h` that change the state of the process or of a thread.
struct Other {
    scope_push: unsafe extern "C" fn(*const LaxScope) -> c_int,
    scope_pop: unsafe extern "C" fn() -> c_int,
    memory_layer: unsafe extern "C" fn(*const c_void, u64, u16, u8) -> c_int,
    memory_owner: unsafe extern "C" fn(*const c_void, u64, u64, u64, u64) -> c_int,
    memory_forget: unsafe extern "C" fn(*const c_void, u64) -> c_int,
}

impl Other {
    fn look() -> Option<Self> {
        let push = find(c"lax_scope_push")?;
        if is_own(push) {
            return None;
        }
        // A library that exports these names keeps their signatures. Only one has arguments that
        // depend on the version of the interface, so the version is checked first.
        let version = real!(find(c"lax_abi_version"), fn() -> u32)?;
        // SAFETY: declared like this in `laxity.h`.
        if unsafe { version() } != crate::ffi::ABI_VERSION {
            return None;
        }
        Some(Self {
            scope_push: real!(Some(push), fn(*const LaxScope) -> c_int)?,
            scope_pop: real!(find(c"lax_scope_pop"), fn() -> c_int)?,
            memory_layer: real!(
                find(c"lax_memory_layer"),
                fn(*const c_void, u64, u16, u8) -> c_int
            )?,
            memory_owner: real!(
                find(c"lax_memory_owner"),
                fn(*const c_void, u64, u64, u64, u64) -> c_int
            )?,
            memory_forget: real!(find(c"lax_memory_forget"), fn(*const c_void, u64) -> c_int)?,
        })
    }
}

/// Returns the values for a transfer of this thread from an address, from the first copy that has
/// this function. Returns `None` if there is no such copy. It may be this one.
pub(super) fn scope_of(address: u64) -> Option<Scope> {
    type Ask = unsafe extern "C" fn(*const c_void, *mut LaxScope) -> c_int;
    static ASK: Leaked<Option<Ask>> = Leaked::none();
    // Later versions only append to the struct, and write no more than its given size.
    let ask =
        ASK.get_or_make(|| real!(find(c"lax_scope_of"), fn(*const c_void, *mut LaxScope) -> c_int));
    let mut said = LaxScope::of(&Scope::default());
    // SAFETY: a valid scope that contains its size.
    let answer = unsafe { (*ask)?(address as *const c_void, &raw mut said) };
    Some(match answer {
        1.. => said.scope().unwrap_or_default(),
        _ => Scope::default(),
    })
}

fn other() -> Option<&'static Other> {
    static OTHER: Leaked<Option<Other>> = Leaked::none();
    OTHER.get_or_make(Other::look).as_ref()
}

/// Reports whether there is another copy.
pub fn is_there() -> bool {
    other().is_some()
}

pub(super) fn scope_push(scope: &Scope) {
    if let Some(other) = other() {
        let scope = LaxScope::of(scope);
        // SAFETY: a valid scope that contains its size.
        unsafe { (other.scope_push)(&raw const scope) };
    }
}

pub(super) fn scope_pop() {
    if let Some(other) = other() {
        // SAFETY: the function takes no arguments.
        unsafe { (other.scope_pop)() };
    }
}

pub(super) fn memory_layer(address: u64, bytes: u64, layer: u16, stage: Option<Stage>) {
    if let Some(other) = other() {
        let stage = stage.map_or(0, |stage| stage as u8);
        // SAFETY: the function only stores the address.
        unsafe { (other.memory_layer)(address as *const c_void, bytes, layer, stage) };
    }
}

pub(super) fn memory_owner(address: u64, bytes: u64, batch: u64, request: u64, deadline_ns: u64) {
    if let Some(other) = other() {
        let address = address as *const c_void;
        // SAFETY: the function only stores the address.
        unsafe { (other.memory_owner)(address, bytes, batch, request, deadline_ns) };
    }
}

pub(super) fn memory_forget(address: u64, bytes: u64) {
    if let Some(other) = other() {
        // SAFETY: the function only stores the address.
        unsafe { (other.memory_forget)(address as *const c_void, bytes) };
    }
}
