//! The functions that this library stands in front of.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::ffi::CString;

/// A function of Mooncake's.
#[derive(Debug)]
pub(crate) struct Real {
    name: &'static CStr,
    /// 0 before it was found. Relaxed everywhere: looking twice gives the same.
    address: AtomicUsize,
}

impl Real {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self {
            name,
            address: AtomicUsize::new(0),
        }
    }

    /// Its address, `None` if no library in this process has it. Whoever called us was linked
    /// against one, so that is said, once.
    pub(crate) fn address(&self) -> Option<*const c_void> {
        let found = self.look();
        if found.is_none() {
            static SAID: AtomicBool = AtomicBool::new(false);
            if !SAID.swap(true, Ordering::Relaxed) {
                eprintln!(
                    "laxity: {} was called, and no library of this process has it besides \
                     liblaxity_mooncake.so: is \
                     libtransfer_engine.so missing from what the program links? The call fails",
                    self.name.to_string_lossy()
                );
            }
        }
        found
    }

    /// [`Self::address`], of one that need not be there.
    pub(crate) fn look(&self) -> Option<*const c_void> {
        let known = self.address.load(Ordering::Relaxed);
        if known != 0 {
            return Some(known as *const c_void);
        }
        let found = find(self.name)?;
        self.address.store(found as usize, Ordering::Relaxed);
        Some(found)
    }
}

fn find(name: &CStr) -> Option<*const c_void> {
    // SAFETY: a lookup by a C string.
    let next = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if !next.is_null() {
        return Some(next);
    }
    // `RTLD_NEXT` sees what the program was started with and what was opened for all. A plugin that
    // was opened with RTLD_LOCAL, as Python does, brings Mooncake along where only the plugin sees
    // it, and still calls us first.
    loaded().iter().find_map(|library| find_in(library, name))
}

/// The function in this library or in those that it needs, if it is not ours.
fn find_in(library: &CStr, name: &CStr) -> Option<*const c_void> {
    // SAFETY: plain calls with C strings; the handle is one that dlopen gave.
    unsafe {
        let handle = libc::dlopen(library.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY);
        if handle.is_null() {
            return None;
        }
        let found = libc::dlsym(handle, name.as_ptr());
        if found.is_null() || library_of(found) == library_of((&raw const HERE).cast()) {
            libc::dlclose(handle);
            return None;
        }
        // Kept open: a program that closes it would otherwise take from under us what we remember.
        Some(found)
    }
}

/// In this library, and in no other.
static HERE: u8 = 0;

/// Where the library begins that holds this address.
fn library_of(address: *const c_void) -> Option<*mut c_void> {
    // SAFETY: plain data, for which zeroes are a value.
    let mut found: libc::Dl_info = unsafe { core::mem::zeroed() };
    // SAFETY: any address will do; `found` is valid to write to.
    let is_found = unsafe { libc::dladdr(address, &raw mut found) } != 0;
    is_found.then_some(found.dli_fbase)
}

/// The files of all libraries in this process.
fn loaded() -> Vec<CString> {
    unsafe extern "C" fn note(
        info: *mut libc::dl_phdr_info,
        _: usize,
        names: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader gives a valid entry, and back what `loaded` gave it.
        let (name, names) = unsafe { ((*info).dlpi_name, &mut *names.cast::<Vec<CString>>()) };
        if !name.is_null() {
            // SAFETY: a C string while the loader holds its lock, which it does here.
            let name = unsafe { CStr::from_ptr(name.cast::<c_char>()) };
            if !name.is_empty() {
                names.push(name.to_owned());
            }
        }
        0
    }
    let mut names: Vec<CString> = Vec::new();
    // SAFETY: the callback only notes names, and nothing of it outlives this call.
    unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut names).cast()) };
    names
}

/// The function at an address. `F` must be the type that Mooncake's headers give it.
pub(crate) fn function_at<F: Copy>(address: *const c_void) -> F {
    const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
    // SAFETY: as large as a function pointer, and the address of a function of that type: only
    // `real!` calls this, which pairs names with types.
    unsafe { core::mem::transmute_copy(&address) }
}

/// A function of Mooncake's with its type: `real!("name", fn(A) -> B)` is `Option<that function>`.
macro_rules! real {
    ($name:literal, fn($($argument:ty),* $(,)?) $(-> $result:ty)?) => {{
        static REAL: $crate::real::Real = $crate::real::Real::new($name);
        type Function = unsafe extern "C" fn($($argument),*) $(-> $result)?;
        REAL.address().map($crate::real::function_at::<Function>)
    }};
}
pub(crate) use real;
