//! Connections: a listener with its handle, and a communicator for each direction.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::rc::Rc;

use crate::abi::{self, HANDLE_BYTES, PTR_HOST};
use crate::error::{HostError, checked};
use crate::log;
use crate::memory::{Memory, Region};
use crate::plugin::ContextInner;
use crate::request::{self, Attempt};

/// The opaque bytes by which a peer finds a listener.
pub type Handle = [u8; HANDLE_BYTES];

/// A handle as the plugin gets it, with the alignment of NCCL's own allocations.
#[repr(C, align(16))]
struct Placed(Handle);

pub struct Listener {
    context: Rc<ContextInner>,
    raw: *mut c_void,
}

impl Listener {
    pub(crate) fn new(
        context: Rc<ContextInner>,
        device: c_int,
    ) -> Result<(Self, Handle), HostError> {
        let mut handle = Placed([0; HANDLE_BYTES]);
        let mut raw = ptr::null_mut();
        let listen = context.calls().listen;
        let returned =
            // SAFETY: the context is alive. The handle has the interface's size, and the call
            // writes it before it returns.
            unsafe { listen(context.raw, device, (&raw mut handle).cast(), &raw mut raw) };
        checked("listen", returned)?;
        if raw.is_null() {
            let problem = "there is no listener".to_owned();
            return Err(HostError::Broken { function: "listen", problem });
        }
        Ok((Self { context, raw }, handle.0))
    }

    /// Returns a connected peer, if there is one. Never blocks.
    pub fn accept(&mut self) -> Result<Option<RecvComm>, HostError> {
        let (mut raw, mut offload) = (ptr::null_mut(), ptr::null_mut());
        let accept = self.context.calls().accept;
        // SAFETY: the listener is alive. Both pointers are to objects that outlive the call.
        let returned = unsafe { accept(self.raw, &raw mut raw, &raw mut offload) };
        checked("accept", returned)?;
        Ok((!raw.is_null()).then(|| RecvComm(Comm::new(&self.context, raw, Side::Receive))))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let close = self.context.calls().close_listen;
        // SAFETY: `raw` is a listener of this plugin, and it is closed once.
        if let Err(error) = checked("closeListen", unsafe { close(self.raw) }) {
            log::note(error.to_string());
        }
    }
}

/// A connection that is being established. If it is dropped before it is complete, the plugin keeps
/// its part of it, because the interface can't abandon a connect.
pub struct Connecting {
    context: Rc<ContextInner>,
    device: c_int,
    /// The peer's handle. The plugin may keep state in it between calls, so it must not move.
    handle: Box<Placed>,
}

impl Connecting {
    pub(crate) fn new(context: Rc<ContextInner>, device: c_int, handle: Handle) -> Self {
        Self { context, device, handle: Box::new(Placed(handle)) }
    }

    /// Returns the connection once it is complete. Never blocks. Must not be called after that.
    pub fn poll(&mut self) -> Result<Option<SendComm>, HostError> {
        let (mut raw, mut offload) = (ptr::null_mut(), ptr::null_mut());
        let connect = self.context.calls().connect;
        // SAFETY: the context is alive. The handle has the same address in each call. The other
        // pointers are to objects that outlive the call.
        let returned = unsafe {
            connect(
                self.context.raw,
                self.device,
                (&raw mut *self.handle).cast(),
                &raw mut raw,
                &raw mut offload,
            )
        };
        checked("connect", returned)?;
        Ok((!raw.is_null()).then(|| SendComm(Comm::new(&self.context, raw, Side::Send))))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Send,
    Receive,
}

/// One direction of a connection. It is closed after its memory and requests are gone.
pub(crate) struct Comm {
    pub(crate) context: Rc<ContextInner>,
    pub(crate) raw: *mut c_void,
    side: Side,
    /// Memory of abandoned requests, which the plugin may use until the communicator is closed.
    parked: RefCell<Vec<Memory>>,
}

impl Comm {
    fn new(context: &Rc<ContextInner>, raw: *mut c_void, side: Side) -> Rc<Self> {
        Rc::new(Self { context: Rc::clone(context), raw, side, parked: RefCell::new(Vec::new()) })
    }

    fn register(self: &Rc<Self>, bytes: Vec<u8>) -> Result<Region, HostError> {
        let mut memory = Memory::new(bytes);
        let register = self.context.calls().register;
        // SAFETY: the communicator is alive. The memory has `len` bytes and stays until it is
        // deregistered or the communicator is closed.
        let returned = unsafe {
            register(
                self.raw,
                memory.start().cast(),
                memory.len(),
                PTR_HOST,
                &raw mut memory.registration,
            )
        };
        checked("regMr", returned)?;
        Ok(Region { comm: Rc::clone(self), memory: Some(memory) })
    }

    pub(crate) fn deregister(&self, memory: &Memory) -> Result<(), HostError> {
        let deregister = self.context.calls().deregister;
        // SAFETY: the communicator is alive. The memory was registered with it and is deregistered
        // once, because its owner frees it, or parks it if this fails.
        checked("deregMr", unsafe { deregister(self.raw, memory.registration) })
    }

    /// Keeps memory until the communicator is closed.
    pub(crate) fn park(&self, memory: Memory) {
        self.parked.borrow_mut().push(memory);
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        // Ends the registrations first, even with requests in flight, and then the communicator, as
        // NCCL does on an abort.
        let parked = self.parked.take();
        for memory in &parked {
            if let Err(error) = self.deregister(memory) {
                log::note(error.to_string());
            }
        }
        let (function, close): (_, abi::Close) = match self.side {
            Side::Send => ("closeSend", self.context.calls().close_send),
            Side::Receive => ("closeRecv", self.context.calls().close_receive),
        };
        // SAFETY: `raw` is a communicator of this plugin and side, and it is closed once. Regions
        // and requests hold a reference, so none is left.
        match checked(function, unsafe { close(self.raw) }) {
            Ok(()) => drop(parked),
            Err(error) => {
                log::note(error.to_string());
                // The communicator may still be open, and a leak is safer than a use after free.
                parked.into_iter().for_each(Memory::leak);
            }
        }
    }
}

pub struct SendComm(Rc<Comm>);

impl SendComm {
    pub fn register(&self, bytes: Vec<u8>) -> Result<Region, HostError> {
        self.0.register(bytes)
    }

    /// Sends the first `len` bytes of a region as one message. The peer's receives take messages in
    /// order.
    pub fn send(&self, region: Region, len: usize, tag: i32) -> Result<Attempt, HostError> {
        let memory = request::take(&self.0, region, len)?;
        let mut raw = ptr::null_mut();
        let send = self.0.context.calls().send;
        // SAFETY: the communicator is alive. The memory is registered with it, has at least `len`
        // bytes, and is kept until the request is done or the communicator is closed.
        let returned = unsafe {
            send(
                self.0.raw,
                memory.start().cast(),
                len,
                tag,
                memory.registration,
                ptr::null_mut(),
                &raw mut raw,
            )
        };
        request::started(&self.0, "isend", returned, memory, raw)
    }
}

pub struct RecvComm(Rc<Comm>);

impl RecvComm {
    pub fn register(&self, bytes: Vec<u8>) -> Result<Region, HostError> {
        self.0.register(bytes)
    }

    /// Receives the next message, of at most `len` bytes, into the beginning of a region.
    pub fn receive(&self, region: Region, len: usize, tag: i32) -> Result<Attempt, HostError> {
        let memory = request::take(&self.0, region, len)?;
        let mut raw = ptr::null_mut();
        let (mut data, mut bytes, mut tags) = ([memory.start().cast()], [len], [tag]);
        let (mut registrations, mut parents) = ([memory.registration], [ptr::null_mut()]);
        let receive = self.0.context.calls().receive;
        // SAFETY: the communicator and the memory are as in `send`. The arrays have one element
        // each, and are read within the call.
        let returned = unsafe {
            receive(
                self.0.raw,
                1,
                data.as_mut_ptr(),
                bytes.as_mut_ptr(),
                tags.as_mut_ptr(),
                registrations.as_mut_ptr(),
                parents.as_mut_ptr(),
                &raw mut raw,
            )
        };
        request::started(&self.0, "irecv", returned, memory, raw)
    }
}
