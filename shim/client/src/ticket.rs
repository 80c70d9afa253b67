//! Tickets of submitted flows, and their permits.

use laxity_shm::producer::SlotRef;

/// A flow that was submitted. Poll or wait until a permit is `last`, and report every byte
/// complete. Or cancel the flow with [`crate::Lane::cancel`]. A dropped ticket does neither: its
/// slot stays in use until the lane is dropped, and permitted bytes count as in flight until the
/// daemon writes them off (`completion_timeout`). The daemon then doesn't schedule a process with
/// large losses for a while. Dropping the lane withdraws the rest of all flows.
///
/// A ticket has four words, the same in C, since a submit on credit writes little else. The default
/// is a ticket that is done.
#[derive(Debug, Default)]
#[must_use = "a flow may be sent only as far as its ticket is permitted"]
#[repr(C)]
pub struct Ticket {
    /// Tag of the flow's record. 0 if the daemon needs no reports of the flow.
    pub(crate) tag: u64,
    pub(crate) total: u64,
    pub(crate) permitted: u64,
    pub(crate) state: TicketState,
}

/// The state of a ticket: `slot (16) | phase (2) | how (2) | level (8) | dscp (8) | seat (28)`,
/// from the lowest bit. The seat is the number of the binding that submitted the flow, or 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct TicketState(u64);

/// Phases of a flow. Any other number, which only C can make, means "done".
const GATED: u64 = 1 << 16;
const READY: u64 = 2 << 16;
const PHASE: u64 = 3 << 16;
/// How a flow became ready.
const BYPASS: u64 = 1 << 18;
const CREDIT: u64 = 2 << 18;
const LEVEL_SHIFT: u32 = 20;
const DSCP_SHIFT: u32 = 28;
const SEAT_SHIFT: u32 = 36;

impl TicketState {
    /// The state of a flow that is permitted and collected completely, or cancelled.
    pub(crate) const DONE: Self = Self(0);
    /// The state of a flow that may go completely, and that the daemon doesn't have.
    pub(crate) const BYPASSED: Self = Self(READY | BYPASS);

    /// Returns the state of a done flow of the binding `seat`, from which other states are made.
    pub(crate) const fn of(seat: u64) -> Self {
        Self(seat << SEAT_SHIFT)
    }

    /// Returns the state of a flow that waits for permits in this slot.
    #[inline]
    pub(crate) const fn gated(self, slot: u16) -> Self {
        Self(self.0 & SEAT_MASK | slot as u64 | GATED)
    }

    /// Returns the state of a flow that may go completely on credit. `mark` is
    /// [`laxity_shm::layout::Header::credit_mark`].
    #[inline]
    pub(crate) const fn on_credit(self, mark: u16) -> Self {
        let (level, dscp) = (mark as u64 & 0xff, mark as u64 >> 8);
        Self(self.0 & SEAT_MASK | READY | CREDIT | level << LEVEL_SHIFT | dscp << DSCP_SHIFT)
    }

    /// Returns the state of a flow that may go completely and is only reported.
    pub(crate) const fn observed(self) -> Self {
        Self(self.0 & SEAT_MASK | READY)
    }

    /// Returns the state of a flow whose bytes are all permitted. Completions may still follow.
    #[inline]
    const fn done(self) -> Self {
        Self(self.0 & SEAT_MASK)
    }

    /// Reports whether the binding `seat` submitted the flow, and the daemon has it.
    #[inline]
    pub(crate) const fn is_of(self, seat: u64) -> bool {
        self.0 >> SEAT_SHIFT == seat && seat != 0
    }

    #[inline]
    pub(crate) const fn is_gated(self) -> bool {
        self.0 & PHASE == GATED
    }

    #[inline]
    pub(crate) const fn is_ready(self) -> bool {
        self.0 & PHASE == READY
    }

    #[inline]
    pub(crate) const fn is_on_credit(self) -> bool {
        self.0 & (PHASE | CREDIT) == READY | CREDIT
    }

    #[inline]
    pub(crate) const fn slot(self) -> u16 {
        self.0 as u16
    }

    #[inline]
    const fn permit(self, bytes: u64) -> Permit {
        let level = (self.0 >> LEVEL_SHIFT) as u8;
        let dscp = (self.0 >> DSCP_SHIFT) as u8;
        Permit { bytes, level, dscp, last: true, bypassed: self.0 & BYPASS != 0 }
    }
}

const SEAT_MASK: u64 = u64::MAX << SEAT_SHIFT;
/// Number of different binding numbers, after which they wrap.
pub(crate) const SEATS: u64 = 1 << (64 - SEAT_SHIFT);

impl Ticket {
    /// A ticket that is done, which is the default.
    pub const DONE: Self = Self { tag: 0, total: 0, permitted: 0, state: TicketState::DONE };

    /// Returns the ticket of a flow that is not sent to the daemon.
    pub(crate) const fn bypassed(bytes: u64) -> Self {
        Self { tag: 0, total: bytes, permitted: 0, state: TicketState::BYPASSED }
    }

    /// Returns the bytes permitted and collected so far.
    pub fn permitted(&self) -> u64 {
        self.permitted
    }

    /// Returns the flow's size in bytes.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Reports whether the daemon counts or counted the flow's bytes. That is so if it was
    /// submitted to a daemon and not withdrawn.
    #[inline]
    pub fn is_known(&self) -> bool {
        self.state.0 & SEAT_MASK != 0
    }

    /// Reports whether everything was permitted and collected, or the flow was withdrawn.
    #[inline]
    pub fn is_done(&self) -> bool {
        !self.state.is_gated() && !self.state.is_ready()
    }

    #[inline]
    pub(crate) fn at(&self) -> SlotRef {
        SlotRef { slot: self.state.slot(), tag: self.tag }
    }

    /// Returns the permit of a flow whose rest may go completely.
    #[inline]
    pub(crate) fn collect(&mut self) -> Permit {
        let permit = self.state.permit(self.total.saturating_sub(self.permitted));
        self.permitted = self.total;
        self.finish();
        permit
    }

    /// Marks all bytes of the flow as permitted.
    #[inline]
    pub(crate) fn finish(&mut self) {
        self.state = self.state.done();
    }

    /// Permits all remaining bytes without the daemon.
    pub(crate) fn rest(&mut self) -> Permit {
        let bytes = self.total.saturating_sub(self.permitted);
        self.permitted = self.total;
        self.state = TicketState::DONE;
        TicketState::BYPASSED.permit(bytes)
    }
}

/// A permit to send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Permit {
    /// Number of further bytes, beyond those of earlier permits of this ticket.
    pub bytes: u64,
    /// Level: 1 is the highest, 255 the scavenger. 0 if there is none (bypassed, observed).
    pub level: u8,
    /// DSCP of the bytes. 0 (keep the marking) if the daemon decided none.
    pub dscp: u8,
    /// Whether this is the ticket's last permit.
    pub last: bool,
    /// Whether the bytes are permitted without the daemon.
    pub bypassed: bool,
}
