//! libibverbs, opened at run time, so that the plugin loads on hosts without it.
//!
//! The functions are looked up with the versions of rdma-core 15 and later (rdma-core 44's
//! libibverbs.map). Posting and polling are inline functions in C, and use the context's table.

use core::ffi::{CStr, c_char, c_int, c_void};

use laxity_ibverbs::{
    ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid, ibv_mr, ibv_pd, ibv_port_attr,
    ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_srq, ibv_srq_init_attr,
};
use laxity_job::fork::Leaked;
use laxity_job::real;
use laxity_job::symbol::{c_name, find, function_at};

/// `struct ibv_async_event`, with the kind as a plain number, since the kinds depend on the
/// release.
#[repr(C)]
#[derive(Debug)]
pub(super) struct AsyncEvent {
    pub(super) element: *mut c_void,
    pub(super) kind: c_int,
}

/// Returns the last error of the calling thread.
pub(super) fn os_error() -> std::io::Error {
    std::io::Error::last_os_error()
}

/// The functions in use. Their types are those of `infiniband/verbs.h`.
#[derive(Debug)]
pub(super) struct Library {
    pub(super) get_device_list: unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device,
    pub(super) free_device_list: unsafe extern "C" fn(*mut *mut ibv_device),
    pub(super) open_device: unsafe extern "C" fn(*mut ibv_device) -> *mut ibv_context,
    pub(super) close_device: unsafe extern "C" fn(*mut ibv_context) -> c_int,
    pub(super) query_device: unsafe extern "C" fn(*mut ibv_context, *mut ibv_device_attr) -> c_int,
    pub(super) query_port: unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int,
    pub(super) query_gid: unsafe extern "C" fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int,
    pub(super) alloc_pd: unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_pd,
    pub(super) dealloc_pd: unsafe extern "C" fn(*mut ibv_pd) -> c_int,
    pub(super) reg_mr: unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr,
    /// Registers memory with relaxed ordering. Since rdma-core 28.
    pub(super) reg_mr_iova2:
        Option<unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, u64, u32) -> *mut ibv_mr>,
    /// Registers a DMA-BUF. Since rdma-core 34.
    pub(super) reg_dmabuf_mr:
        Option<unsafe extern "C" fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr>,
    pub(super) dereg_mr: unsafe extern "C" fn(*mut ibv_mr) -> c_int,
    pub(super) create_cq: unsafe extern "C" fn(
        *mut ibv_context,
        c_int,
        *mut c_void,
        *mut c_void,
        c_int,
    ) -> *mut ibv_cq,
    pub(super) destroy_cq: unsafe extern "C" fn(*mut ibv_cq) -> c_int,
    pub(super) create_srq:
        unsafe extern "C" fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq,
    pub(super) destroy_srq: unsafe extern "C" fn(*mut ibv_srq) -> c_int,
    pub(super) create_qp: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp,
    pub(super) modify_qp: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int,
    pub(super) destroy_qp: unsafe extern "C" fn(*mut ibv_qp) -> c_int,
    pub(super) get_async_event: unsafe extern "C" fn(*mut ibv_context, *mut AsyncEvent) -> c_int,
    pub(super) ack_async_event: unsafe extern "C" fn(*mut AsyncEvent),
    status_text: unsafe extern "C" fn(u32) -> *const c_char,
    event_text: unsafe extern "C" fn(c_int) -> *const c_char,
}

/// Returns the function of this name and version. `F` must be its type in the ABI of libibverbs.
fn look_up<F: Copy>(library: *mut c_void, name: &CStr, version: &CStr) -> Option<F> {
    // SAFETY: dlopen returned the handle, and the names are C strings.
    let address = unsafe { libc::dlvsym(library, name.as_ptr(), version.as_ptr()) };
    // SAFETY: only `open` and `find` call this, with the types of the functions that the fields of
    // `Library` are named after.
    (!address.is_null()).then(|| unsafe { function_at(address) })
}

const FIRST: &CStr = c"IBVERBS_1.1";

impl Library {
    /// Returns the library. The first call opens it, and nothing closes it.
    pub(super) fn get() -> Result<&'static Self, &'static str> {
        static LIBRARY: Leaked<Result<Library, String>> = Leaked::none();
        LIBRARY.get_or_make(Self::open).as_ref().map_err(String::as_str)
    }

    fn open() -> Result<Self, String> {
        // SAFETY: the name is a C string, and the flags are plain.
        let handle = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            return Err(String::from(
                "libibverbs.so.1 is not installed (Debian: libibverbs1 and ibverbs-providers)",
            ));
        }
        let found = Self::find(handle).map_err(|name| {
            format!("libibverbs.so.1 has no {name}: it is older than rdma-core 15")
        })?;
        // A fork must not copy registered memory away. Newer kernels ensure that themselves. The
        // call fails if memory is registered already.
        type ForkInit = unsafe extern "C" fn() -> c_int;
        if let Some(fork_init) = look_up::<ForkInit>(handle, c"ibv_fork_init", FIRST) {
            // SAFETY: the function takes no arguments.
            unsafe { fork_init() };
        }
        Ok(found)
    }

    fn find(handle: *mut c_void) -> Result<Self, &'static str> {
        macro_rules! need {
            ($name:literal) => {{
                const NAME: &CStr = c_name(concat!($name, "\0"));
                look_up(handle, NAME, FIRST).ok_or($name)?
            }};
        }
        Ok(Self {
            get_device_list: need!("ibv_get_device_list"),
            free_device_list: need!("ibv_free_device_list"),
            open_device: need!("ibv_open_device"),
            close_device: need!("ibv_close_device"),
            query_device: need!("ibv_query_device"),
            query_port: need!("ibv_query_port"),
            query_gid: need!("ibv_query_gid"),
            alloc_pd: need!("ibv_alloc_pd"),
            dealloc_pd: need!("ibv_dealloc_pd"),
            reg_mr: need!("ibv_reg_mr"),
            reg_mr_iova2: look_up(handle, c"ibv_reg_mr_iova2", c"IBVERBS_1.8"),
            reg_dmabuf_mr: look_up(handle, c"ibv_reg_dmabuf_mr", c"IBVERBS_1.12"),
            dereg_mr: need!("ibv_dereg_mr"),
            create_cq: need!("ibv_create_cq"),
            destroy_cq: need!("ibv_destroy_cq"),
            create_srq: need!("ibv_create_srq"),
            destroy_srq: need!("ibv_destroy_srq"),
            create_qp: need!("ibv_create_qp"),
            modify_qp: need!("ibv_modify_qp"),
            destroy_qp: need!("ibv_destroy_qp"),
            get_async_event: need!("ibv_get_async_event"),
            ack_async_event: need!("ibv_ack_async_event"),
            status_text: need!("ibv_wc_status_str"),
            event_text: need!("ibv_event_type_str"),
        })
    }

    pub(super) fn status(&self, status: u32) -> String {
        // SAFETY: the function takes any number and returns a static string.
        text(unsafe { (self.status_text)(status) })
    }

    pub(super) fn event(&self, kind: c_int) -> String {
        // SAFETY: the function takes any number and returns a static string.
        text(unsafe { (self.event_text)(kind) })
    }
}

fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::from("unknown");
    }
    // SAFETY: the library returns static C strings.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Exempts a context from liblaxity.so, if that is preloaded. This plugin asks for its own permits,
/// so the context's work requests must not be scheduled twice. Must be called before there is a
/// queue pair.
///
/// # Safety
/// `context` is open.
pub(super) unsafe fn exempt(context: *mut ibv_context) {
    if let Some(exempt) = real!(find(c"laxity_verbs_exempt"), fn(*mut ibv_context)) {
        // SAFETY: upheld by the caller. liblaxity.so documents that it takes any open context.
        unsafe { exempt(context) };
    }
}
