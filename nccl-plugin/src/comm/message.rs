//! The sending end's records of a message: as NCCL offers it, while it waits, and after it began.

use core::ptr::NonNull;

use laxity_client::Permit;

use crate::arbiter::SubmittedFlow;
use crate::backend::{Buffer, MemoryRegistration};
use crate::context::Purpose;
use crate::origin::Operation;

/// A message that waits for its first permit.
#[derive(Debug)]
pub(super) struct PendingSend {
    pub(super) flow: SubmittedFlow,
    pub(super) bytes: u64,
    pub(super) since_ns: u64,
    pub(super) purpose: Purpose,
    pub(super) known: bool,
}

/// A message that was taken before its receiver posted.
#[derive(Debug)]
pub(super) struct EarlyMessage {
    pub(super) slot: u16,
    address: usize,
    bytes: usize,
    /// Registration of the memory. NCCL keeps it until the request is done.
    region: Option<RegionPointer>,
    pub(super) origin: Option<Operation>,
}

/// A pointer to a registration that NCCL keeps.
#[derive(Clone, Copy, Debug)]
struct RegionPointer(NonNull<MemoryRegistration>);

// SAFETY: the pointer leads to a `MemoryRegistration`, which is `Send` and `Sync`.
unsafe impl Send for RegionPointer {}

impl EarlyMessage {
    pub(super) fn new(slot: u16, buffer: Buffer<'_>, origin: Option<Operation>) -> Self {
        Self {
            slot,
            address: buffer.address,
            bytes: buffer.bytes,
            region: buffer.region.map(|region| RegionPointer(region.into())),
            origin,
        }
    }

    pub(super) fn buffer(&self) -> Buffer<'_> {
        Buffer {
            address: self.address,
            bytes: self.bytes,
            // SAFETY: NCCL ends a registration only when the requests that use it are done.
            region: self.region.map(|region| unsafe { region.0.as_ref() }),
        }
    }
}

#[derive(Debug)]
pub(super) struct InFlightMessage {
    pub(super) number: u64,
    pub(super) flow: SubmittedFlow,
    pub(super) bytes: u64,
    pub(super) pushed: u64,
    /// Bytes that were reported to the arbiter as complete.
    pub(super) left: u64,
    pub(super) accounted: bool,
    pub(super) slot: u16,
    pub(super) done: bool,
    /// Whether the message was kept before it began. The host may then test its receive first.
    pub(super) was_kept: bool,
    /// The time since which the message waits for its next permit. 0 if it doesn't wait.
    pub(super) waits_since_ns: u64,
}

impl InFlightMessage {
    pub(super) fn is_over(&self) -> bool {
        self.done && self.left >= self.pushed
    }
}

/// The permit by which a message begins, and the wait before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct FirstPermit {
    pub(super) permit: Permit,
    pub(super) waited_ns: u64,
    /// Whether the wait was too long, so that the message goes unscheduled.
    pub(super) overdue: bool,
}
