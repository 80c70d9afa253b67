//! A loaded plugin and its contexts, one per communicator of NCCL.

use std::error::Error as _;
use std::ffi::{c_int, c_void};
use std::path::Path;
use std::ptr;
use std::rc::Rc;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::abi::{self, CommConfig, NetTable, SLOTS, SYMBOL};
use crate::comm::{Connecting, Handle, Listener};
use crate::error::{HostError, checked};
use crate::log;

/// The callback of a host without a profiler. It keeps no event.
unsafe extern "C" fn no_profiler(
    _event: *mut *mut c_void,
    _kind: c_int,
    _parent: *mut c_void,
    _plugin: i64,
    _data: *mut c_void,
) -> c_int {
    0
}

/// Returns an error if the table lacks a function.
fn check(slots: &[usize; SLOTS], path: &Path) -> Result<(), HostError> {
    let lacking = abi::NEEDED.iter().find(|(slot, _)| slots[*slot] == 0);
    lacking.map_or(Ok(()), |(_, function)| {
        Err(HostError::Incomplete { path: path.to_owned(), function })
    })
}

/// A library and its functions. The last user closes it.
struct Loaded {
    calls: NetTable,
    /// The library, which must be dropped last, since it contains the functions above.
    _library: Library,
}

#[derive(Clone)]
pub struct Plugin(Rc<Loaded>);

impl std::fmt::Debug for Plugin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Plugin")
    }
}

impl Plugin {
    pub fn load(path: &Path) -> Result<Self, HostError> {
        let library =
            // SAFETY: the library's constructors run, which nothing can check. The crate's
            // documentation leaves the choice of the library to the caller. `RTLD_LOCAL` doesn't
            // change code that is already loaded.
            unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
                // The dynamic linker's own message has not the crate's prefix.
                let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                HostError::Load { path: path.to_owned(), reason }
            })?;
        let no_table = || HostError::NoTable { path: path.to_owned() };
        // SAFETY: an object of this name is a table of this layout in every plugin. The pointer is
        // used while the library is loaded. Only its address is taken here.
        let table = unsafe { library.get::<*const NetTable>(SYMBOL.as_bytes()) }
            .map_err(|_| no_table())?
            .into_raw()
            .cast::<NetTable>()
            .cast_const();
        if table.is_null() || !table.is_aligned() {
            return Err(no_table());
        }
        // SAFETY: not null, aligned, and a table of this layout, which nobody writes. A slot is an
        // address or null.
        check(unsafe { &*table.cast::<[usize; SLOTS]>() }, path)?;
        // SAFETY: the table is valid, and all functions in `NEEDED` are there.
        let calls = unsafe { *table };
        Ok(Self(Rc::new(Loaded { calls, _library: library })))
    }

    /// Initialises the plugin for one communicator without a traffic class. All ranks of the
    /// communicator use the same `comm_id`.
    pub fn init(&self, comm_id: u64) -> Result<Context, HostError> {
        let mut raw = ptr::null_mut();
        let mut config = CommConfig { traffic_class: abi::TRAFFIC_CLASS_UNDEFINED };
        // SAFETY: all pointers are to objects that outlive the call. The interface requires the
        // plugin to copy what it keeps of the configuration. Both callbacks may be called from any
        // thread and at any time.
        let returned = unsafe {
            (self.0.calls.init)(
                &raw mut raw,
                comm_id,
                &raw mut config,
                log::laxity_nccl_host_logger,
                no_profiler,
            )
        };
        checked("init", returned)?;
        Ok(Context(Rc::new(ContextInner { loaded: Rc::clone(&self.0), raw })))
    }
}

pub(crate) struct ContextInner {
    loaded: Rc<Loaded>,
    pub(crate) raw: *mut c_void,
}

impl ContextInner {
    pub(crate) fn calls(&self) -> &NetTable {
        &self.loaded.calls
    }
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        let Some(finalize) = self.loaded.calls.finalize else { return };
        // SAFETY: `raw` is a context of this plugin, and it is finalised once. Everything made from
        // it holds a reference, so nothing of it is left.
        if let Err(error) = checked("finalize", unsafe { finalize(self.raw) }) {
            log::note(error.to_string());
        }
    }
}

/// An initialised plugin. It is finalised after everything made from it is gone.
#[derive(Clone)]
pub struct Context(Rc<ContextInner>);

impl Context {
    pub fn devices(&self) -> Result<usize, HostError> {
        let mut count: c_int = 0;
        // SAFETY: the pointer is to an integer that outlives the call.
        checked("devices", unsafe { (self.0.calls().devices)(&raw mut count) })?;
        usize::try_from(count).map_err(|_| HostError::Broken {
            function: "devices",
            problem: format!("says that there are {count}"),
        })
    }

    /// Listens on a device. The caller passes the handle to the peer that is to connect.
    pub fn listen(&self, device: usize) -> Result<(Listener, Handle), HostError> {
        let device = c_int::try_from(device)
            .map_err(|_| HostError::Misuse("no plugin has that many devices"))?;
        Listener::new(Rc::clone(&self.0), device)
    }

    /// Begins to connect to the listener of the handle. [`Connecting::poll`] continues.
    pub fn connect(&self, device: usize, handle: Handle) -> Connecting {
        // The plugin refuses a device number that the interface can't have.
        Connecting::new(Rc::clone(&self.0), c_int::try_from(device).unwrap_or(-1), handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_or_no_plugin_is_named_with_the_reason() {
        let missing = Plugin::load("/nowhere/libnccl-net-laxity.so".as_ref()).unwrap_err();
        let text = missing.to_string();
        assert!(text.contains("/nowhere/libnccl-net-laxity.so"), "{text}");
        assert!(text.contains("No such file"), "{text}");
        let no_plugin = Plugin::load("libc.so.6".as_ref()).unwrap_err();
        assert!(no_plugin.to_string().contains("no `ncclNetPlugin_v12` in it"), "{no_plugin}");
    }

    #[test]
    fn a_table_without_a_function_that_it_needs_is_refused() {
        let refused = check(&[0; SLOTS], "p.so".as_ref()).expect_err("refused");
        assert_eq!(refused.to_string(), "p.so: its `ncclNetPlugin_v12` has no `init`");
        let mut slots = [1; SLOTS];
        slots[std::mem::offset_of!(NetTable, close_listen) / 8] = 0;
        let refused = check(&slots, "p.so".as_ref()).expect_err("refused");
        assert!(refused.to_string().contains("`closeListen`"), "{refused}");
    }
}
