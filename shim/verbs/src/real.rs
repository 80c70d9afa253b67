//! The functions that this library stands in front of.

use core::ffi::{CStr, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};

/// A function of libibverbs.
#[derive(Debug)]
pub(crate) struct Real {
    name: &'static CStr,
    /// `None`: whatever version there is. The private symbols carry that of their release.
    version: Option<&'static CStr>,
    /// 0 before the first look. Relaxed everywhere: looking twice gives the same.
    address: AtomicUsize,
}

impl Real {
    pub(crate) const fn versioned(name: &'static CStr, version: &'static CStr) -> Self {
        Self {
            name,
            version: Some(version),
            address: AtomicUsize::new(0),
        }
    }

    pub(crate) const fn private(name: &'static CStr) -> Self {
        Self {
            name,
            version: None,
            address: AtomicUsize::new(0),
        }
    }

    /// Its address, `None` if libibverbs isn't loaded or has no such function.
    pub(crate) fn address(&self) -> Option<*const c_void> {
        let known = self.address.load(Ordering::Relaxed);
        if known != 0 {
            return Some(known as *const c_void);
        }
        let found = self.find();
        self.address.store(found as usize, Ordering::Relaxed);
        (!found.is_null()).then_some(found)
    }

    fn find(&self) -> *const c_void {
        // Kept open: a program that closes libibverbs would otherwise take from under us what we
        // remember.
        // SAFETY: plain calls with C strings; a handle that dlopen gave is valid.
        unsafe {
            let library = libc::dlopen(
                c"libibverbs.so.1".as_ptr(),
                libc::RTLD_NOLOAD | libc::RTLD_LAZY,
            );
            // Another preloaded library may stand behind us, and wants to be asked. `RTLD_NEXT`
            // finds nothing if libibverbs was opened with RTLD_LOCAL, so that is not the rule.
            let next = self.find_in(libc::RTLD_NEXT);
            if next.is_null() && !library.is_null() {
                self.find_in(library)
            } else {
                next
            }
        }
    }

    /// # Safety
    /// `handle` is one that dlsym(3) takes.
    unsafe fn find_in(&self, handle: *mut c_void) -> *const c_void {
        // SAFETY: upheld by the caller; the names are C strings.
        unsafe {
            match self.version {
                Some(version) => libc::dlvsym(handle, self.name.as_ptr(), version.as_ptr()),
                None => libc::dlsym(handle, self.name.as_ptr()),
            }
        }
    }
}

/// The function at an address. `F` must be the type that the ABI of libibverbs gives it.
pub(crate) fn function_at<F: Copy>(address: *const c_void) -> F {
    const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
    // SAFETY: as large as a function pointer, and the address of a function of that type: only
    // `real!` calls this, which pairs names with types.
    unsafe { core::mem::transmute_copy(&address) }
}

/// A function of libibverbs with its type: `real!(REAL, fn(A) -> B)` is `Option<that function>`.
macro_rules! real {
    ($real:expr, fn($($argument:ty),* $(,)?) $(-> $result:ty)?) => {{
        type Function = unsafe extern "C" fn($($argument),*) $(-> $result)?;
        $real.address().map($crate::real::function_at::<Function>)
    }};
}
pub(crate) use real;
