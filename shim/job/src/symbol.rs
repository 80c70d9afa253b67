//! Functions of other libraries, which are found by name while the process runs.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};
use std::ffi::CString;

/// A function that a library of ours stands in front of.
#[derive(Debug)]
pub struct Symbol {
    name: &'static CStr,
    /// `None`: whatever version there is.
    version: Option<&'static CStr>,
    /// The library that has it, where no other stands in front of that. `None`: any.
    library: Option<&'static CStr>,
    /// 0 before it was found. Relaxed everywhere: looking twice gives the same.
    address: AtomicUsize,
}

impl Symbol {
    /// The function of this name in any library.
    #[must_use]
    pub const fn anywhere(name: &'static CStr) -> Self {
        Self::new(name, None, None)
    }

    /// The function of this name, and of this version if one is given, in `library`.
    #[must_use]
    pub const fn new(
        name: &'static CStr,
        version: Option<&'static CStr>,
        library: Option<&'static CStr>,
    ) -> Self {
        Self {
            name,
            version,
            library,
            address: AtomicUsize::new(0),
        }
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &'static CStr {
        self.name
    }

    /// The address, `None` if no library in this process has the function.
    #[inline]
    pub fn address(&self) -> Option<*const c_void> {
        match self.address.load(Ordering::Relaxed) {
            0 => self.find(),
            known => Some(known as *const c_void),
        }
    }

    #[cold]
    fn find(&self) -> Option<*const c_void> {
        // Opened before the lookup and kept open: a program that closes the library would
        // otherwise take away what is remembered here.
        let opened = self.library.and_then(open);
        // Another preloaded library may stand behind ours, and wants to be asked first. `RTLD_NEXT`
        // finds nothing in a library that was opened with RTLD_LOCAL, as Python opens plugins.
        let found = self
            .look_up(libc::RTLD_NEXT)
            .or_else(|| match self.library {
                Some(_) => self.look_up(opened?),
                None => loaded().iter().find_map(|library| self.find_in(library)),
            })?;
        self.address.store(found as usize, Ordering::Relaxed);
        Some(found)
    }

    fn look_up(&self, handle: *mut c_void) -> Option<*const c_void> {
        // SAFETY: a handle that dlopen gave or that dlsym(3) names, and C strings.
        let found = unsafe {
            match self.version {
                Some(version) => libc::dlvsym(handle, self.name.as_ptr(), version.as_ptr()),
                None => libc::dlsym(handle, self.name.as_ptr()),
            }
        };
        (!found.is_null()).then_some(found.cast_const())
    }

    /// The function in this library or in those that it needs, if it is not ours. Then the library
    /// is kept open.
    fn find_in(&self, library: &CStr) -> Option<*const c_void> {
        let handle = open(library)?;
        let found = self.look_up(handle).filter(|found| !is_own(*found));
        if found.is_none() {
            // SAFETY: a handle that dlopen gave, and that nothing uses from here on.
            unsafe { libc::dlclose(handle) };
        }
        found
    }
}

/// The handle of a library that is in this process.
fn open(library: &CStr) -> Option<*mut c_void> {
    // SAFETY: a plain call with a C string.
    let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
    (!handle.is_null()).then_some(handle)
}

/// The first function of this name that the dynamic linker finds.
#[must_use]
pub fn find(name: &CStr) -> Option<*const c_void> {
    // SAFETY: a lookup by a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found.cast_const())
}

/// Whether an address is in the library that this code is part of, or that can't be known.
#[must_use]
pub fn is_own(address: *const c_void) -> bool {
    static HERE: u8 = 0;
    library_of((&raw const HERE).cast()).is_none_or(|own| library_of(address) == Some(own))
}

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

/// The function at an address.
///
/// # Safety
/// `F` is a function pointer of the type that the function at `address` has.
#[must_use]
pub unsafe fn function_at<F: Copy>(address: *const c_void) -> F {
    const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
    // SAFETY: as large as a function pointer; the rest is upheld by the caller.
    unsafe { core::mem::transmute_copy(&address) }
}

/// A function with the type that its library's headers give it: `real!(ADDRESS, fn(A) -> B)` is
/// `Option<that function>`. `ADDRESS` is what [`Symbol::address`] or [`find`] gives.
#[macro_export]
macro_rules! real {
    ($address:expr, fn($($argument:ty),* $(,)?) $(-> $result:ty)?) => {{
        type Function = unsafe extern "C" fn($($argument),*) $(-> $result)?;
        // SAFETY: whoever writes the name writes the type that belongs to it.
        $address.map(|address| unsafe { $crate::symbol::function_at::<Function>(address) })
    }};
}
