//! What a submit gives, and what comes of it.

use laxity_shm::producer::SlotRef;

/// A flow that was submitted. Poll or wait until a grant is `last`, or cancel it: dropped before
/// that, it holds its slot until the lane is dropped.
#[derive(Debug)]
#[must_use = "a flow may be sent only as far as its ticket is granted"]
pub struct Ticket {
    /// Place and tag; tag 0 if the daemon was never told.
    pub(crate) at: SlotRef,
    /// The seat that it was submitted from.
    pub(crate) seat: u64,
    pub(crate) total: u64,
    pub(crate) granted: u64,
    pub(crate) phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Waits for permits.
    Gated,
    /// All of it may go, with this grant, which was not collected yet.
    Ready { level: u8, dscp: u8, bypassed: bool },
    /// All of it was granted.
    Done,
}

impl Ticket {
    /// Bytes granted and collected so far.
    #[must_use]
    pub fn granted(&self) -> u64 {
        self.granted
    }

    /// Bytes of the flow.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Everything was granted and collected.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.phase == Phase::Done
    }
}

/// Leave to send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// Bytes more, beyond those of earlier grants of this ticket.
    pub bytes: u64,
    /// Level, 1 the highest, 255 the scavenger; 0 if nobody decided (bypassed, observed).
    pub level: u8,
    /// DSCP to mark them with; 0 (leave the marking alone) if nobody decided.
    pub dscp: u8,
    /// Nothing more will come for this ticket.
    pub last: bool,
    /// Granted without the daemon.
    pub bypassed: bool,
}
