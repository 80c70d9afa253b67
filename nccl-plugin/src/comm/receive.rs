//! The receiving end. Buffers are posted, and complete in order.

use std::sync::Arc;

use super::TestOutcome;
use super::slots::{RequestSlot, Slots};
use crate::backend::{Buffer, Memory, MemoryRegistration, Received, Receiver};
use crate::fault::{Fault, Result};
use crate::report::Report;

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
        let closed = || Fault::Argument("the connection was closed".into());
        self.receiver.as_mut().ok_or_else(closed)
    }

    pub(super) fn register(&mut self, memory: Memory) -> Result<MemoryRegistration> {
        self.receiver()?.register(memory)
    }

    pub(super) fn deregister(&mut self, region: MemoryRegistration) -> Result<()> {
        self.receiver()?.deregister(region)
    }

    /// Posts a buffer. Returns the request's index, or `None` if NCCL has to ask again.
    pub fn post(&mut self, buffer: Buffer<'_>) -> Result<Option<u16>> {
        let Some(slot) = self.slots.free() else { return Ok(None) };
        let post = if self.fault.is_some() {
            // `test` returns the fault.
            Some(u64::MAX)
        } else {
            self.receiver()?.post(buffer)
        };
        Ok(post.map(|post| {
            self.slots.set(slot, RequestSlot::Pending(post));
            slot
        }))
    }

    /// Flushes a buffer. Returns the request's index, or `None` if no flush is needed.
    ///
    /// # Errors
    /// The connection was closed, or no request is free.
    pub fn flush(&mut self, buffer: Buffer<'_>) -> Result<Option<u16>> {
        let Some(slot) = self.slots.free() else {
            return Err(Fault::Internal("no request is free for a flush".into()));
        };
        let post = self.receiver()?.flush(buffer);
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
        for Received { post, bytes } in received.drain(..) {
            self.report.received(bytes.unwrap_or(0) as u64);
            self.slots.complete(post, bytes);
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
