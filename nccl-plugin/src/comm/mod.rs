//! Connections as NCCL holds them: opaque pointers to a `Comm`, and to requests of a `Comm`.
//!
//! A connection has one direction. Two threads use it: one registers memory and closes, the other
//! sends, receives and tests. Each end is therefore behind a lock, which is nearly always free. A
//! request is an entry of its connection's table. A test can't touch freed memory while the
//! connection lives, and NCCL doesn't test after closing.

mod message;
mod receive;
mod send;
mod slots;
mod surroundings;

use std::sync::Arc;

use parking_lot::Mutex;

pub use receive::ReceiveSide;
pub use send::SendSide;
pub use surroundings::Surroundings;

use crate::backend::{Memory, MemoryRegistration};
use crate::fault::{Fault, Result};

/// Largest number of requests of one connection, more than NCCL's 32 (`NCCL_NET_MAX_REQUESTS`).
pub const REQUESTS: usize = 256;

/// The first word of a live `Comm`, which distinguishes it from other memory.
const MAGIC: u64 = 0x4c41_5849_5459_434f;

#[derive(Debug)]
pub enum CommSide {
    Send(Box<Mutex<SendSide>>),
    Receive(Box<Mutex<ReceiveSide>>),
}

/// A connection of one direction, as NCCL holds it.
#[derive(Debug)]
pub struct Comm {
    magic: u64,
    /// The connection's local end.
    pub side: CommSide,
    /// The connection's requests, to which NCCL's pointers lead.
    requests: Box<[CommRequest]>,
}

/// The target of NCCL's request pointers.
#[derive(Debug)]
pub struct CommRequest {
    comm: *const Comm,
    index: u16,
}

// SAFETY: the pointer leads to the connection that owns the table of requests, so it is valid as
// long as the request is. The connection is `Sync`.
unsafe impl Send for CommRequest {}
// SAFETY: the pointer leads to the connection that owns this request, and that is `Sync`.
unsafe impl Sync for CommRequest {}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TestOutcome {
    /// The request is not complete.
    Pending,
    /// The request is complete, with the message's bytes. A flush has none.
    Done(Option<usize>),
}

/// A registration, as NCCL holds it.
#[derive(Debug)]
pub struct MemoryHandle {
    pub region: MemoryRegistration,
}

impl Comm {
    /// Returns a connection at its final address, since its requests point to it.
    pub fn new(side: CommSide) -> Arc<Self> {
        let make = |comm: *const Self| {
            let request = |index| CommRequest { comm, index };
            (0..REQUESTS as u16).map(request).collect()
        };
        Arc::new_cyclic(|weak| Self { magic: MAGIC, side, requests: make(weak.as_ptr()) })
    }

    /// Returns the connection that NCCL passed, after checking the pointer.
    ///
    /// # Safety
    /// `pointer` is null, or leads to at least 8 readable bytes. If those are a connection's, it is
    /// live.
    pub unsafe fn at<'a>(pointer: *const core::ffi::c_void) -> Result<&'a Self> {
        let comm = pointer.cast::<Self>();
        if pointer.is_null() || !comm.is_aligned() {
            return Err(Fault::Argument("the connection is a null pointer or none of ours".into()));
        }
        // SAFETY: upheld by the caller. The bytes of this field can be read.
        let magic = unsafe { (&raw const (*comm).magic).read() };
        if magic != MAGIC {
            return Err(Fault::Argument(
                "the connection is none of this plugin's, or was closed".into(),
            ));
        }
        // SAFETY: upheld by the caller.
        Ok(unsafe { &*comm })
    }

    pub fn send_side(&self) -> Result<&Mutex<SendSide>> {
        match &self.side {
            CommSide::Send(side) => Ok(side),
            CommSide::Receive(_) => Err(Fault::Argument(
                "a receiving connection was given where a sending one belongs".into(),
            )),
        }
    }

    pub fn receive_side(&self) -> Result<&Mutex<ReceiveSide>> {
        match &self.side {
            CommSide::Receive(side) => Ok(side),
            CommSide::Send(_) => Err(Fault::Argument(
                "a sending connection was given where a receiving one belongs".into(),
            )),
        }
    }

    pub fn register(&self, memory: Memory) -> Result<Box<MemoryHandle>> {
        let region = match &self.side {
            CommSide::Send(side) => side.lock().register(memory),
            CommSide::Receive(side) => side.lock().register(memory),
        }?;
        Ok(Box::new(MemoryHandle { region }))
    }

    pub fn deregister(&self, handle: MemoryHandle) -> Result<()> {
        match &self.side {
            CommSide::Send(side) => side.lock().deregister(handle.region),
            CommSide::Receive(side) => side.lock().deregister(handle.region),
        }
    }

    pub fn request(&self, index: u16) -> *mut core::ffi::c_void {
        (&raw const self.requests[usize::from(index)]).cast_mut().cast()
    }

    /// Moves bytes, and returns the state of a request. A request that is over becomes free.
    pub fn test(&self, index: u16) -> Result<TestOutcome> {
        match &self.side {
            CommSide::Send(side) => side.lock().test(index),
            CommSide::Receive(side) => side.lock().test(index),
        }
    }
}

impl CommRequest {
    /// Returns the connection and the index of the request that NCCL passed.
    ///
    /// # Safety
    /// `pointer` is null, or came from [`Comm::request`] of a live connection.
    pub unsafe fn at<'a>(pointer: *const core::ffi::c_void) -> Result<(&'a Comm, u16)> {
        let request = pointer.cast::<Self>();
        if pointer.is_null() || !request.is_aligned() {
            return Err(Fault::Argument("the request is a null pointer or none of ours".into()));
        }
        // SAFETY: upheld by the caller.
        let request = unsafe { &*request };
        // SAFETY: upheld by the caller. The connection owns the request.
        Ok((unsafe { Comm::at(request.comm.cast()) }?, request.index))
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        // A later use of the pointer then fails, at least until the memory is used again.
        self.magic = 0;
    }
}
