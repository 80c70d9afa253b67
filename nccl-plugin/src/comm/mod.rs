//! Connections as NCCL holds them: opaque pointers to a `Comm`, and requests that lead back to
//! theirs.
//!
//! A connection has one direction. It is used from two threads (one registers memory and closes,
//! another sends, receives and tests), so each end is behind a lock, which is free nearly always. A
//! request is a place in its connection's table: whatever NCCL does, testing one can't touch freed
//! memory while its connection lives, and NCCL doesn't test after closing.

mod message;
mod receive;
mod send;
mod slots;
mod surroundings;

use std::sync::Arc;

use parking_lot::Mutex;

pub use message::Wish;
pub use receive::ReceiveSide;
pub use send::SendSide;
pub use surroundings::Surroundings;

use crate::backend::{GROUP_MAX, Memory, Region};
use crate::fault::{Fault, Result};

/// Requests of one connection. NCCL has 32 (`NCCL_NET_MAX_REQUESTS`) of up to [`GROUP_MAX`]
/// messages.
pub const REQUESTS: usize = 32 * GROUP_MAX;

/// Distinguishes a `Comm` from whatever else a pointer may lead to.
const MAGIC: u64 = 0x4c41_5849_5459_434f;

/// One end.
#[derive(Debug)]
pub enum Side {
    /// Messages go out.
    Send(Box<Mutex<SendSide>>),
    /// Messages come in.
    Receive(Box<Mutex<ReceiveSide>>),
}

/// A connection.
#[derive(Debug)]
pub struct Comm {
    magic: u64,
    /// Its end.
    pub side: Side,
    /// Its requests: NCCL's pointers lead here.
    requests: Box<[Request]>,
}

/// What NCCL's request pointers lead to.
#[derive(Debug)]
pub struct Request {
    comm: *const Comm,
    index: u16,
}

// SAFETY: the pointer leads to the connection that owns the table of requests, so it is valid for
// as long as the request is; what it leads to is `Sync`.
unsafe impl Send for Request {}
// SAFETY: as above.
unsafe impl Sync for Request {}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Not yet.
    Pending,
    /// With these sizes.
    Done(smallvec::SmallVec<[usize; GROUP_MAX]>),
}

/// A registration, as NCCL holds it.
#[derive(Debug)]
pub struct MemoryHandle {
    /// The backend's part.
    pub region: Region,
}

impl Comm {
    /// A connection, where it will stay.
    #[must_use]
    pub fn new(side: Side) -> Arc<Self> {
        let make = |comm: *const Self| {
            let request = |index| Request { comm, index };
            (0..REQUESTS as u16).map(request).collect()
        };
        Arc::new_cyclic(|weak| Self {
            magic: MAGIC,
            side,
            requests: make(weak.as_ptr()),
        })
    }

    /// Checks what NCCL passed for a connection.
    ///
    /// # Safety
    /// `pointer` is null, or leads to at least 8 readable bytes; if those are a
    /// connection's, it is one that lives.
    pub unsafe fn at<'a>(pointer: *const core::ffi::c_void) -> Result<&'a Self> {
        let comm = pointer.cast::<Self>();
        if pointer.is_null() || !comm.is_aligned() {
            return Err(Fault::Argument(String::from(
                "the connection is a null pointer or none of ours",
            )));
        }
        // SAFETY: upheld by the caller: as many bytes as the field can be read.
        let magic = unsafe { (&raw const (*comm).magic).read() };
        if magic != MAGIC {
            return Err(Fault::Argument(String::from(
                "the connection is none of this plugin's, or was closed",
            )));
        }
        // SAFETY: upheld by the caller.
        Ok(unsafe { &*comm })
    }

    /// The sending end.
    ///
    /// # Errors
    /// It is the other end.
    pub fn send_side(&self) -> Result<&Mutex<SendSide>> {
        match &self.side {
            Side::Send(side) => Ok(side),
            Side::Receive(_) => Err(Fault::Argument(String::from(
                "a receiving connection was given where a sending one belongs",
            ))),
        }
    }

    /// The receiving end.
    ///
    /// # Errors
    /// It is the other end.
    pub fn receive_side(&self) -> Result<&Mutex<ReceiveSide>> {
        match &self.side {
            Side::Receive(side) => Ok(side),
            Side::Send(_) => Err(Fault::Argument(String::from(
                "a sending connection was given where a receiving one belongs",
            ))),
        }
    }

    /// Registers memory with the connection.
    ///
    /// # Errors
    /// The device can't.
    pub fn register(&self, memory: Memory) -> Result<Box<MemoryHandle>> {
        let region = match &self.side {
            Side::Send(side) => side.lock().register(memory),
            Side::Receive(side) => side.lock().register(memory),
        }?;
        Ok(Box::new(MemoryHandle { region }))
    }

    /// Lets go of a registration.
    ///
    /// # Errors
    /// The device refused.
    pub fn deregister(&self, handle: MemoryHandle) -> Result<()> {
        match &self.side {
            Side::Send(side) => side.lock().deregister(handle.region),
            Side::Receive(side) => side.lock().deregister(handle.region),
        }
    }

    /// NCCL's pointer to a request.
    #[must_use]
    pub fn request(&self, index: u16) -> *mut core::ffi::c_void {
        (&raw const self.requests[usize::from(index)])
            .cast_mut()
            .cast()
    }

    /// What became of a request.
    ///
    /// # Errors
    /// The connection is broken, or the request is not in use.
    pub fn test(&self, index: u16) -> Result<Outcome> {
        match &self.side {
            Side::Send(side) => side.lock().test(index),
            Side::Receive(side) => side.lock().test(index),
        }
    }
}

impl Request {
    /// What NCCL passed for a request: its connection, and its place there.
    ///
    /// # Safety
    /// `pointer` is null, or came from [`Comm::request`] of a connection that lives.
    pub unsafe fn at<'a>(pointer: *const core::ffi::c_void) -> Result<(&'a Comm, u16)> {
        let request = pointer.cast::<Self>();
        if pointer.is_null() || !request.is_aligned() {
            return Err(Fault::Argument(String::from(
                "the request is a null pointer or none of ours",
            )));
        }
        // SAFETY: upheld by the caller.
        let request = unsafe { &*request };
        // SAFETY: upheld by the caller: the table is the connection's own.
        Ok((unsafe { Comm::at(request.comm.cast()) }?, request.index))
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        // Whoever uses it after this is told so, at least until the memory is used again.
        self.magic = 0;
    }
}
