//! Slots of NCCL's network tables that create and end contexts and connections.

use core::ffi::c_int;
use core::ptr;
use std::sync::{Arc, OnceLock};

use super::table::{Attributes, CommConfig, Properties, Version};
use super::{Code, Opaque, OpaqueOut, guarded, not_null, pointing, returning, transfers};
use crate::comm::Comm;
use crate::context::{Context, TRAFFIC_CLASS_UNSET};
use crate::fault::Result;
use crate::handle::HANDLE_BYTES;
use crate::log::{self, Logger};
use crate::origin::Callback;
use crate::plugin::{self, Listening};

/// Opens the network, up to v9.
pub(super) unsafe extern "C" fn init(logger: Option<Logger>) -> Code {
    // SAFETY: NCCL's argument is passed on unchanged.
    unsafe { init_profiled(logger, None) }
}

/// Opens the network, and keeps the profiler's callback, in v10.
pub(super) unsafe extern "C" fn init_profiled(
    logger: Option<Logger>,
    callback: Option<Callback>,
) -> Code {
    log::set(logger);
    transfers::set_callback(callback);
    guarded("init", || plugin::get_or_make().map(drop))
}

/// Opens the network, and makes a communicator's context, since v11.
pub(super) unsafe extern "C" fn init_context(
    context: OpaqueOut,
    communicator: u64,
    config: *mut CommConfig,
    logger: Option<Logger>,
    callback: Option<Callback>,
) -> Code {
    log::set(logger);
    transfers::set_callback(callback);
    let made = || {
        // SAFETY: upheld by the caller. The configuration is copied.
        let class = unsafe { traffic_class(config) };
        let made = plugin::get_or_make()?.context(communicator, class);
        Ok(Arc::into_raw(made).cast_mut().cast())
    };
    // SAFETY: upheld by the caller.
    unsafe { returning("init", context, made) }
}

unsafe fn traffic_class(config: *mut CommConfig) -> c_int {
    // SAFETY: upheld by the caller.
    unsafe { config.as_ref() }.map_or(TRAFFIC_CLASS_UNSET, |config| config.traffic_class)
}

/// Returns the context behind NCCL's pointer.
unsafe fn context_at(context: Opaque) -> Result<Arc<Context>> {
    let context = not_null(context, "the context")?.cast::<Context>().cast_const();
    // SAFETY: upheld by the caller. NCCL keeps its own reference count.
    unsafe {
        Arc::increment_strong_count(context);
        Ok(Arc::from_raw(context))
    }
}

/// Ends a communicator's context. Its connections keep what they need of it.
pub(super) unsafe extern "C" fn finalize(context: Opaque) -> Code {
    guarded("finalize", || {
        if !context.is_null() {
            // SAFETY: upheld by the caller.
            drop(unsafe { Arc::from_raw(context.cast::<Context>().cast_const()) });
        }
        Ok(())
    })
}

/// Writes the number of NICs, at least 1.
pub(super) unsafe extern "C" fn devices(count: *mut c_int) -> Code {
    // SAFETY: upheld by the caller.
    unsafe { returning("devices", count, || Ok(plugin::get()?.devices().len() as c_int)) }
}

/// Writes a NIC's properties in the layout of the version.
pub(super) unsafe extern "C" fn get_properties<V: Version>(
    number: c_int,
    properties: *mut Properties<V>,
) -> Code {
    let found = || Ok(Properties::new(plugin::get()?.device(number)?, number));
    // SAFETY: upheld by the caller.
    unsafe { returning("getProperties", properties, found) }
}

/// Keeps the operation of the communicator's next sends. Other attributes change nothing.
pub(super) unsafe extern "C" fn set_attributes(
    context: Opaque,
    attributes: *mut Attributes,
) -> Code {
    guarded("setNetAttr", || {
        // SAFETY: upheld by the caller.
        unsafe {
            let context = context_at(context)?;
            if let Some(attributes) = attributes.as_ref() {
                context.set_attribute(attributes.op);
            }
        }
        Ok(())
    })
}

/// Listens at a NIC, up to v10. Writes the handle that NCCL carries to the sender.
pub(super) unsafe extern "C" fn listen(
    device: c_int,
    handle: Opaque,
    listen_comm: OpaqueOut,
) -> Code {
    let made = || {
        let handle = not_null(handle.cast::<[u8; HANDLE_BYTES]>(), "the handle")?;
        let (listening, bytes) = plugin::get()?.listen(device)?;
        // SAFETY: upheld by the caller. Bytes need no alignment.
        unsafe { handle.write(bytes) };
        Ok(Box::into_raw(listening).cast())
    };
    // SAFETY: upheld by the caller.
    unsafe { returning("listen", listen_comm, made) }
}

/// Listens at a NIC, whatever the context, since v11.
pub(super) unsafe extern "C" fn listen_context(
    _context: Opaque,
    device: c_int,
    handle: Opaque,
    listen_comm: OpaqueOut,
) -> Code {
    // SAFETY: upheld by the caller.
    unsafe { listen(device, handle, listen_comm) }
}

/// Connects in the context that `context` returns.
unsafe fn connect_by(
    context: impl FnOnce() -> Result<Arc<Context>>,
    device: c_int,
    handle: Opaque,
    send_comm: OpaqueOut,
) -> Code {
    let made = || {
        let context = context()?;
        let handle = not_null(handle.cast::<[u8; HANDLE_BYTES]>(), "the handle")?;
        // SAFETY: upheld by the caller. Bytes need no alignment.
        let mut bytes = unsafe { handle.read() };
        let made = plugin::get()?.connect(&context, device, &mut bytes);
        // SAFETY: the caller says that the handle has these bytes. They need no alignment.
        unsafe { handle.write(bytes) };
        Ok(made?.map(|comm| Arc::into_raw(comm).cast_mut().cast()))
    };
    // SAFETY: upheld by the caller.
    unsafe { pointing("connect", send_comm, made) }
}

/// Connects, up to v9. All communicators share one context.
pub(super) unsafe extern "C" fn connect(
    device: c_int,
    handle: Opaque,
    send_comm: OpaqueOut,
    device_comm: OpaqueOut,
) -> Code {
    // SAFETY: upheld by the caller.
    unsafe { connect_config(device, ptr::null_mut(), handle, send_comm, device_comm) }
}

/// Connects, in v10. Communicators differ in their traffic class only.
pub(super) unsafe extern "C" fn connect_config(
    device: c_int,
    config: *mut CommConfig,
    handle: Opaque,
    send_comm: OpaqueOut,
    _device_comm: OpaqueOut,
) -> Code {
    static UNSET: OnceLock<Arc<Context>> = OnceLock::new();
    let context = || {
        let plugin = plugin::get()?;
        // SAFETY: upheld by the caller.
        Ok(match unsafe { traffic_class(config) } {
            TRAFFIC_CLASS_UNSET => Arc::clone(UNSET.get_or_init(|| plugin.context_of_all())),
            class => plugin.context(0, class),
        })
    };
    // SAFETY: upheld by the caller.
    unsafe { connect_by(context, device, handle, send_comm) }
}

/// Connects in a communicator's context, since v11.
pub(super) unsafe extern "C" fn connect_context(
    context: Opaque,
    device: c_int,
    handle: Opaque,
    send_comm: OpaqueOut,
    _device_comm: OpaqueOut,
) -> Code {
    // SAFETY: upheld by the caller.
    let context = || unsafe { context_at(context) };
    // SAFETY: upheld by the caller.
    unsafe { connect_by(context, device, handle, send_comm) }
}

/// Writes the next connection, or null while there is none. Never blocks.
pub(super) unsafe extern "C" fn accept(
    listen_comm: Opaque,
    receive_comm: OpaqueOut,
    _device_comm: OpaqueOut,
) -> Code {
    let made = || {
        let listening = not_null(listen_comm.cast::<Listening>(), "the listenComm")?;
        // SAFETY: upheld by the caller.
        let made = plugin::get()?.accept(unsafe { &*listening })?;
        Ok(made.map(|comm| Arc::into_raw(comm).cast_mut().cast()))
    };
    // SAFETY: upheld by the caller.
    unsafe { pointing("accept", receive_comm, made) }
}

/// Ends a sending connection. The receiver still gets messages that are done.
pub(super) unsafe extern "C" fn close_send(comm: Opaque) -> Code {
    guarded("closeSend", || {
        // SAFETY: upheld by the caller.
        unsafe {
            Comm::at(comm)?.send_side()?.lock().close();
            drop(Arc::from_raw(comm.cast::<Comm>().cast_const()));
        }
        Ok(())
    })
}

/// Ends a receiving connection. Messages that did not arrive are lost.
pub(super) unsafe extern "C" fn close_receive(comm: Opaque) -> Code {
    guarded("closeRecv", || {
        // SAFETY: upheld by the caller.
        unsafe {
            Comm::at(comm)?.receive_side()?.lock().close();
            drop(Arc::from_raw(comm.cast::<Comm>().cast_const()));
        }
        Ok(())
    })
}

/// Ends a listener. Connections that were accepted stay.
pub(super) unsafe extern "C" fn close_listen(listen_comm: Opaque) -> Code {
    guarded("closeListen", || {
        let listening = not_null(listen_comm.cast::<Listening>(), "the listenComm")?;
        // SAFETY: upheld by the caller.
        drop(unsafe { Box::from_raw(listening) });
        Ok(())
    })
}
