//! What a submit gives, and what comes of it.

use laxity_shm::producer::SlotRef;

/// A flow that was submitted. Poll or wait until a permit is `last` and report every byte complete,
/// or cancel it with [`crate::Lane::cancel`]; a dropped ticket does neither. Then its slot is in
/// use until the lane is dropped, and what was permitted counts as in flight until the daemon gives
/// up on it (`completion_timeout`), after which it does not schedule a process that loses much for
/// a while. Dropping the lane withdraws whatever is left.
///
/// Four words, the same in C: a submit on credit writes little else. The default is one that is
/// done.
#[derive(Debug, Default)]
#[must_use = "a flow may be sent only as far as its ticket is permitted"]
#[repr(C)]
pub struct Ticket {
    /// Sequence of its record; 0 if the daemon was never told, or needs to hear no more.
    pub(crate) tag: u64,
    pub(crate) total: u64,
    pub(crate) permitted: u64,
    pub(crate) mark: Mark,
}

/// `slot (16) | phase (2) | how (2) | level (8) | dscp (8) | seat (28)`, from the lowest bit. The
/// seat is the number of the binding that the flow was submitted from: 0 if none, or not any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Mark(u64);

/// Phases. Any other number, which only C can make, is as good as "done".
const GATED: u64 = 1 << 16;
const READY: u64 = 2 << 16;
const PHASE: u64 = 3 << 16;
/// How a flow that is ready got so.
const BYPASS: u64 = 1 << 18;
const CREDIT: u64 = 2 << 18;
const LEVEL_SHIFT: u32 = 20;
const DSCP_SHIFT: u32 = 28;
const SEAT_SHIFT: u32 = 36;

impl Mark {
    /// All of it was permitted and collected, or never will be.
    pub(crate) const DONE: Self = Self(0);
    /// All of it may go, without the daemon, which does not know of it.
    pub(crate) const BYPASSED: Self = Self(READY | BYPASS);

    /// A flow of the binding `seat` that is done; to be turned into another.
    pub(crate) const fn of(seat: u64) -> Self {
        Self(seat << SEAT_SHIFT)
    }

    /// Waits for permits in this slot.
    #[inline]
    pub(crate) const fn gated(self, slot: u16) -> Self {
        Self(self.0 & SEAT_MASK | slot as u64 | GATED)
    }

    /// All of it may go on credit; `mark` is [`laxity_shm::layout::Header::credit_mark`].
    #[inline]
    pub(crate) const fn on_credit(self, mark: u16) -> Self {
        let (level, dscp) = (mark as u64 & 0xff, mark as u64 >> 8);
        Self(self.0 & SEAT_MASK | READY | CREDIT | level << LEVEL_SHIFT | dscp << DSCP_SHIFT)
    }

    /// All of it may go, reported.
    pub(crate) const fn observed(self) -> Self {
        Self(self.0 & SEAT_MASK | READY)
    }

    /// Nothing more to permit; completions still count.
    #[inline]
    const fn done(self) -> Self {
        Self(self.0 & SEAT_MASK)
    }

    /// Whether it was submitted from the binding `seat`, and the daemon knows of it.
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
        Permit {
            bytes,
            level,
            dscp,
            last: true,
            bypassed: self.0 & BYPASS != 0,
        }
    }
}

const SEAT_MASK: u64 = u64::MAX << SEAT_SHIFT;
/// Numbers of bindings wrap here.
pub(crate) const SEATS: u64 = 1 << (64 - SEAT_SHIFT);

impl Ticket {
    /// The default: one that is done.
    pub const DONE: Self = Self {
        tag: 0,
        total: 0,
        permitted: 0,
        mark: Mark::DONE,
    };

    /// A flow that the daemon is not told of.
    pub(crate) const fn bypassed(bytes: u64) -> Self {
        Self {
            tag: 0,
            total: bytes,
            permitted: 0,
            mark: Mark::BYPASSED,
        }
    }

    /// Bytes permitted and collected so far.
    #[must_use]
    pub fn permitted(&self) -> u64 {
        self.permitted
    }

    /// Bytes of the flow.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Whether the daemon counts its bytes, or did: it was submitted to one and not withdrawn.
    #[inline]
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.mark.0 & SEAT_MASK != 0
    }

    /// Everything was permitted and collected, or the flow was withdrawn.
    #[must_use]
    #[inline]
    pub fn is_done(&self) -> bool {
        !self.mark.is_gated() && !self.mark.is_ready()
    }

    #[inline]
    pub(crate) fn at(&self) -> SlotRef {
        SlotRef {
            slot: self.mark.slot(),
            tag: self.tag,
        }
    }

    /// The permit of a flow that may go as a whole.
    #[inline]
    pub(crate) fn collect(&mut self) -> Permit {
        let permit = self.mark.permit(self.total);
        self.permitted = self.total;
        self.finish();
        permit
    }

    /// Nothing more to permit.
    #[inline]
    pub(crate) fn finish(&mut self) {
        self.mark = self.mark.done();
    }

    /// Bytes not permitted so far, which from here on are: without the daemon.
    pub(crate) fn rest(&mut self) -> Permit {
        let bytes = self.total.saturating_sub(self.permitted);
        self.permitted = self.total;
        self.mark = Mark::DONE;
        Mark::BYPASSED.permit(bytes)
    }
}

/// Leave to send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Permit {
    /// Bytes more, beyond those of earlier permits of this ticket.
    pub bytes: u64,
    /// Level, 1 the highest, 255 the scavenger; 0 if nobody decided (bypassed, observed).
    pub level: u8,
    /// DSCP to mark them with; 0 (leave the marking alone) if nobody decided.
    pub dscp: u8,
    /// Nothing more will come for this ticket.
    pub last: bool,
    /// Permitted without the daemon.
    pub bypassed: bool,
}
