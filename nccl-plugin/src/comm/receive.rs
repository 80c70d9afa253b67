//! The receiving end: buffers are posted, and complete in order.

use std::sync::Arc;

use smallvec::SmallVec;

use super::{Outcome, REQUESTS};
use crate::backend::{Buffer, GROUP_MAX, Memory, Received, Receiver, Region};
use crate::fault::{Fault, Result};
use crate::report::Report;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Slot {
    Free,
    Pending(u64),
    Done(SmallVec<[usize; GROUP_MAX]>),
}

/// See the module's text.
pub struct ReceiveSide {
    receiver: Option<Box<dyn Receiver>>,
    report: Arc<Report>,
    slots: Box<[Slot]>,
    next_slot: usize,
    fault: Option<Fault>,
    received: Vec<Received>,
}

impl core::fmt::Debug for ReceiveSide {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("ReceiveSide")
            .field("fault", &self.fault)
            .finish_non_exhaustive()
    }
}

impl ReceiveSide {
    /// Around a connection that is complete.
    #[must_use]
    pub fn new(receiver: Box<dyn Receiver>, report: Arc<Report>) -> Self {
        Self {
            receiver: Some(receiver),
            report,
            slots: vec![Slot::Free; REQUESTS].into(),
            next_slot: 0,
            fault: None,
            received: Vec::new(),
        }
    }

    fn receiver(&mut self) -> Result<&mut Box<dyn Receiver>> {
        let closed = || Fault::Argument(String::from("the connection was closed"));
        self.receiver.as_mut().ok_or_else(closed)
    }

    pub(super) fn register(&mut self, memory: Memory) -> Result<Region> {
        self.receiver()?.register(memory)
    }

    pub(super) fn deregister(&mut self, region: Region) -> Result<()> {
        self.receiver()?.deregister(region)
    }

    fn free_slot(&mut self) -> Option<u16> {
        let around = (self.next_slot..REQUESTS).chain(0..self.next_slot);
        let found = { around }.find(|at| self.slots[*at] == Slot::Free)?;
        self.next_slot = (found + 1) % REQUESTS;
        Some(found as u16)
    }

    /// Posts the buffers of one grouped receive; its request's place, or `None` if NCCL is to ask
    /// again.
    ///
    /// # Errors
    /// There are too many buffers.
    pub fn post(&mut self, buffers: &[Buffer<'_>]) -> Result<Option<u16>> {
        if buffers.is_empty() || buffers.len() > GROUP_MAX {
            return Err(Fault::Argument(format!(
                "a grouped receive of {} buffers: 1 to {GROUP_MAX} are possible",
                buffers.len()
            )));
        }
        let Some(slot) = self.free_slot() else {
            return Ok(None);
        };
        let post = if self.fault.is_some() {
            // `test` tells.
            Some(u64::MAX)
        } else {
            self.receiver()?.post(buffers)
        };
        Ok(post.map(|post| {
            self.slots[usize::from(slot)] = Slot::Pending(post);
            slot
        }))
    }

    /// Flushes; a request's place, `None` if nothing has to be done.
    ///
    /// # Errors
    /// There are too many buffers, or no request is free.
    pub fn flush(&mut self, buffers: &[Buffer<'_>]) -> Result<Option<u16>> {
        if buffers.len() > GROUP_MAX {
            return Err(Fault::Argument(String::from("too many buffers to flush")));
        }
        let Some(slot) = self.free_slot() else {
            return Err(Fault::Internal(String::from(
                "no request is free for a flush",
            )));
        };
        let post = self.receiver()?.flush(buffers);
        Ok(post.map(|post| {
            self.slots[usize::from(slot)] = Slot::Pending(post);
            slot
        }))
    }

    fn progress(&mut self) {
        let mut received = core::mem::take(&mut self.received);
        let result = match &mut self.receiver {
            Some(receiver) => receiver.progress(&mut received),
            None => Ok(()),
        };
        for Received { post, sizes } in received.drain(..) {
            self.report.received(sizes.iter().sum::<usize>() as u64);
            let is_it = |slot: &&mut Slot| **slot == Slot::Pending(post);
            if let Some(slot) = self.slots.iter_mut().find(is_it) {
                *slot = Slot::Done(sizes);
            }
        }
        self.received = received;
        if let Err(fault) = result {
            self.fault = Some(fault);
        }
    }

    pub(super) fn test(&mut self, index: u16) -> Result<Outcome> {
        let at = usize::from(index);
        if matches!(self.slots[at], Slot::Pending(_)) && self.fault.is_none() {
            self.progress();
        }
        match &self.slots[at] {
            Slot::Done(sizes) => {
                let sizes = sizes.clone();
                self.slots[at] = Slot::Free;
                Ok(Outcome::Done(sizes))
            }
            Slot::Pending(_) => match &self.fault {
                Some(fault) => {
                    let fault = fault.clone();
                    self.slots[at] = Slot::Free;
                    Err(fault)
                }
                None => Ok(Outcome::Pending),
            },
            Slot::Free => Err(Fault::Argument(String::from(
                "a request was tested that is not in use: it was done before",
            ))),
        }
    }

    /// Ends it.
    pub fn close(&mut self) {
        if let Some(receiver) = self.receiver.take() {
            receiver.close();
        }
    }
}
