//! Functions of other libraries, found by name at run time.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::ffi::CString;

/// Converts a name that ends with a zero byte.
///
/// # Panics
/// Panics if another byte is zero, or the last is not.
pub const fn c_name(name: &str) -> &CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("a name with a zero byte inside"),
    }
}

/// A function that a library of Laxity interposes.
#[derive(Debug)]
pub struct Symbol {
    name: &'static CStr,
    /// The version of the function. `None` stands for any.
    version: Option<&'static CStr>,
    /// The library that has the function, if no other library interposes it. `None` means any.
    library: Option<&'static CStr>,
    /// The address, or 0 before it was found. Relaxed everywhere, since all look-ups agree.
    address: AtomicUsize,
}

impl Symbol {
    /// Returns the symbol of this name in any library.
    pub const fn anywhere(name: &'static CStr) -> Self {
        Self::new(name, None, None)
    }

    /// Returns the symbol of this name in `library`, with this version if one is given.
    pub const fn new(
        name: &'static CStr,
        version: Option<&'static CStr>,
        library: Option<&'static CStr>,
    ) -> Self {
        Self { name, version, library, address: AtomicUsize::new(0) }
    }

    /// Returns the address, or `None` if no library in this process has the function.
    #[inline]
    pub fn address(&self) -> Option<*const c_void> {
        match self.address.load(Ordering::Relaxed) {
            0 => self.find(),
            known => Some(known as *const c_void),
        }
    }

    /// Returns the address. If no library has the function besides `own`, which interposes it, this
    /// is printed once for each process, with `advice`.
    pub fn address_or_say(&self, own: &str, advice: &str) -> Option<*const c_void> {
        static SAID: AtomicBool = AtomicBool::new(false);
        let found = self.address();
        if found.is_none() && !SAID.swap(true, Ordering::Relaxed) {
            eprintln!(
                "laxity: {} was called, and no library of this process has it besides {own}: \
                 {advice}",
                self.name.to_string_lossy()
            );
        }
        found
    }

    #[cold]
    fn find(&self) -> Option<*const c_void> {
        // The library is opened before the look-up and kept open. If the program closed it, the
        // stored address would be invalid.
        let opened = self.library.and_then(open);
        // Another preloaded library may interpose the function, too, and has to be called first.
        // `RTLD_NEXT` finds nothing in a library that Python opened with RTLD_LOCAL.
        let found = self.look_up(libc::RTLD_NEXT).or_else(|| match self.library {
            Some(_) => self.look_up(opened?),
            None => loaded().iter().find_map(|library| self.find_in(library)),
        })?;
        self.address.store(found as usize, Ordering::Relaxed);
        Some(found)
    }

    fn look_up(&self, handle: *mut c_void) -> Option<*const c_void> {
        // SAFETY: the handle comes from dlopen or dlsym(3), and the strings are C strings.
        let found = unsafe {
            match self.version {
                Some(version) => libc::dlvsym(handle, self.name.as_ptr(), version.as_ptr()),
                None => libc::dlsym(handle, self.name.as_ptr()),
            }
        };
        (!found.is_null()).then_some(found.cast_const())
    }

    /// Returns the function in this library or its dependencies, unless it is the calling
    /// library's. If found, the library is kept open.
    fn find_in(&self, library: &CStr) -> Option<*const c_void> {
        let handle = open(library)?;
        let found = self.look_up(handle).filter(|found| !is_own(*found));
        if found.is_none() {
            // SAFETY: the handle comes from dlopen, and nothing uses it from now on.
            unsafe { libc::dlclose(handle) };
        }
        found
    }
}

/// Returns the handle of a library that is loaded in this process.
fn open(library: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name is a C string.
    let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
    (!handle.is_null()).then_some(handle)
}

/// Returns the first function of this name that the dynamic linker finds.
pub fn find(name: &CStr) -> Option<*const c_void> {
    // SAFETY: the name is a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found.cast_const())
}

/// Reports whether an address is in the library that contains this code, or can't be determined.
pub fn is_own(address: *const c_void) -> bool {
    static HERE: u8 = 0;
    library_of((&raw const HERE).cast()).is_none_or(|own| library_of(address) == Some(own))
}

/// Returns the base address of the library that contains this address.
fn library_of(address: *const c_void) -> Option<*mut c_void> {
    // SAFETY: plain data, for which zeroes are a value.
    let mut found: libc::Dl_info = unsafe { core::mem::zeroed() };
    // SAFETY: any address is allowed, and `found` can be written.
    let is_found = unsafe { libc::dladdr(address, &raw mut found) } != 0;
    is_found.then_some(found.dli_fbase)
}

/// Returns the file names of all libraries in this process.
fn loaded() -> Vec<CString> {
    unsafe extern "C" fn note(
        info: *mut libc::dl_phdr_info,
        _: usize,
        names: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader passes a valid entry, and the pointer that `loaded` passed.
        let (name, names) = unsafe { ((*info).dlpi_name, &mut *names.cast::<Vec<CString>>()) };
        if !name.is_null() {
            // SAFETY: the name is a C string while the loader holds its lock, as it does here.
            let name = unsafe { CStr::from_ptr(name.cast::<c_char>()) };
            if !name.is_empty() {
                names.push(name.to_owned());
            }
        }
        0
    }
    let mut names: Vec<CString> = Vec::new();
    // SAFETY: the callback only stores names, and keeps no pointer after this call.
    unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut names).cast()) };
    names
}

/// Returns the function at an address.
///
/// # Safety
/// `F` is a function pointer of the type that the function at `address` has.
pub unsafe fn function_at<F: Copy>(address: *const c_void) -> F {
    const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
    // SAFETY: `F` has the size of a function pointer. The caller upholds the rest.
    unsafe { core::mem::transmute_copy(&address) }
}

/// Converts an address into a function with the type of its library's headers. `real!(ADDRESS,
/// fn(A) -> B)` is `Option<that function>`. `ADDRESS` comes from [`Symbol::address`] or [`find`].
#[macro_export]
macro_rules! real {
    ($address:expr, fn($($argument:ty),* $(,)?) $(-> $result:ty)?) => {{
        type Function = unsafe extern "C" fn($($argument),*) $(-> $result)?;
        // SAFETY: the caller of the macro writes the type that belongs to the name.
        $address.map(|address| unsafe { $crate::symbol::function_at::<Function>(address) })
    }};
}
