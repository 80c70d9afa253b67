//! Requests: a message on its way, and the memory that it is sent from or received into.

use std::ffi::{c_int, c_void};
use std::rc::Rc;

use crate::comm::Comm;
use crate::error::{HostError, checked};
use crate::memory::{Memory, Region};

/// What came of asking for a transfer.
#[derive(Debug)]
pub enum Attempt {
    /// It is under way.
    Started(Request),
    /// Not now: ask again with the same arguments, a little later.
    NotNow(Region),
}

/// What came of asking whether a transfer is done.
#[derive(Debug)]
pub enum Tested {
    /// It is: the memory, and how many bytes of it the message had.
    Done(Region, usize),
    /// Not yet.
    Pending(Request),
}

/// A transfer under way. One that is dropped is given up; its memory stays until its connection is
/// closed.
pub struct Request {
    comm: Rc<Comm>,
    /// There until the request ends.
    memory: Option<Memory>,
    raw: *mut c_void,
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request").finish_non_exhaustive()
    }
}

/// The memory of a region for a request of a communicator.
pub(crate) fn take(comm: &Rc<Comm>, mut region: Region, len: usize) -> Result<Memory, HostError> {
    if !Rc::ptr_eq(comm, &region.comm) {
        return Err(HostError::Misuse(
            "the memory is registered with another connection",
        ));
    }
    if len > region.len() {
        return Err(HostError::Misuse("the memory is shorter than the message"));
    }
    // A region that has been taken apart is empty, and never comes here: its methods consume it.
    region
        .memory
        .take()
        .ok_or(HostError::Misuse("the region has no memory"))
}

/// What `isend` or `irecv` made of `memory`.
pub(crate) fn started(
    comm: &Rc<Comm>,
    function: &'static str,
    returned: c_int,
    memory: Memory,
    raw: *mut c_void,
) -> Result<Attempt, HostError> {
    let comm = Rc::clone(comm);
    if let Err(error) = checked(function, returned) {
        // Whether the plugin has begun to use it is unknown.
        comm.park(memory);
        return Err(error);
    }
    let memory = Some(memory);
    Ok(if raw.is_null() {
        Attempt::NotNow(Region { comm, memory })
    } else {
        Attempt::Started(Request { comm, memory, raw })
    })
}

impl Request {
    /// Whether the transfer is done; drives the plugin.
    ///
    /// # Errors
    /// The connection is lost, and the request with it.
    pub fn test(mut self) -> Result<Tested, HostError> {
        let (mut done, mut bytes): (c_int, c_int) = (0, 0);
        let test = self.comm.context.calls().test;
        // SAFETY: a request that `isend` or `irecv` gave and that was neither done nor failed
        // before: either consumes it.
        checked("test", unsafe {
            test(self.raw, &raw mut done, &raw mut bytes)
        })?;
        if done == 0 {
            return Ok(Tested::Pending(self));
        }
        let memory = self.memory.take();
        let len = memory.as_ref().map_or(0, Memory::len);
        let region = Region {
            comm: Rc::clone(&self.comm),
            memory,
        };
        match usize::try_from(bytes) {
            Ok(bytes) if bytes <= len => Ok(Tested::Done(region, bytes)),
            _ => Err(HostError::Broken {
                function: "test",
                problem: format!("{bytes} bytes were done of memory of {len}"),
            }),
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.comm.park(memory);
        }
    }
}
