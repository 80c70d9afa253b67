//! Slots of NCCL's network tables that create and end contexts and connections.

use core::ffi::{c_int, c_void};
use core::ptr;
use std::sync::{Arc, OnceLock};

use super::table::{Attributes, CommConfig, Properties, Version};
use super::{Code, guarded, not_null, transfers};
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
///
/// # Safety
/// `context` is null or can be written. `config` is null or valid.
pub(super) unsafe extern "C" fn init_context(
    context: *mut *mut c_void,
    communicator: u64,
    config: *mut CommConfig,
    logger: Option<Logger>,
    callback: Option<Callback>,
) -> Code {
    log::set(logger);
    transfers::set_callback(callback);
    guarded("init", || {
        let context = not_null(context, "the context")?;
        let plugin = plugin::get_or_make()?;
        // SAFETY: upheld by the caller. The configuration is copied.
        unsafe {
            let made = plugin.context(communicator, traffic_class(config));
            context.write(Arc::into_raw(made).cast_mut().cast());
        }
        Ok(())
    })
}

/// Returns the communicator's traffic class.
///
/// # Safety
/// `config` is null or valid.
unsafe fn traffic_class(config: *mut CommConfig) -> c_int {
    // SAFETY: upheld by the caller.
    unsafe { config.as_ref() }.map_or(TRAFFIC_CLASS_UNSET, |config| config.traffic_class)
}

/// Returns the context behind NCCL's pointer.
///
/// # Safety
/// `context` is null, or came from [`init_context`] and was not finalised.
unsafe fn context_at(context: *mut c_void) -> Result<Arc<Context>> {
    let context = not_null(context, "the context")?.cast::<Context>().cast_const();
    // SAFETY: upheld by the caller. NCCL keeps its own reference count.
    unsafe {
        Arc::increment_strong_count(context);
        Ok(Arc::from_raw(context))
    }
}

/// Ends a communicator's context. Its connections keep what they need of it.
///
/// # Safety
/// `context` is null, or came from [`init_context`] and is not used again.
pub(super) unsafe extern "C" fn finalize(context: *mut c_void) -> Code {
    guarded("finalize", || {
        if !context.is_null() {
            // SAFETY: upheld by the caller.
            drop(unsafe { Arc::from_raw(context.cast::<Context>().cast_const()) });
        }
        Ok(())
    })
}

/// Writes the number of NICs, at least 1.
///
/// # Safety
/// `count` is null or can be written.
pub(super) unsafe extern "C" fn devices(count: *mut c_int) -> Code {
    guarded("devices", || {
        let count = not_null(count, "the count")?;
        let number = plugin::get()?.devices().len() as c_int;
        // SAFETY: upheld by the caller.
        unsafe { count.write(number) };
        Ok(())
    })
}

/// Writes a NIC's properties in the layout of the version.
///
/// # Safety
/// `properties` is null or can be written.
pub(super) unsafe extern "C" fn get_properties<V: Version>(
    number: c_int,
    properties: *mut Properties<V>,
) -> Code {
    guarded("getProperties", || {
        let properties = not_null(properties, "the properties")?;
        let device = plugin::get()?.device(number)?;
        // SAFETY: upheld by the caller.
        unsafe { properties.write(Properties::new(device, number)) };
        Ok(())
    })
}

/// Keeps the operation of the communicator's next sends. Other attributes change nothing.
///
/// # Safety
/// The conditions of [`context_at`] hold. `attributes` is null or valid.
pub(super) unsafe extern "C" fn set_attributes(
    context: *mut c_void,
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
///
/// # Safety
/// `handle` is null or has [`HANDLE_BYTES`]. `listen_comm` is null or can be written.
pub(super) unsafe extern "C" fn listen(
    device: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> Code {
    guarded("listen", || {
        let handle = not_null(handle.cast::<[u8; HANDLE_BYTES]>(), "the handle")?;
        let listen_comm = not_null(listen_comm, "the listenComm")?;
        let (listening, bytes) = plugin::get()?.listen(device)?;
        // SAFETY: upheld by the caller. Bytes need no alignment.
        unsafe {
            handle.write(bytes);
            listen_comm.write(Box::into_raw(listening).cast());
        }
        Ok(())
    })
}

/// Listens at a NIC, whatever the context, since v11.
///
/// # Safety
/// The conditions of [`listen`] hold.
pub(super) unsafe extern "C" fn listen_context(
    _context: *mut c_void,
    device: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> Code {
    // SAFETY: upheld by the caller.
    unsafe { listen(device, handle, listen_comm) }
}

/// Connects in the context that `context` returns.
///
/// # Safety
/// `handle` is null or has [`HANDLE_BYTES`]. `send_comm` is null or can be written.
unsafe fn connect_by(
    context: impl FnOnce() -> Result<Arc<Context>>,
    device: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
) -> Code {
    guarded("connect", || {
        let context = context()?;
        let handle = not_null(handle.cast::<[u8; HANDLE_BYTES]>(), "the handle")?;
        let send_comm = not_null(send_comm, "the sendComm")?;
        // SAFETY: upheld by the caller. Bytes need no alignment.
        unsafe {
            send_comm.write(ptr::null_mut());
            let mut bytes = handle.read();
            let made = plugin::get()?.connect(&context, device, &mut bytes);
            handle.write(bytes);
            if let Some(comm) = made? {
                send_comm.write(Arc::into_raw(comm).cast_mut().cast());
            }
        }
        Ok(())
    })
}

/// Connects, up to v9. All communicators share one context.
///
/// # Safety
/// The conditions of [`connect_by`] hold.
pub(super) unsafe extern "C" fn connect(
    device: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    device_comm: *mut *mut c_void,
) -> Code {
    // SAFETY: upheld by the caller.
    unsafe { connect_config(device, ptr::null_mut(), handle, send_comm, device_comm) }
}

/// Connects, in v10. Communicators differ in their traffic class only.
///
/// # Safety
/// The conditions of [`connect_by`] hold. `config` is null or valid.
pub(super) unsafe extern "C" fn connect_config(
    device: c_int,
    config: *mut CommConfig,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    _device_comm: *mut *mut c_void,
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
///
/// # Safety
/// The conditions of [`connect_by`] and [`context_at`] hold.
pub(super) unsafe extern "C" fn connect_context(
    context: *mut c_void,
    device: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    _device_comm: *mut *mut c_void,
) -> Code {
    // SAFETY: upheld by the caller.
    let context = || unsafe { context_at(context) };
    // SAFETY: upheld by the caller.
    unsafe { connect_by(context, device, handle, send_comm) }
}

/// Writes the next connection, or null while there is none. Never blocks.
///
/// # Safety
/// `listen_comm` came from `listen`. `receive_comm` is null or can be written.
pub(super) unsafe extern "C" fn accept(
    listen_comm: *mut c_void,
    receive_comm: *mut *mut c_void,
    _device_comm: *mut *mut c_void,
) -> Code {
    guarded("accept", || {
        let listening = not_null(listen_comm.cast::<Listening>(), "the listenComm")?;
        let receive_comm = not_null(receive_comm, "the recvComm")?;
        // SAFETY: upheld by the caller.
        unsafe {
            receive_comm.write(ptr::null_mut());
            if let Some(comm) = plugin::get()?.accept(&*listening)? {
                receive_comm.write(Arc::into_raw(comm).cast_mut().cast());
            }
        }
        Ok(())
    })
}

/// Ends a sending connection. The receiver still gets messages that are done.
///
/// # Safety
/// `comm` came from `connect` and is not used again.
pub(super) unsafe extern "C" fn close_send(comm: *mut c_void) -> Code {
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
///
/// # Safety
/// `comm` came from `accept` and is not used again.
pub(super) unsafe extern "C" fn close_receive(comm: *mut c_void) -> Code {
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
///
/// # Safety
/// `listen_comm` came from `listen` and is not used again.
pub(super) unsafe extern "C" fn close_listen(listen_comm: *mut c_void) -> Code {
    guarded("closeListen", || {
        let listening = not_null(listen_comm.cast::<Listening>(), "the listenComm")?;
        // SAFETY: upheld by the caller.
        drop(unsafe { Box::from_raw(listening) });
        Ok(())
    })
}
