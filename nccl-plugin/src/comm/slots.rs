//! The requests of one end of a connection, by their index in NCCL's table.

use super::{REQUESTS, TestOutcome};
use crate::fault::{Fault, Result};

#[derive(Clone, Debug)]
pub(super) enum RequestSlot {
    /// The request is not in use.
    Free,
    /// The request is in progress. At the receiving end, the number is that of the post.
    Pending(u64),
    /// The request is complete, with the message's bytes. A flush has none.
    Done(Option<usize>),
}

#[derive(Debug)]
pub(super) struct Slots {
    slots: Box<[RequestSlot]>,
    next: usize,
}

impl Slots {
    pub(super) fn new() -> Self {
        Self { slots: vec![RequestSlot::Free; REQUESTS].into(), next: 0 }
    }

    /// Returns the index of a request that is not in use. It stays free until [`Slots::set`].
    pub(super) fn free(&mut self) -> Option<u16> {
        let around = (self.next..REQUESTS).chain(0..self.next);
        let found = { around }.find(|at| matches!(self.slots[*at], RequestSlot::Free))?;
        self.next = (found + 1) % REQUESTS;
        Some(found as u16)
    }

    pub(super) fn set(&mut self, at: u16, slot: RequestSlot) {
        self.slots[usize::from(at)] = slot;
    }

    pub(super) fn is_pending(&self, at: u16) -> bool {
        matches!(self.slots[usize::from(at)], RequestSlot::Pending(_))
    }

    pub(super) fn complete(&mut self, post: u64, bytes: Option<usize>) {
        let waits =
            |slot: &&mut RequestSlot| matches!(slot, RequestSlot::Pending(at) if *at == post);
        if let Some(slot) = self.slots.iter_mut().find(waits) {
            *slot = RequestSlot::Done(bytes);
        }
    }

    /// Returns the result of `test` for a request. A request that is over becomes free.
    pub(super) fn outcome(&mut self, at: u16, fault: Option<&Fault>) -> Result<TestOutcome> {
        if self.is_pending(at) && fault.is_none() {
            return Ok(TestOutcome::Pending);
        }
        match core::mem::replace(&mut self.slots[usize::from(at)], RequestSlot::Free) {
            RequestSlot::Done(bytes) => Ok(TestOutcome::Done(bytes)),
            RequestSlot::Pending(_) => fault.cloned().map_or(Ok(TestOutcome::Pending), Err),
            RequestSlot::Free => Err(Fault::Argument(
                "a request was tested that is not in use: it was done before".into(),
            )),
        }
    }
}
