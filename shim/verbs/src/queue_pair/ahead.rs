//! What goes before the daemon hears of it: small work requests while nothing waits on any port.
//!
//! A record for each would cost more than the post, and tells a daemon that has nothing to decide
//! nothing. So they go on a loan of the lane's credit, and are told of as one flow when it is used
//! up or its time is over. How far the daemon may be behind is bounded: in bytes, in work requests
//! and in time. It is told of each again as soon as something waits anywhere.

use laxity_client::{Flow, Lane, Loan, memory, scope};
use laxity_ibverbs::{ibv_send_wr, ibv_wr_opcode};

use crate::work;

/// Bytes of a queue pair that the daemon may not know of: little against the window of any port
/// that RDMA runs on.
const BYTES: u64 = 64 << 10;
/// Work requests of a queue pair that it may not know of.
const REQUESTS: u32 = 256;
/// Larger ones are told of one by one.
const SMALL: u64 = 8 << 10;

/// What of a queue pair went ahead, and may.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    loan: Option<Loan>,
    /// What it is for.
    opcode: ibv_wr_opcode::Type,
    /// What is left of it.
    bytes: u64,
    requests: u32,
    /// All that went, as one flow.
    untold: Flow,
}

impl Ahead {
    /// Whether a work request may go ahead; its bytes. It is not compared with the flow that the
    /// loan is for, since that takes as long as telling: where neither threads nor memory say
    /// anything, the opcode says it all.
    ///
    /// # Safety
    /// As for [`work::sges`].
    #[inline]
    pub(super) unsafe fn takes(&self, wr: &ibv_send_wr) -> Option<u64> {
        let loan = self.loan.as_ref()?;
        let may = self.opcode == wr.opcode
            && self.requests > 0
            && memory::is_silent()
            && scope::is_silent()
            && loan.holds();
        if !may {
            return None;
        }
        // SAFETY: upheld by the caller; a loan is for an opcode that moves what they name.
        let bytes = work::length(unsafe { work::sges(wr) });
        (bytes <= SMALL && bytes <= self.bytes).then_some(bytes)
    }

    /// It went.
    #[inline]
    pub(super) fn went(&mut self, bytes: u64) {
        self.bytes -= bytes;
        self.requests -= 1;
        self.untold.bytes += bytes;
    }

    /// Tells of what went; nothing goes ahead for now.
    pub(super) fn repay(&mut self, lane: &mut Lane) {
        if let Some(loan) = self.loan.take() {
            lane.repay(&loan, &self.untold);
        }
    }

    /// `flow` was permitted as a work request of `opcode`: more may follow.
    pub(super) fn follow(&mut self, lane: &mut Lane, opcode: ibv_wr_opcode::Type, flow: &Flow) {
        let by_opcode = memory::is_silent() && scope::is_silent() && flow.deadline_ns == 0;
        if self.loan.is_some() || flow.bytes > SMALL || !by_opcode {
            return;
        }
        if let Some(loan) = lane.lend(flow, BYTES) {
            self.opcode = opcode;
            self.bytes = loan.bytes();
            self.requests = REQUESTS;
            self.untold = Flow { bytes: 0, ..*flow };
            self.loan = Some(loan);
        }
    }

    /// Whether nothing may go ahead, and all is told.
    pub(super) const fn is_idle(&self) -> bool {
        self.loan.is_none()
    }
}
