//! The requests of one end of a connection, by their index in NCCL's table.

use smallvec::SmallVec;

use super::{Outcome, REQUESTS};
use crate::backend::GROUP_MAX;
use crate::fault::{Fault, Result};

#[derive(Clone, Debug)]
pub(super) enum Slot {
    /// The request is not in use.
    Free,
    /// The request is in progress. At the receiving end, the number is that of the post.
    Pending(u64),
    /// The request is complete, with these sizes.
    Done(SmallVec<[usize; GROUP_MAX]>),
    /// The request was refused when it was offered.
    Refused(Fault),
}

#[derive(Debug)]
pub(super) struct Slots {
    slots: Box<[Slot]>,
    next: usize,
}

impl Slots {
    pub(super) fn new() -> Self {
        Self { slots: vec![Slot::Free; REQUESTS].into(), next: 0 }
    }

    /// Returns the index of a request that is not in use. It stays free until [`Slots::set`].
    pub(super) fn free(&mut self) -> Option<u16> {
        let around = (self.next..REQUESTS).chain(0..self.next);
        let found = { around }.find(|at| matches!(self.slots[*at], Slot::Free))?;
        self.next = (found + 1) % REQUESTS;
        Some(found as u16)
    }

    pub(super) fn set(&mut self, at: u16, slot: Slot) {
        self.slots[usize::from(at)] = slot;
    }

    pub(super) fn is_pending(&self, at: u16) -> bool {
        matches!(self.slots[usize::from(at)], Slot::Pending(_))
    }

    pub(super) fn complete(&mut self, post: u64, sizes: SmallVec<[usize; GROUP_MAX]>) {
        let waits = |slot: &&mut Slot| matches!(slot, Slot::Pending(number) if *number == post);
        if let Some(slot) = self.slots.iter_mut().find(waits) {
            *slot = Slot::Done(sizes);
        }
    }

    /// Returns the result of `test` for a request. A request that is over becomes free.
    pub(super) fn outcome(&mut self, at: u16, fault: Option<&Fault>) -> Result<Outcome> {
        if self.is_pending(at) && fault.is_none() {
            return Ok(Outcome::Pending);
        }
        match core::mem::replace(&mut self.slots[usize::from(at)], Slot::Free) {
            Slot::Done(sizes) => Ok(Outcome::Done(sizes)),
            Slot::Refused(fault) => Err(fault),
            Slot::Pending(_) => fault.cloned().map_or(Ok(Outcome::Pending), Err),
            Slot::Free => Err(Fault::Argument(String::from(
                "a request was tested that is not in use: it was done before",
            ))),
        }
    }
}
