//! The receiving end. Buffers are posted, and complete in order.

use std::sync::Arc;

use super::TestOutcome;
use super::slots::{RequestSlot, Slots};
use crate::backend::{Buffer, GROUP_MAX, Memory, MemoryRegistration, Received, Receiver};
use crate::fault::{Fault, Result};
use crate::report::Report;

/// The receiving end of a connection.
pub struct ReceiveSide {
    receiver: Option<Box<dyn Receiver>>,
    report: Arc<Report>,
    slots: Slots,
    fault: Option<Fault>,
    received: Vec<Received>,
}

impl core::fmt::Debug for ReceiveSide {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("ReceiveSide").field("fault", &self.fault).finish_non_exhaustive()
    }
}

impl ReceiveSide {
    /// Returns the receiving end of a complete connection.
    pub fn new(receiver: Box<dyn Receiver>, report: Arc<Report>) -> Self {
        Self {
            receiver: Some(receiver),
            report,
            slots: Slots::new(),
            fault: None,
            received: Vec::new(),
        }
    }

    fn receiver(&mut self) -> Result<&mut Box<dyn Receiver>> {
        let closed = || Fault::Argument(String::from("the connection was closed"));
        self.receiver.as_mut().ok_or_else(closed)
    }

    pub(super) fn register(&mut self, memory: Memory) -> Result<MemoryRegistration> {
        self.receiver()?.register(memory)
    }

    pub(super) fn deregister(&mut self, region: MemoryRegistration) -> Result<()> {
        self.receiver()?.deregister(region)
    }

    /// Posts the buffers of one grouped receive. Returns the request's index, or `None` if NCCL has
    /// to ask again.
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
        let Some(slot) = self.slots.free() else {
            return Ok(None);
        };
        let post = if self.fault.is_some() {
            // `test` returns the fault.
            Some(u64::MAX)
        } else {
            self.receiver()?.post(buffers)
        };
        Ok(post.map(|post| {
            self.slots.set(slot, RequestSlot::Pending(post));
            slot
        }))
    }

    /// Flushes the buffers. Returns the request's index, or `None` if no flush is needed.
    ///
    /// # Errors
    /// There are too many buffers, or no request is free.
    pub fn flush(&mut self, buffers: &[Buffer<'_>]) -> Result<Option<u16>> {
        if buffers.len() > GROUP_MAX {
            return Err(Fault::Argument(String::from("too many buffers to flush")));
        }
        let Some(slot) = self.slots.free() else {
            return Err(Fault::Internal(String::from("no request is free for a flush")));
        };
        let post = self.receiver()?.flush(buffers);
        Ok(post.map(|post| {
            self.slots.set(slot, RequestSlot::Pending(post));
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
            self.slots.complete(post, sizes);
        }
        self.received = received;
        if let Err(fault) = result {
            self.fault = Some(fault);
        }
    }

    pub(super) fn test(&mut self, index: u16) -> Result<TestOutcome> {
        if self.slots.is_pending(index) && self.fault.is_none() {
            self.progress();
        }
        self.slots.outcome(index, self.fault.as_ref())
    }

    pub fn close(&mut self) {
        if let Some(receiver) = self.receiver.take() {
            receiver.close();
        }
    }
}
