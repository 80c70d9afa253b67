//! Requests: a message in progress, with the memory that it is sent from or received into.

use std::ffi::{c_int, c_void};
use std::rc::Rc;

use crate::comm::Comm;
use crate::error::{HostError, checked};
use crate::memory::{Memory, Region};

#[derive(Debug)]
pub enum Attempt {
    Started(Request),
    /// The plugin can't start it yet. Ask again later with the same arguments.
    NotNow(Region),
}

#[derive(Debug)]
pub enum Tested {
    /// The transfer is done. Contains its memory and the message's size in bytes.
    Done(Region, usize),
    Pending(Request),
}

/// A transfer in progress. Dropping it abandons the transfer, and its memory stays until the
/// connection is closed.
pub struct Request {
    comm: Rc<Comm>,
    /// `None` only after the request's end.
    memory: Option<Memory>,
    raw: *mut c_void,
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request").finish_non_exhaustive()
    }
}

pub(crate) fn take(comm: &Rc<Comm>, mut region: Region, len: usize) -> Result<Memory, HostError> {
    if !Rc::ptr_eq(comm, &region.comm) {
        return Err(HostError::Misuse("the memory is registered with another connection"));
    }
    if len > region.len() {
        return Err(HostError::Misuse("the memory is shorter than the message"));
    }
    // Methods that empty a region consume it, so the region still has its memory.
    region.memory.take().ok_or(HostError::Misuse("the region has no memory"))
}

pub(crate) fn started(
    comm: &Rc<Comm>,
    function: &'static str,
    returned: c_int,
    memory: Memory,
    raw: *mut c_void,
) -> Result<Attempt, HostError> {
    let comm = Rc::clone(comm);
    if let Err(error) = checked(function, returned) {
        // The plugin may have begun to use the memory.
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
    /// Tests whether the transfer is done. This also makes the plugin progress.
    pub fn test(mut self) -> Result<Tested, HostError> {
        let (mut done, mut bytes): (c_int, c_int) = (0, 0);
        let test = self.comm.context.calls().test;
        // SAFETY: `isend` or `irecv` returned the request. It was neither done nor failed before,
        // since either consumes it.
        checked("test", unsafe { test(self.raw, &raw mut done, &raw mut bytes) })?;
        if done == 0 {
            return Ok(Tested::Pending(self));
        }
        let memory = self.memory.take();
        let len = memory.as_ref().map_or(0, Memory::len);
        let region = Region { comm: Rc::clone(&self.comm), memory };
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
