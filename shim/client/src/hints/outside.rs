//! The same library once more in the same process.
//!
//! Scopes and memory are said to whoever posts the transfer. That may be another copy of this
//! library: the one inside a preloaded `liblaxity.so`, while this one is part of an extension of
//! Python. Each copy has tables of its own. So what is said here is also said to the first copy
//! that the dynamic linker finds by name, if that is not this one.
//!
//! It is looked for once: a library that is to stand before all others was loaded before any of
//! them.

use core::ffi::{CStr, c_int, c_void};
use core::mem::transmute;
use std::sync::OnceLock;

use laxity_shm::record::Stage;

use crate::ffi::metadata::LaxScope;
use crate::scope::Scope;

/// The functions of `laxity.h` that have state of the process or of a thread.
struct Other {
    scope_push: unsafe extern "C" fn(*const LaxScope) -> c_int,
    scope_pop: extern "C" fn() -> c_int,
    memory_layer: extern "C" fn(*const c_void, u64, u16, u8) -> c_int,
    memory_owner: extern "C" fn(*const c_void, u64, u64, u64, u64) -> c_int,
    memory_forget: extern "C" fn(*const c_void, u64) -> c_int,
}

fn find(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a lookup by a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Where the library begins that holds this address.
fn library_of(address: *const c_void) -> Option<*mut c_void> {
    // SAFETY: plain data, for which zeroes are a value.
    let mut found: libc::Dl_info = unsafe { core::mem::zeroed() };
    // SAFETY: any address will do; `found` is valid to write to.
    let is_found = unsafe { libc::dladdr(address, &raw mut found) } != 0;
    is_found.then_some(found.dli_fbase)
}

/// In this copy, and in no other: the address of a function by its name may be another copy's.
static HERE: u8 = 0;

impl Other {
    fn look() -> Option<Self> {
        let push = find(c"lax_scope_push")?;
        let own = library_of((&raw const HERE).cast());
        if own.is_none() || library_of(push) == own {
            return None;
        }
        let version = find(c"lax_abi_version")?;
        // SAFETY: the names are those of `laxity.h`, and a library that exports them keeps its
        // signatures; the one whose arguments may change with the version of the interface is asked
        // for it first.
        unsafe {
            let version: extern "C" fn() -> u32 = transmute(version);
            if version() != crate::ffi::ABI_VERSION {
                return None;
            }
            Some(Self {
                scope_push: transmute::<*mut c_void, unsafe extern "C" fn(*const LaxScope) -> c_int>(
                    push,
                ),
                scope_pop: transmute::<*mut c_void, extern "C" fn() -> c_int>(find(
                    c"lax_scope_pop",
                )?),
                memory_layer: transmute::<
                    *mut c_void,
                    extern "C" fn(*const c_void, u64, u16, u8) -> c_int,
                >(find(c"lax_memory_layer")?),
                memory_owner: transmute::<
                    *mut c_void,
                    extern "C" fn(*const c_void, u64, u64, u64, u64) -> c_int,
                >(find(c"lax_memory_owner")?),
                memory_forget: transmute::<*mut c_void, extern "C" fn(*const c_void, u64) -> c_int>(
                    find(c"lax_memory_forget")?,
                ),
            })
        }
    }
}

/// What is said of transfers of this thread from an address, in the first copy that says so; `None`
/// if there is no such copy. That may be this one.
pub(super) fn scope_of(address: u64) -> Option<Scope> {
    type Ask = unsafe extern "C" fn(*const c_void, *mut LaxScope) -> c_int;
    static ASK: OnceLock<Option<Ask>> = OnceLock::new();
    let ask = ASK.get_or_init(|| {
        // SAFETY: the name is one of `laxity.h`, and a library that exports it keeps its signature;
        // what may grow in the struct comes behind the size that it is given.
        find(c"lax_scope_of").map(|found| unsafe { transmute::<*mut c_void, Ask>(found) })
    });
    let mut said = LaxScope::of(&Scope::default());
    // SAFETY: a valid scope that says its size.
    let answer = unsafe { (*ask)?(address as *const c_void, &raw mut said) };
    Some(match answer {
        1.. => said.scope().unwrap_or_default(),
        _ => Scope::default(),
    })
}

fn other() -> Option<&'static Other> {
    static OTHER: OnceLock<Option<Other>> = OnceLock::new();
    OTHER.get_or_init(Other::look).as_ref()
}

/// Whether there is one.
pub fn is_there() -> bool {
    other().is_some()
}

pub(super) fn scope_push(scope: &Scope) {
    if let Some(other) = other() {
        let scope = LaxScope::of(scope);
        // SAFETY: a valid scope that says its size.
        unsafe { (other.scope_push)(&raw const scope) };
    }
}

pub(super) fn scope_pop() {
    if let Some(other) = other() {
        (other.scope_pop)();
    }
}

pub(super) fn memory_layer(address: u64, bytes: u64, layer: u16, stage: Option<Stage>) {
    if let Some(other) = other() {
        let stage = stage.map_or(0, |stage| stage as u8);
        (other.memory_layer)(address as *const c_void, bytes, layer, stage);
    }
}

pub(super) fn memory_owner(address: u64, bytes: u64, batch: u64, request: u64, deadline_ns: u64) {
    if let Some(other) = other() {
        (other.memory_owner)(address as *const c_void, bytes, batch, request, deadline_ns);
    }
}

pub(super) fn memory_forget(address: u64, bytes: u64) {
    if let Some(other) = other() {
        (other.memory_forget)(address as *const c_void, bytes);
    }
}
