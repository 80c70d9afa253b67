//! What the sending end keeps of a message: as NCCL offers it, while it waits, and once it has
//! begun.

use core::ptr::NonNull;

use laxity_client::Permit;

use crate::arbiter::SubmittedFlow;
use crate::backend::Region;
use crate::context::Purpose;
use crate::origin::Origin;

/// What NCCL asks to be sent.
#[derive(Clone, Copy)]
pub struct Wish<'a> {
    /// Where.
    pub address: usize,
    /// How many bytes.
    pub bytes: usize,
    /// Which buffer of a group.
    pub tag: i32,
    /// Registration.
    pub region: Option<&'a Region>,
}

/// A message that NCCL wants to send and that may not go yet.
#[derive(Debug)]
pub(super) struct Offer {
    pub(super) flow: SubmittedFlow,
    pub(super) bytes: u64,
    pub(super) tag: i32,
    pub(super) since_ns: u64,
    pub(super) purpose: Purpose,
    pub(super) known: bool,
}

/// A message that was taken before its receiver posted.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) slot: u16,
    pub(super) address: usize,
    pub(super) bytes: usize,
    pub(super) tag: i32,
    /// NCCL keeps it registered until the request is done.
    region: Option<RegionPointer>,
    pub(super) origin: Option<Origin>,
}

/// A registration that NCCL keeps.
#[derive(Clone, Copy, Debug)]
struct RegionPointer(NonNull<Region>);

// SAFETY: leads to a `Region`, which is `Send` and `Sync`.
unsafe impl Send for RegionPointer {}

impl Kept {
    pub(super) fn new(slot: u16, wish: Wish<'_>, origin: Option<Origin>) -> Self {
        Self {
            slot,
            address: wish.address,
            bytes: wish.bytes,
            tag: wish.tag,
            region: wish.region.map(|region| RegionPointer(region.into())),
            origin,
        }
    }

    pub(super) fn wish(&self) -> Wish<'_> {
        Wish {
            address: self.address,
            bytes: self.bytes,
            tag: self.tag,
            // SAFETY: NCCL lets go of a registration only when the requests that use it are done.
            region: self.region.map(|region| unsafe { region.0.as_ref() }),
        }
    }
}

/// A message that was begun.
#[derive(Debug)]
pub(super) struct Underway {
    pub(super) number: u64,
    pub(super) flow: SubmittedFlow,
    pub(super) bytes: u64,
    pub(super) pushed: u64,
    /// Told to the arbiter as complete.
    pub(super) left: u64,
    pub(super) accounted: bool,
    pub(super) slot: u16,
    pub(super) done: bool,
    /// The host may test its receive first, and this only then.
    pub(super) was_kept: bool,
    /// Since when the next permit is waited for; 0 if it is not.
    pub(super) waits_since_ns: u64,
}

impl Underway {
    pub(super) fn is_over(&self) -> bool {
        self.done && self.left >= self.pushed
    }
}

/// By which permit a message begins, and after which wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decision {
    pub(super) permit: Permit,
    pub(super) waited_ns: u64,
    /// The wait was too long, and the message goes unscheduled.
    pub(super) overdue: bool,
}
